"""One host's worker: runs the sides round by round, and rank 0 prints what they took."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from plait import native
from plait.compress.collectives import all_reduce
from plait.compress.communicator import memory_bytes, report


def half(tensor: torch.Tensor) -> None:
    """What torch's fp16 hook does to a bucket."""
    small = tensor.to(torch.float16).div_(dist.get_world_size())
    dist.all_reduce(small)
    tensor.copy_(small)


SIDES: dict[str, Callable[[torch.Tensor], object]] = {
    "gloo fp32": dist.all_reduce,
    "gloo fp16": half,
    "4 bits": lambda tensor: all_reduce(tensor, bits=4),
    "auto": lambda tensor: all_reduce(tensor, bits=4, decline=True),
}
ERRORS = {"gloo fp32": 1e-5, "gloo fp16": 1e-3, "4 bits": 0.3, "auto": 0.3}
"""The relative error that each side may have."""


def slowest(seconds: float) -> float:
    figure = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(figure, dist.ReduceOp.MAX)
    return figure.item()


def check(side: str, tensor: torch.Tensor, exact: torch.Tensor) -> None:
    """Stop the benchmark of a side that is fast because it is wrong."""
    scale = dist.get_world_size() if side == "gloo fp16" else 1
    error = ((tensor * scale - exact).norm() / exact.norm()).item()
    checksums: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(checksums, native.checksum(tensor))
    if error > ERRORS[side] or len(set(checksums)) > 1:
        raise SystemExit(f"{side}: relative error {error:.3g}, checksums {checksums}")


def main(config: dict[str, object]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sides, count = list(config["sides"]), int(config["elements"])
    base = torch.randn(count, generator=torch.Generator().manual_seed(dist.get_rank()))
    exact, tensor = base.clone(), base.clone()
    dist.all_reduce(exact)
    sent: dict[str, int] = {}
    for side in sides:
        before = report().sent_bytes
        tensor.copy_(base)
        SIDES[side](tensor)
        check(side, tensor, exact)
        sent[side] = report().sent_bytes - before
    figures: dict[str, list[float]] = {side: [] for side in sides}
    order = random.Random(int(config["seed"]))
    for _ in range(int(config["rounds"])):
        for side in order.sample(sides, len(sides)):
            tensor.copy_(base)
            dist.barrier()
            begun = time.perf_counter()
            SIDES[side](tensor)
            figures[side].append(slowest(time.perf_counter() - begun))
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": figures, "sent": sent, "memory_bytes": memory_bytes()}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's own threads may stumble over the interpreter's end


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
