"""The model of the benchmark, and the rows that it is trained on."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def perceptrons(*, width: int, inner: int, blocks: int) -> nn.Module:
    """Blocks of two matrices, from one width to another and back: parameters and hardly anything else."""
    parts: list[nn.Module] = []
    for _ in range(blocks):
        parts += [nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)]
    return nn.Sequential(*parts)


class Rows:
    """Random inputs, and as targets the inputs in another order: a function of the row alone."""

    def __init__(self, seed: int, width: int, count: int) -> None:
        self.width, self.count, self.seed = width, count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(self.seed * self.count + row)
        x = torch.randn(self.width, generator=draw)
        return x, x.roll(1)


def rows(seed: int, *, width: int, count: int) -> Rows:
    return Rows(seed, width, count)
