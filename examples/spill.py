"""Several models at once in a small memory: the jobs of text.py take turns, each as if it were alone.

    python examples/spill.py --steps 20 --memory 1.5GiB

Interrupt it, or kill it, and run it again with --resume.
"""

import argparse
import dataclasses
from pathlib import Path

from plait.job import read_jobs
from plait.spill import fit

if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--memory", default="1.5GiB")
    options.add_argument("--devices", type=int, default=1)
    options.add_argument("--directory", default="runs/spill")
    options.add_argument("--resume", action="store_true")
    given = options.parse_args()
    jobs = read_jobs(Path(__file__).parent / "text.py")
    outcomes = fit(
        [dataclasses.replace(job, steps=given.steps) for job in jobs],
        memory=given.memory,
        devices=given.devices,
        directory=given.directory,
        resume=given.resume,
    )
    print(outcomes)
