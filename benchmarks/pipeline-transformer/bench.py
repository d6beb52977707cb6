"""A real transformer in two stages, a core each, while somebody else uses the network."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from plait.bench import Bench
from plait.lab.network import missing
from plait.pipeline.orders import kfkb

PREEMPTED = Path(__file__).parents[1] / "pipeline-preempted"
sys.path.insert(0, str(PREEMPTED))
from running import run as run_workers  # noqa: E402

STAGES, COUNT = 2, 16
MODEL = {"width": 256, "layers": 4, "length": 64, "rows": 64, "micro_batches": COUNT}
PLAIN, STOCK = "1F1B, receives posted ahead", "Schedule1F1B of PyTorch"
CLAIM = "4% to 30% over 1F1B in preempted networks (Ada-Grouper, arXiv 2303.01675)"


def run(bench: Bench) -> None:
    lacking = missing()
    usable = sorted(os.sched_getaffinity(0))
    if lacking is not None:
        bench.skip("all", f"{lacking} is missing: there are no links to shape")
        return
    if len(usable) < STAGES:
        bench.skip("all", f"{STAGES} stages with a core each, and {len(usable)} core may be used")
        return
    rates = json.loads((PREEMPTED / "trace.json").read_text())["quick"]
    rounds = bench.pick(quick=1, full=4)
    steps = bench.pick(quick={"others": 3, "adaptive": 5}, full={"others": 6, "adaptive": 6})
    config = {
        **MODEL,
        "stage": str(Path(__file__).with_name("stage.py")),
        "seed": bench.seed,
        "warmup": 3,
        "sides": {"adaptive": "adaptive", STOCK: "stock", PLAIN: kfkb(STAGES, COUNT, 1).to_json()},
        "phases": [{"rate": rate, "steps": steps} for _ in range(rounds) for rate in rates],
    }
    bench.configure(
        **MODEL, stages=STAGES, rates=rates, rounds=rounds, steps=steps, threads=1, compute="real"
    )
    cores = ":".join(map(str, usable[:STAGES]))
    ran = run_workers(
        config, hosts=STAGES, slowest="40mbit", cores=cores, retries=bench.pick(quick=0, full=2)
    )
    length = len(rates)
    groups = [range(i * length, (i + 1) * length) for i in range(rounds)]
    sides = ran.compared(["adaptive", PLAIN, STOCK], groups)
    for name, at_least in ((PLAIN, 1.15), (STOCK, 1.3)):
        bench.case(
            f"transformer, preempted network, over {name}",
            sides["adaptive"],
            unit="ms a step",
            against=(name, sides[name]),
            at_least=at_least,
            published=CLAIM if name == PLAIN else None,
        )
    for phase, rate in enumerate(rates):
        alone = ran.compared(["adaptive", PLAIN], [[phase + i * length] for i in range(rounds)])
        bench.case(
            f"transformer, {rate}, over {PLAIN}",
            alone["adaptive"],
            unit="ms a step",
            against=(PLAIN, alone[PLAIN]),
        )
