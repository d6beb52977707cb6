"""How long the command line takes to say anything."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

from plait.bench import Bench

SIDES = {
    "plait --help": [sys.executable, "-c", "from plait.cli import main; main()", "--help"],
    "python -c pass": [sys.executable, "-c", "pass"],
    "import torch": [sys.executable, "-c", "import torch"],
}


def start(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def run(bench: Bench) -> None:
    repetitions = bench.pick(quick=5, full=20)
    sides = {name: partial(start, command) for name, command in SIDES.items()}
    ours, python, torch = bench.interleave(
        sides, repetitions=repetitions, retries=bench.pick(quick=0, full=2)
    )
    bench.case(
        "plait --help",
        ours,
        unit="s",
        against=("import torch", torch),
        limit=("python -c pass", python),
        at_most=0.5,
        aim=0.25,
    )
    bench.case("python -c pass", python, unit="s")
    bench.case("import torch", torch, unit="s")
