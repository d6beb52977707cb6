"""The same under plait: ``python run.py STEPS CORE FOLDER`` prints the time at which it called plait."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

from loop import job

import plait
from plait.cluster import Cluster


def main(steps: int, core: int, folder: Path) -> None:
    found = Cluster.detect(devices=1)
    cluster = replace(found, devices=(replace(found.devices[0], cores=(core,)),))
    print(time.time(), flush=True)
    plait.run(replace(job(), steps=steps), cluster, strategy="data", directory=folder, show=False)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
