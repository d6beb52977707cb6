"""What compressing gradients does to the loss that training ends with."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from plait.bench import Bench
from plait.lab import Lab

HERE = Path(__file__).parent
TRAINING = HERE.parent / "compress-training"
"""Where the GPT is, and the configuration of auto whose speed is measured there."""
AUTO = json.loads((TRAINING / "auto.json").read_text())
Sides = dict[str, dict[str, Any]]
"""What a Compression has, or the rank of PowerSGD, or nothing for fp32."""
SIDES: Sides = {"fp32": {}, "4 bits": {"bits": 4}, "auto": AUTO}
WITHIN = 1.0
"""Percent of the loss with fp32."""
POINTS = 0.5
"""Of accuracy, in percent of the samples."""
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""By degrees of freedom: 95% of Student's distribution lie within so many standard errors."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean, and how far it may be off."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """The 95% confidence interval of the mean of what is normally distributed."""
        count = len(values)
        return cls(
            mean=statistics.mean(values),
            half=STUDENT[count - 1] * statistics.stdev(values) / math.sqrt(count),
        )

    @property
    def farthest(self) -> float:
        """Of the interval, from zero."""
        return abs(self.mean) + self.half


def train(
    task: str, *, sides: dict[str, dict[str, Any]], seeds: int, steps: int, seed: int
) -> dict[str, Any]:
    """What every side came to, a row a seed."""
    lines: list[str] = []
    usable = sorted(os.sched_getaffinity(0))
    cores = ":".join(map(str, usable[:2])) if len(usable) > 1 else None
    config = {"task": task, "sides": sides, "seeds": seeds, "steps": steps, "seed": seed}
    with Lab(hosts=2, cores=cores) as lab:
        outcome = lab.run(
            [sys.executable, str(HERE / "worker.py"), json.dumps(config)],
            env={"PYTHONPATH": str(TRAINING)},
            show=lines.append,
            timeout_seconds=4 * 3600,  # on a busy machine it takes longer, with the same outcome
        )
    if outcome.exit_code:
        raise RuntimeError("the workers failed:\n" + "\n".join(lines))
    rows = [json.loads(line.split(" | ", 1)[1]) for line in lines if line.startswith('host0 | {"side"')]
    return {side: [row for row in rows if row["side"] == side] for side in sides}


def compare(bench: Bench, task: str, found: dict[str, Any], side: str) -> None:
    """One side's runs against those with fp32, seed by seed."""
    plain, rows = found["fp32"], found[side]
    loss = statistics.mean(row["loss"] for row in plain)
    pairs = list(zip(rows, plain, strict=True))
    worse = Interval.of([100 * (row["loss"] - base["loss"]) / loss for row, base in pairs])
    lost = Interval.of([100 * (base["accuracy"] - row["accuracy"]) for row, base in pairs])
    bits = statistics.mean(row["mean_bits"] for row in rows) if "mean_bits" in rows[0] else None
    of = f"{task}, {side}" if bits is None else f"{task}, {side} ({bits:.2f} on the wire)"
    most, points = (WITHIN, POINTS) if bits is not None and not bench.quick else (None, None)
    bench.case(f"{of}: loss more than fp32", worse.mean, unit=f"% ± {worse.half:.2f}", better="lower")
    bench.case(f"{of}: farthest end of that", worse.farthest, unit="%", better="lower", at_most=most)
    if task == "convnet":
        unit = f"points ± {lost.half:.2f}"
        bench.case(f"{of}: accuracy lost", lost.mean, unit=unit, better="lower", at_most=points)
    if "changes" in rows[0]:
        changes = statistics.mean(row["changes"] for row in rows)
        bench.case(f"{task}, {side}: changes of bits in a run", changes, unit="times", better="higher")


def ask(bench: Bench, task: str, sides: Sides, steps: int) -> None:
    seeds = bench.pick(quick=2, full=5)
    bench.configure(seeds=seeds, **{f"{task} steps": steps})
    found = train(task, sides=sides, seeds=seeds, steps=steps, seed=bench.seed)
    loss = statistics.mean(row["loss"] for row in found["fp32"])
    spread = statistics.stdev(row["loss"] for row in found["fp32"])
    bench.case(f"{task}, fp32: held-out loss", loss, unit=f"nats ± {spread:.3f}", better="lower")
    if task == "convnet":
        accuracy = 100 * statistics.mean(row["accuracy"] for row in found["fp32"])
        bench.case(f"{task}, fp32: accuracy", accuracy, unit="%", better="higher")
    for side in sides:
        if side != "fp32":
            compare(bench, task, found, side)


def run(bench: Bench) -> None:
    bench.configure(auto=AUTO, ranks=2, threads=1, within_percent=WITHIN, within_points=POINTS)
    ask(bench, "GPT", SIDES, bench.pick(quick=60, full=1200))
    if bench.quick:
        bench.skip("convnet", "a full run has it")
        return
    if find_spec("sklearn") is None:
        bench.skip("convnet", "scikit-learn, which has the digits, is not installed")
        return
    ask(bench, "convnet", SIDES, 300)
