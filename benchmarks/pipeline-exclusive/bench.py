"""What adapting costs where there is nothing to adapt to: the network is one's own and fast."""

from __future__ import annotations

import sys
from pathlib import Path

from plait.bench import Bench
from plait.lab.network import missing
from plait.pipeline.orders import depth, kfkb

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline-preempted"))
from running import run as run_workers

STAGES, COUNT = 4, 16
WORK = {"micro_batches": COUNT, "forward_ms": 20, "backward_ms": 40, "message_bytes": 256 * 1024}
ORDERS = [kfkb(STAGES, COUNT, 1), kfkb(STAGES, COUNT, 3), depth(STAGES, COUNT, 2)]


def run(bench: Bench) -> None:
    lacking = missing()
    if lacking is not None:
        bench.skip("all", f"{lacking} is missing: there are no links to shape")
        return
    rounds, steps = bench.pick(quick=3, full=10), 4
    config = {
        **WORK,
        "kept_bytes": 2**20,
        "seed": bench.seed,
        "warmup": 5,
        "sides": {"adaptive": "adaptive", **{order.label: order.to_json() for order in ORDERS}},
        "phases": [{"rate": "10gbit", "steps": {"others": steps}}] * rounds,
    }
    bench.configure(**WORK, stages=STAGES, rounds=rounds, steps=steps, compute="emulated")
    ran = run_workers(config, hosts=STAGES, slowest="10gbit", retries=bench.pick(quick=0, full=2))
    sides = ran.compared(["adaptive", *(order.label for order in ORDERS)], [[i] for i in range(rounds)])
    best = min((order.label for order in ORDERS), key=lambda name: sides[name].value)
    for order in ORDERS:
        bench.case(
            f"exclusive network, over {order.label} (emulated compute)",
            sides["adaptive"],
            unit="ms a step",
            against=(
                order.label + (", the best fixed order" if order.label == best else ""),
                sides[order.label],
            ),
            limit=("computing alone", (COUNT + STAGES - 1) * (WORK["forward_ms"] + WORK["backward_ms"])),
            at_least=0.98 if order.label == best else None,
        )
    changes = sum(step.get("kind", "keep") != "keep" for step in ran.of("adaptive"))
    bench.case("changes of the order", changes, unit=f"in {len(ran.of('adaptive'))} steps", better="lower")
