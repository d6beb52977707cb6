"""One slow link of three, and little memory: what depth where it is needed gains over one k for all."""

from __future__ import annotations

import sys
from pathlib import Path

from plait.bench import Bench
from plait.lab.network import missing
from plait.pipeline.orders import kfkb

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline-preempted"))
from running import run as run_workers

STAGES, COUNT, K = 4, 16, 2
FAST, SLOW = "1gbit", "40mbit"
WORK = {
    "micro_batches": COUNT,
    "forward_ms": 20,
    "backward_ms": 40,
    "message_bytes": 256 * 1024,
    "kept_bytes": 16 * 2**20,
}


def run(bench: Bench) -> None:
    lacking = missing()
    if lacking is not None:
        bench.skip("all", f"{lacking} is missing: there are no links to shape")
        return
    rounds, steps = bench.pick(quick=3, full=8), 4
    fixed = [kfkb(STAGES, COUNT, k) for k in range(1, K + 1)]
    phase = {"rate": FAST, "hosts": {str(STAGES - 1): SLOW}, "steps": {"others": steps}}
    config = {
        **WORK,
        "seed": bench.seed,
        "warmup": 3,
        "memory_of": kfkb(STAGES, COUNT, K).label,
        # The adaptive side is the last, so that what the others hold is there when it looks at its memory.
        "sides": {**{order.label: order.to_json() for order in fixed}, "adaptive": "adaptive"},
        "phases": [phase] * rounds,
    }
    bench.configure(
        **WORK, stages=STAGES, fast=FAST, slow=SLOW, rounds=rounds, steps=steps, compute="emulated"
    )
    ran = run_workers(config, hosts=STAGES, slowest=SLOW, retries=bench.pick(quick=0, full=1))
    sides = ran.compared(["adaptive", *(order.label for order in fixed)], [[i] for i in range(rounds)])
    best = min((order.label for order in fixed), key=lambda name: sides[name].value)
    for order in fixed:
        bench.case(
            f"one slow link, memory of k = {K}, over {order.label} (emulated compute)",
            sides["adaptive"],
            unit="ms a step",
            against=(
                order.label + (", the best k that fits" if order.label == best else ""),
                sides[order.label],
            ),
            limit=("computing alone", (COUNT + STAGES - 1) * (WORK["forward_ms"] + WORK["backward_ms"])),
            at_least=1.1 if order.label == best else None,
        )
    used = max(r["peak_bytes"] / r["limit_bytes"] for step in ran.of("adaptive") for r in step["ranks"])
    bench.case("peak memory, of the limit", used, unit="of memory_limit", better="lower", at_most=1.0)
