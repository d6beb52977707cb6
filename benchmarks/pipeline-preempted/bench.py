"""How much faster an adaptive pipeline is while somebody else uses the network, and whether it knows."""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from plait.bench import Bench
from plait.lab.network import missing
from plait.pipeline.orders import depth, gpipe, kfkb, work_conserving

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from running import Ran  # noqa: E402
from running import run as run_workers  # noqa: E402

STAGES, COUNT = 4, 16
WORK = {
    "micro_batches": COUNT,
    "forward_ms": 20,
    "backward_ms": 40,
    "message_bytes": 256 * 1024,
    "kept_bytes": 2**20,
}
LABEL = "emulated compute"
CLAIM = "4% to 30% over 1F1B in preempted networks (Ada-Grouper, arXiv 2303.01675)"
PLAIN = "1F1B, receives posted ahead"
STOCK = "Schedule1F1B of PyTorch"
FIXED = [
    *(kfkb(STAGES, COUNT, k) for k in (2, 3, 4, 12)),
    gpipe(STAGES, COUNT),
    depth(STAGES, COUNT, 2),
    depth(STAGES, COUNT, 3),
    work_conserving(STAGES, COUNT, 8),
]


def phases(bench: Bench) -> tuple[list[str], int]:
    """The rates of the phases, and how many of them make a round; a seed other than 0 draws their order."""
    trace = json.loads((HERE / "trace.json").read_text())
    rates, length = trace["quick" if bench.quick else "full"], len(set(trace["full"]))
    if bench.seed:
        draw = random.Random(bench.seed)
        rounds = [rates[begin : begin + length] for begin in range(0, len(rates), length)]
        rates = [rate for part in rounds for rate in draw.sample(part, length)]
    return rates, length


def whole_trace(bench: Bench, ran: Ran, rounds: Sequence[Sequence[int]]) -> None:
    sides = ran.compared(["adaptive", PLAIN, STOCK], rounds)
    floor = ("computing alone", (COUNT + STAGES - 1) * (WORK["forward_ms"] + WORK["backward_ms"]))
    for name, at_least, aim in ((PLAIN, 1.22, 1.35), (STOCK, 1.7, 1.9)):
        bench.case(
            f"preempted network, over {name} ({LABEL})",
            sides["adaptive"],
            unit="ms a step",
            against=(name, sides[name]),
            limit=floor,
            at_least=at_least,
            aim=aim,
            published=CLAIM if name == PLAIN else None,
        )


def each_phase(bench: Bench, ran: Ran, rates: list[str]) -> None:
    """Against the best fixed order of a phase, and against what was predicted."""
    for phase, rate in enumerate(rates):
        at = f"phase {phase + 1}, {rate} ({LABEL})"
        own = [step for step in ran.of("adaptive") if step["phase"] == phase]
        settled = statistics.median(step["ms"] for step in own[2:])
        names = [PLAIN, *(order.label for order in FIXED if ran.of(order.label))]
        fixed = {name: statistics.median(ran.in_phase(name, phase)) for name in names}
        best = min(fixed, key=lambda name: fixed[name])
        bench.case(
            f"from the third step on, {at}",
            settled,
            unit="ms a step",
            against=(f"best fixed order, {best}", fixed[best]),
            at_least=1 / 1.05,
            better="lower",
        )
        predicted = [(s["predicted_ms"], s["ms"]) for s in own[1:] if s.get("predicted_ms")]
        error = statistics.median(abs(p / ms - 1) for p, ms in predicted)
        bench.case(
            f"prediction off by, {at}",
            100 * error,
            unit="% of the step",
            better="lower",
            at_most=15 if rate == "40mbit" else 10,
        )


def run(bench: Bench) -> None:
    lacking = missing()
    if lacking is not None:
        bench.skip("all", f"{lacking} is missing: there are no links to shape")
        return
    rates, length = phases(bench)
    orders = [kfkb(STAGES, COUNT, 12)] if bench.quick else FIXED
    steps = bench.pick(quick={"others": 2, "adaptive": 5}, full={"others": 4, "adaptive": 8})
    config = {
        **WORK,
        "seed": bench.seed,
        "warmup": 2,
        "sides": {
            "adaptive": "adaptive",
            STOCK: "stock",
            PLAIN: kfkb(STAGES, COUNT, 1).to_json(),
            **{order.label: order.to_json() for order in orders},
        },
        "phases": [{"rate": rate, "steps": steps} for rate in rates],
    }
    bench.configure(**WORK, stages=STAGES, rates=rates, steps=steps, compute="emulated")
    ran = run_workers(config, hosts=STAGES, slowest="40mbit", retries=bench.pick(quick=0, full=1))
    rounds = [range(begin, begin + length) for begin in range(0, len(rates), length)]
    whole_trace(bench, ran, rounds)
    each_phase(bench, ran, rates)
