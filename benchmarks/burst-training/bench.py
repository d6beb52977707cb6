"""How much faster a fixed batch trains when each block is only as wide as it pays."""

from __future__ import annotations

import json
import os
import statistics
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from plait.bench import Bench, Measured
from plait.bench.machine import Activity, Moment
from plait.lab import Lab
from plait.lab.network import missing

WORKER = Path(__file__).with_name("worker.py")
BATCH = 32
_numbers = count(1)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What came of one run of the workers."""

    hosts: int
    sides: dict[str, Measured]
    """Milliseconds a step."""
    result: dict[str, Any]

    @property
    def predicted_ms(self) -> float:
        return float(self.result["predicted_ms"])

    @property
    def widths(self) -> list[int]:
        return list(self.result["widths"])


def attempt(config: dict[str, Any], hosts: int, cores: str | None) -> tuple[Activity, dict[str, Any]]:
    """One run from start to end, and what else the machine did meanwhile."""
    lines: list[str] = []
    before = Moment.now()
    with Lab(hosts=hosts, rate="1gbit", cores=cores) as lab:
        command = [sys.executable, str(WORKER), json.dumps(config)]
        outcome = lab.run(command, show=lines.append, timeout_seconds=900)
    if outcome.exit_code:
        raise RuntimeError("the workers failed:\n" + "\n".join(lines))
    found = next(line.split(" | RESULT ", 1)[1] for line in lines if " | RESULT " in line)
    return Moment.now().since(before), json.loads(found)


def train(bench: Bench, kind: str, *, hosts: int, rounds: int, compressed: bool, retries: int) -> Trained:
    """Every side's figures; all again where others disturbed them, and the calmest attempt is kept."""
    usable = sorted(os.sched_getaffinity(0))
    cores = ":".join(map(str, usable[:hosts])) if kind == "vgg" and len(usable) >= hosts else None
    config = {
        "kind": kind,
        "batch": BATCH,
        "seed": bench.seed,
        "warmup": 2 if kind == "vgg" else 1,
        "repetitions": 3 if kind == "vgg" else 1,  # of a profile; what is emulated takes the same every time
        "rounds": rounds,
        "measure_every": bench.pick(quick=3, full=3) if kind == "vgg" else 0,
        "compressed": compressed,
    }
    tried: list[tuple[Activity, dict[str, Any]]] = []
    while not tried or (tried[-1][0].disturbed and len(tried) <= retries):
        tried.append(attempt(config, hosts, cores))
    activity, result = min(tried, key=lambda one: one[0].steal + one[0].others)
    together = next(_numbers)
    sides = {
        name: Measured(
            name=name,
            values=tuple(values),
            better="lower",
            activity=activity,
            attempts=len(tried),
            together=together,
        ).scaled(1e3)
        for name, values in result["seconds"].items()
    }
    return Trained(hosts=hosts, sides=sides, result=result)


def check(trained: Trained) -> None:
    """All sides have trained on the same batch from the same weights: exact ones must have the same loss."""
    loss = trained.result["loss"]
    exact = [loss["one device"], loss["burst"]]
    if abs(exact[0] - exact[1]) > 1e-3 * abs(exact[0]):
        raise RuntimeError(f"the losses differ: {loss}")


def judge(bench: Bench, trained: Trained, label: str) -> None:
    """Against data parallelism on all hosts, and against the best that has one width for all."""
    sides, hosts = trained.sides, trained.hosts
    single = statistics.median(sides["one device"].values)
    limit = ("all compute on all hosts, no wire", single / hosts)
    bench.case(f"one device, {label}", sides["one device"], unit="ms a step")
    for width in range(2, hosts):
        bench.case(f"DDP on {width} hosts, {label}", sides[f"DDP {width}"], unit="ms a step")
    ddp = f"DDP {hosts}"
    bench.case(
        f"burst over {ddp}, {label}",
        sides["burst"],
        unit="ms a step",
        against=(f"DDP fp32 on {hosts} hosts", sides[ddp]),
        limit=limit,
        at_least=1.5,
    )
    plain = [name for name in sides if name == "one device" or (name[:3] == "DDP" and "bits" not in name)]
    best = min(plain, key=lambda name: sides[name].value)
    bench.case(
        f"burst over the best of one width, {label}",
        sides["burst"],
        unit="ms a step",
        against=(f"the best, {best}", sides[best]),
        limit=limit,
        at_least=1.2,
    )
    error = 100 * abs(trained.predicted_ms / sides["burst"].value - 1)
    bench.case(f"prediction off by, {label}", error, unit="% of the step", better="lower", at_most=15)
    if "burst 4 bits" in sides:
        bench.case(
            f"burst with 4 bits over DDP with 4 bits, {label}",
            sides["burst 4 bits"],
            unit="ms a step",
            against=("DDP with 4-bit gradients", sides["DDP 4 bits"]),
        )


def run(bench: Bench) -> None:
    lacking = missing()
    if lacking is not None:
        bench.skip("all", f"{lacking} is missing: there are no links to shape")
        return
    rounds, retries = bench.pick(quick=3, full=12), bench.pick(quick=0, full=1)
    real = train(bench, "vgg", hosts=2, rounds=rounds, compressed=True, retries=retries)
    check(real)
    judge(bench, real, "VGG-like, 2 hosts")
    bench.configure(
        batch=BATCH,
        rate="1gbit",
        threads=1,
        optimizer="SGD with momentum, fused",
        widths={"VGG-like": real.widths},
    )
    if bench.quick:
        bench.skip("4 hosts, emulated compute", "a full run has them")
        return
    emulated = train(bench, "timed", hosts=4, rounds=rounds, compressed=False, retries=retries)
    check(emulated)
    widths = emulated.widths
    if len({width for width in widths if width > 1}) < 2:
        raise RuntimeError(f"the plan was to have two widths above 1: {widths}")
    judge(bench, emulated, "4 hosts, emulated compute")
    bench.configure(widths={"VGG-like": real.widths, "emulated": widths})
