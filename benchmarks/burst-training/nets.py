"""Two models: heavy convolutions and then large dense layers, and one that only takes its time."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

SIDE, CLASSES = 64, 100


def vgg() -> list[nn.Module]:
    """Blocks in the manner of VGG: 1.2 M parameters in convolutions, 34 M in dense layers."""
    blocks: list[nn.Module] = []
    before = 3
    for channels in (32, 64, 128, 256):
        for again in range(2):
            layers = [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU()]
            blocks.append(nn.Sequential(*layers, *([nn.MaxPool2d(2)] if again else [])))
            before = channels
    width = before * (SIDE // 16) ** 2
    dense = [nn.Sequential(nn.Flatten(), nn.Linear(width, 4096), nn.ReLU())]
    return [*blocks, *dense, nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()), nn.Linear(4096, CLASSES)]


class _Timed(torch.autograd.Function):
    """Takes as long as it is told to, forward and backward; values and gradients have their real sizes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, outputs: int, took_ms: float) -> Tensor:
        begun_s = time.perf_counter()
        ctx.save_for_backward(x, weight)
        ctx.took_ms = took_ms
        y = (x.mean(1, keepdim=True) * weight[0]).expand(-1, outputs).contiguous()
        _rest(begun_s, took_ms / 3)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        begun_s = time.perf_counter()
        x, weight = ctx.saved_tensors
        sums = gradient.sum(1, keepdim=True)
        to_weight = torch.zeros_like(weight)
        to_weight[0] = (sums * x.mean(1, keepdim=True)).sum()
        to_x = (sums * weight[0] / x.shape[1]).expand_as(x).contiguous()
        _rest(begun_s, 2 * ctx.took_ms / 3)
        return to_x, to_weight, None, None


def _rest(begun_s: float, took_ms: float) -> None:
    time.sleep(max(0.0, begun_s + took_ms / 1e3 - time.perf_counter()))


class Timed(nn.Module):
    """A block that keeps no core busy: its parameters, values and times are those of a device elsewhere."""

    def __init__(self, row_ms: float, least_rows: int, megabytes: float, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(int(megabytes * 1e6 / 4)))
        self.row_ms, self.least_rows, self.outputs = row_ms, least_rows, outputs

    def forward(self, x: Tensor) -> Tensor:
        took_ms = 5 + self.row_ms * max(self.least_rows, x.shape[0])
        return _Timed.apply(x, self.weight, self.outputs, took_ms)


TIMED = [
    # ms a row, rows below which it gets no faster, megabytes of parameters, numbers of a row
    (8, 1, 0.2, 4096),
    (8, 1, 0.5, 4096),
    (6, 1, 1, 4096),
    (4, 16, 8, 2048),
    (4, 16, 8, 2048),
    (1, 1, 50, 1024),
    (0.6, 1, 30, CLASSES),
]
"""Blocks that pay on all hosts, on two, and on one."""


def timed() -> list[nn.Module]:
    return [Timed(*each) for each in TIMED]


def example(kind: str, rows: int) -> tuple[Tensor, Tensor]:
    """A batch, the same in every process."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (rows,), generator=draw)
    shape = (3, SIDE, SIDE) if kind == "vgg" else (64,)
    return torch.randn(rows, *shape, generator=draw), labels
