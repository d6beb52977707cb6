"""Emulated computing: a stage that sleeps for as long as its forward and backward would take.

What is real: messages, their sizes and times, the schedule, gloo, the shaped links, memory kept for backward.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.pipeline.memory import StageMemory


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, times_ms: tuple[float, float], kept_bytes: int
    ) -> Tensor:
        end_s = time.perf_counter() + x.shape[0] * times_ms[0] / 1e3
        kept = torch.zeros(x.shape[0] * kept_bytes // 4)  # touched, so that it is really there
        ctx.save_for_backward(x, weight, kept)
        ctx.times_ms = times_ms
        y = x * weight
        time.sleep(max(0.0, end_s - time.perf_counter()))
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        end_s = time.perf_counter() + x.shape[0] * ctx.times_ms[1] / 1e3
        found = gradient * weight, (gradient * x).sum().view(1), None, None
        time.sleep(max(0.0, end_s - time.perf_counter()))
        return found


class Emulated(nn.Module):
    def __init__(self, times_ms: tuple[float, float], kept_bytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.times_ms, self.kept_bytes = times_ms, kept_bytes

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self.weight, self.times_ms, self.kept_bytes)


def make_stage(config: dict[str, Any], rank: int, world: int) -> nn.Module:
    return Emulated((config["forward_ms"], config["backward_ms"]), config["kept_bytes"])


class Work:
    """Batches of one row a micro-batch, each a message of the size that is asked for."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.rows = config["micro_batches"]
        self._batch = torch.ones(self.rows, config["message_bytes"] // 4)

    def batch(self) -> tuple[Tensor, Tensor]:
        return self._batch, self._batch

    @staticmethod
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output.mean()


def memory(config: dict[str, Any], rank: int, world: int) -> StageMemory:
    """The sizes of a stage; what is there at all times is what is resident now."""
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    resident = 1024 * int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
    message = config["message_bytes"]
    return StageMemory(
        static_bytes=resident,
        saved_bytes_per_row=config["kept_bytes"] + 2 * message,
        input_bytes_per_row=message if rank else 0,
        output_bytes_per_row=message if rank < world - 1 else 0,
        transient_bytes_per_row=2 * message,
    )
