"""A step under ``plait run`` on one device against the same step in a loop by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import plait
from plait.bench import Bench
from plait.cluster import Cluster

sys.path.insert(0, str(Path(__file__).parent))

from loop import UNCOUNTED, job

HERE = Path(__file__).parent


def by_hand(steps: int, core: int) -> float:
    """Milliseconds a step."""
    words = [sys.executable, str(HERE / "loop.py"), str(steps), str(core)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def run_once(steps: int, cluster: Cluster, starting: list[float]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        begun = time.time()
        done = plait.run(
            replace(job(), steps=steps),
            cluster,
            strategy="data",
            directory=Path(folder) / "run",
            show=False,
        )
        rows = [json.loads(line) for line in (done.directory / "metrics.jsonl").read_text().splitlines()]
        at = [row["time"] for row in rows if "loss" in row]
        starting.append(at[0] - begun)
        return 1e3 * (at[-1] - at[UNCOUNTED - 1]) / (len(at) - UNCOUNTED)


def run(bench: Bench) -> None:
    steps = bench.pick(quick=60, full=200)
    core = sorted(os.sched_getaffinity(0))[0]
    found = Cluster.detect(devices=1)
    cluster = replace(found, devices=(replace(found.devices[0], cores=(core,)),))
    bench.configure(steps=steps, uncounted=UNCOUNTED, core=core)
    starting: list[float] = []
    ours, plain = bench.interleave(
        {"plait run": lambda: run_once(steps, cluster, starting), "by hand": lambda: by_hand(steps, core)},
        repetitions=bench.pick(quick=3, full=7),
        better="lower",
        retries=1,
    )
    bench.case(
        "a step under plait run", ours, unit="ms", against=("a loop by hand", plain), at_least=0.98
    )  # at most 2% more
    bench.case(
        "from the call to the first step's end", sum(starting) / len(starting), unit="s", better="lower"
    )
