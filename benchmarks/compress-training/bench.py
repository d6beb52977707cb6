"""How much faster data-parallel training is with compressed gradients, over slow links."""

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
from plait.errors import WorkerError
from plait.lab import Lab
from plait.lab.network import missing
from plait.units import parse_rate

WORKER = Path(__file__).with_name("worker.py")
AUTO = json.loads(Path(__file__).with_name("auto.json").read_text())
"""The fields of a Compression; benchmarks/compress-quality trains with the same."""
MODEL = {"width": 512, "layers": 8, "rows": 1, "length": 32}
TCP_SHARE = 1448 / 1514
"""Of a full Ethernet frame."""
CLAIM = (
    "up to 3x on one node of commodity GPUs, an order of magnitude over several nodes (CGX, arXiv 2111.08617)"
)
_numbers = count(1)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run of the workers: what trains, and how often."""

    rate: str
    sides: list[str]
    steps: int
    """That a side makes in a round."""
    rounds: int
    retries: int
    timeout_s: float = 900.0

    def __str__(self) -> str:
        return self.rate.replace("gbit", " Gbit/s").replace("mbit", " Mbit/s")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What came of it."""

    plan: Plan
    sides: dict[str, Measured]
    """Milliseconds a step."""
    result: dict[str, Any]

    def counted(self, side: str, what: str) -> float:
        """A step's, on rank 0."""
        return float(self.result["counted"][side][what])

    def mean_bits(self, side: str) -> float:
        return 32 * self.counted(side, "sent_bytes") / self.counted(side, "plain_bytes")

    def limit_ms(self, sent_bytes: float) -> float:
        """No step is shorter: what one worker computes, and the bytes of a step on the wire meanwhile.

        Gradients can travel while others are computed, but not during the forward pass or the update.
        """
        forward, backward, update = map(statistics.median, zip(*self.result["parts"], strict=True))
        wire = sent_bytes / (parse_rate(self.plan.rate) * TCP_SHARE)
        return 1e3 * (forward + max(backward, wire) + update)


def attempt(bench: Bench, plan: Plan) -> tuple[Activity, dict[str, Any]]:
    """One run of the workers from start to end, and what else the machine did meanwhile."""
    lines: list[str] = []
    usable = sorted(os.sched_getaffinity(0))
    cores = ":".join(map(str, usable[:2])) if len(usable) > 1 else None
    # Bits are in force after the first decision; DDP rebuilds its buckets after one step.
    warmup = {"auto": AUTO["adaptation"]["warmup_steps"] + 2}
    config = {**MODEL, "sides": plan.sides, "steps": plan.steps, "rounds": plan.rounds}
    config |= {"warmup": warmup, "auto": AUTO, "seed": bench.seed}
    before = Moment.now()
    with Lab(hosts=2, rate=plan.rate, cores=cores) as lab:
        command = [sys.executable, str(WORKER), json.dumps(config)]
        outcome = lab.run(command, show=lines.append, timeout_seconds=plan.timeout_s)
    if outcome.exit_code:
        raise RuntimeError("the workers failed:\n" + "\n".join(lines))
    found = next(line.split(" | ", 1)[1] for line in lines if line.startswith('host0 | {"seconds"'))
    return Moment.now().since(before), json.loads(found)


def train(bench: Bench, plan: Plan) -> Trained:
    """Every side's figures; all again where others disturbed them, and the calmest attempt is kept."""
    tried: list[tuple[Activity, dict[str, Any]]] = []
    while not tried or (tried[-1][0].disturbed and len(tried) <= plan.retries):
        tried.append(attempt(bench, plan))
    activity, result = min(tried, key=lambda one: one[0].steal + one[0].others)
    together = next(_numbers)
    figures = {
        side: Measured(
            name=side,
            values=tuple(result["seconds"][side]),
            better="lower",
            activity=activity,
            attempts=len(tried),
            together=together,
        ).scaled(1e3)
        for side in plan.sides
    }
    return Trained(plan=plan, sides=figures, result=result)


def compare(bench: Bench, trained: Trained, side: str, other: str, **bounds: float) -> None:
    bench.case(
        f"{side} over {other}, {trained.plan}",
        trained.sides[side],
        unit="ms a step",
        against=(f"DDP {other}", trained.sides[other]),
        limit=("computing and the wire", trained.limit_ms(trained.counted(side, "sent_bytes"))),
        published=CLAIM if other == "fp32" else None,
        **bounds,
    )


def describe(bench: Bench, trained: Trained, side: str) -> None:
    """What there is to know beside the time."""
    at = f"{side}, {trained.plan}"
    bench.case(f"mean bits, {at}", trained.mean_bits(side), unit="bits a number", better="lower")
    exposed = 1e3 * trained.counted(side, "exposed_s") / statistics.mean(trained.sides[side].values)
    bench.case(f"exposed, {at}", exposed, unit="of a step", better="lower")
    memory = trained.result["memory_bytes"][side] / 2**20
    bench.case(f"memory added, {at}", memory, unit="MiB a worker", better="lower")


def slow(bench: Bench) -> None:
    """1 Gbit/s."""
    sides = ["alone", "fp32", "fp16 hook", "4 bits", "auto"]
    rounds, retries = bench.pick(quick=4, full=12), bench.pick(quick=0, full=2)
    trained = train(bench, Plan(rate="1gbit", sides=sides, steps=2, rounds=rounds, retries=retries))
    bench.configure(parameters=trained.result["elements"])
    uncompressed(bench, trained)
    compare(bench, trained, "4 bits", "fp32", at_least=3.0)
    compare(bench, trained, "4 bits", "fp16 hook", at_least=1.6)
    compare(bench, trained, "auto", "fp32")
    for side in ("4 bits", "auto"):
        describe(bench, trained, side)


def slower(bench: Bench) -> None:
    """100 Mbit/s."""
    sides = ["alone", "fp32", "4 bits", "auto"]
    rounds, retries = bench.pick(quick=3, full=7), bench.pick(quick=0, full=1)
    trained = train(bench, Plan(rate="100mbit", sides=sides, steps=1, rounds=rounds, retries=retries))
    uncompressed(bench, trained)
    compare(bench, trained, "auto", "fp32", at_least=7.0, aim=10.0)
    compare(bench, trained, "4 bits", "fp32")
    for side in ("4 bits", "auto"):
        describe(bench, trained, side)


def uncompressed(bench: Bench, trained: Trained) -> None:
    """What the others stand against, and its own limit."""
    limit = trained.limit_ms(4 * trained.result["elements"])
    bench.case(
        f"DDP fp32, {trained.plan}",
        trained.sides["fp32"],
        unit="ms a step",
        limit=("computing and the wire", limit),
    )


def peers(bench: Bench) -> None:
    """PowerSGD; it has hung and crashed with gloo, so it has workers of its own and a time limit."""
    for rate in ("1gbit", "100mbit"):
        ranks = [f"PowerSGD {rank}" for rank in (1, 2, 4)]
        rounds = bench.pick(quick=3, full=7)
        plan = Plan(rate=rate, sides=[*ranks, "auto"], steps=2, rounds=rounds, retries=0, timeout_s=240)
        try:
            trained = train(bench, plan)
        except (RuntimeError, WorkerError) as error:
            bench.skip(f"PowerSGD, {plan}", str(error).splitlines()[-1])
            continue
        for side in ranks:
            bench.case(
                f"auto over {side}, {plan}",
                trained.sides["auto"],
                unit="ms a step",
                against=(f"DDP {side}", trained.sides[side]),
            )


def run(bench: Bench) -> None:
    lacking = missing()
    if lacking is not None:
        bench.skip("all", f"{lacking} is missing: there are no links to shape")
        return
    bench.configure(**MODEL, optimizer="AdamW, fused", threads=1, hosts=2, auto=AUTO)
    slow(bench)
    if bench.quick:  # a step in fp32 takes ten times as long there, and PowerSGD has workers of its own
        bench.skip("100 Mbit/s, and against PowerSGD", "a full run has them")
    else:
        slower(bench)
        peers(bench)
    bench.skip("PyTorch's bf16 and quantization hooks", "they do not run with gloo")
