"""What it costs to turn a model into a chain, up to one that is larger than memory."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

from plait.bench import Bench

LARGE = {"n_layer": 28, "n_embd": 4096, "n_head": 16, "n_positions": 128}
SMALL = {"n_layer": 12, "n_embd": 64, "n_head": 4, "n_positions": 128}

CHILD = """
import json, logging, resource, sys, time
logging.disable(logging.WARNING)
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from plait import deferred
from plait.chain import Chain

what, config = sys.argv[1], GPT2Config(**json.loads(sys.argv[2]))
words = torch.zeros(2, 128, dtype=torch.long)
torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(2, 2),), strict=False)  # its imports take seconds
begin = time.perf_counter()
if what == "export":
    model = GPT2LMHeadModel(config).train()
    begin = time.perf_counter()
    rows = {0: torch.export.Dim("batch")}
    shapes = {"input_ids": rows, "labels": rows, "use_cache": None}
    inputs = {"input_ids": words, "labels": words.clone(), "use_cache": False}
    torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False)
else:
    model = deferred.construct(lambda: GPT2LMHeadModel(config))
    chain = Chain.trace(model, {"input_ids": words, "labels": words})
    parts = chain.cut([len(chain) // 4, len(chain) // 2, 3 * len(chain) // 4])
    assert all(parameter.is_meta for parameter in parts.parameters())
seconds = time.perf_counter() - begin
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
count = sum(parameter.numel() for parameter in model.parameters()) / 1e9
print(json.dumps({"seconds": seconds, "GiB": peak, "billions": count}))
"""


def measure(what: str, config: dict[str, int]) -> dict[str, float]:
    command = [sys.executable, "-c", CHILD, what, json.dumps(config)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(bench: Bench) -> None:
    repetitions = bench.pick(quick=1, full=5)
    seen: list[dict[str, float]] = []

    def large() -> float:
        seen.append(measure("chain", LARGE))
        return seen[-1]["seconds"]

    def small(what: str) -> float:
        return measure(what, SMALL)["seconds"]

    retries = bench.pick(quick=0, full=2)
    (trace,) = bench.interleave(
        {"large": large}, repetitions=repetitions, warmup=0, better="lower", retries=retries
    )
    billions = seen[0]["billions"]
    bench.configure(large=LARGE, small=SMALL, batch=2, billions_of_parameters=round(billions, 3))
    size = f"GPT-2 of {billions:.1f} billion parameters"
    bench.case(f"{size}: built, traced and cut", trace, unit="s", at_most=30.0, aim=15.0)
    peak = max(one["GiB"] for one in seen)
    bench.case(f"{size}: peak memory of the process", peak, unit="GiB", better="lower", at_most=2.0, aim=1.0)
    sides = {"chain": partial(small, "chain"), "export": partial(small, "export")}
    chain, export = bench.interleave(
        sides, repetitions=repetitions, warmup=0, better="lower", retries=retries
    )
    # Information: a chain takes two recordings, one a mode, and the cut besides.
    bench.case(
        "GPT-2 of 12 layers: built, traced and cut",
        chain,
        unit="s",
        against=("torch.export once, nothing cut", export),
    )
