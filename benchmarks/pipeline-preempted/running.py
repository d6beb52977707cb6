"""Runs the workers of the pipeline benchmarks in a lab whose links change when the workers ask for it."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from plait.bench import Measured
from plait.bench.machine import Activity, Moment
from plait.lab import Lab

WORKER = Path(__file__).with_name("worker.py")
EMULATED = Path(__file__).with_name("stage.py")
_numbers = count(1)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """All steps of one run of the workers."""

    steps: list[dict[str, Any]]
    activity: Activity
    attempts: int = 1

    def of(self, side: str) -> list[dict[str, Any]]:
        """The steps of a side, in their order."""
        return [step for step in self.steps if step["side"] == side]

    def step_ms(self, side: str, phases: Sequence[int]) -> float:
        """A side's milliseconds a step in some phases, each phase counting alike."""
        return statistics.mean(statistics.mean(self.in_phase(side, phase)) for phase in phases)

    def in_phase(self, side: str, phase: int) -> list[float]:
        """Milliseconds of a side's steps in a phase."""
        return [step["ms"] for step in self.of(side) if step["phase"] == phase]

    def measured(self, side: str, rounds: Sequence[Sequence[int]], together: int) -> Measured:
        """Milliseconds a step, a figure for each round of phases."""
        return Measured(
            name=side,
            values=tuple(self.step_ms(side, phases) for phases in rounds),
            better="lower",
            activity=self.activity,
            attempts=self.attempts,
            together=together,
        )

    def compared(self, sides: Sequence[str], rounds: Sequence[Sequence[int]]) -> dict[str, Measured]:
        """Sides that were measured by turns."""
        together = next(_numbers)
        return {side: self.measured(side, rounds, together) for side in sides}


def run(
    config: dict[str, Any],
    *,
    hosts: int,
    slowest: str,
    cores: str | None = None,
    timeout_s: float = 900.0,
    retries: int = 0,
) -> Ran:
    """Run the workers; again where others disturbed them, and the calmest run is kept.

    The lab starts at its slowest rate: how large the packets of a connection are is decided when it is made,
    and packets made for a fast link would hold up others for milliseconds on a slow one.
    """
    tried: list[Ran] = []
    while not tried or (tried[-1].activity.disturbed and len(tried) <= retries):
        tried.append(_attempt(config, hosts, slowest, cores, timeout_s))
    best = min(tried, key=lambda one: one.activity.steal + one.activity.others)
    return Ran(steps=best.steps, activity=best.activity, attempts=len(tried))


def _attempt(config: dict[str, Any], hosts: int, slowest: str, cores: str | None, timeout_s: float) -> Ran:
    lines: list[str] = []
    before = Moment.now()
    with tempfile.TemporaryDirectory() as folder, Lab(hosts=hosts, rate=slowest, cores=cores) as lab:

        def show(line: str) -> None:
            if " | SET " not in line:
                lines.append(line)
                return
            request = json.loads(line.split(" | SET ", 1)[1])
            for host in range(hosts):
                lab.set_rate(request["hosts"].get(str(host), request["rate"]), host)
            (Path(folder) / f"set-{request['number']}").touch()

        command = [
            sys.executable,
            str(WORKER),
            json.dumps({"stage": str(EMULATED), **config, "folder": folder}),
        ]
        # Resident memory is to follow the tensors in use: what is freed goes back to the system at once.
        env = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}
        outcome = lab.run(command, show=show, env=env, timeout_seconds=timeout_s)
    if outcome.exit_code:
        raise RuntimeError("the workers failed:\n" + "\n".join(lines))
    found = next(line.split(" | RESULT ", 1)[1] for line in lines if " | RESULT " in line)
    return Ran(steps=json.loads(found)["steps"], activity=Moment.now().since(before))
