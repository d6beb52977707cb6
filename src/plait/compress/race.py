"""Whose all-reduce is faster here, ours or that of torch's own backend: both are run and timed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from plait.compress.codec import Codec
from plait.compress.collectives import all_reduce
from plait.compress.settings import Settings

if TYPE_CHECKING:
    from torch import device

_ROUNDS = 3


def race(codec: Codec, count: int, device: device, group: Any, settings: Settings) -> tuple[float, float]:
    """Seconds of ours and of theirs for so many numbers, the same on all workers."""
    numbers = torch.linspace(-1.0, 1.0, count, device=device)
    best = [float("inf"), float("inf")]
    for _ in range(_ROUNDS):
        for place in range(2):
            dist.barrier(group)
            begun = time.perf_counter()
            if place == 0:
                all_reduce(numbers, codec=codec, group=group, op="average", settings=settings)
            else:
                dist.all_reduce(numbers, group=group)
                numbers /= dist.get_world_size(group)
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            best[place] = min(best[place], time.perf_counter() - begun)
    slowest = torch.tensor(best, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)  # a step waits for the slowest
    ours, theirs = slowest.tolist()
    return ours, theirs
