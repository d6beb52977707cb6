"""How long tracing takes, and how much memory, for a model that does not fit into it."""

from __future__ import annotations

import json
import subprocess
import sys

from plait.bench import Bench

# Built without its weights, traced in both modes, and cut into four, all in a process of its own.
CHILD = """
import json, resource, sys, time
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from plait import Chain, deferred
width, layers = map(int, sys.argv[1:])
tokens = torch.zeros(2, 128, dtype=torch.long)
began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = deferred.construct(lambda: GPT2LMHeadModel(GPT2Config(n_embd=width, n_layer=layers, n_head=16)))
chain = Chain.trace(model, {"input_ids": tokens, "labels": tokens.clone()})
chain.cut([len(chain) // 4, len(chain) // 2, 3 * len(chain) // 4], carry=True)
seconds = time.perf_counter() - began
assert all(parameter.is_meta for parameter in model.parameters())
print(json.dumps({"seconds": seconds, "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                  "parameters": sum(p.numel() for p in model.parameters()), "blocks": len(chain)}))
"""
SIZES = {"GPT-2, 5.8 billion parameters": (4096, 28), "GPT-2, 124 million parameters": (768, 12)}


def run(bench: Bench) -> None:
    for name, (width, layers) in SIZES.items():
        runs = []
        for _ in range(bench.pick(quick=1, full=3)):
            command = [sys.executable, "-c", CHILD, str(width), str(layers)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
        bench.configure(**{name: {"parameters": runs[0]["parameters"], "blocks": runs[0]["blocks"]}})
        large = width == 4096
        seconds = sorted(one["seconds"] for one in runs)[len(runs) // 2]
        peak = max(one["peak_gib"] for one in runs)
        bench.case(
            f"{name}: built, traced, cut", seconds, unit="s", better="lower", at_most=30 if large else None
        )
        bench.case(f"{name}: peak memory", peak, unit="GiB", better="lower", at_most=2 if large else None)
