"""The models: blocks of a chain, and a batch for them."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1] / "burst-training"))
import nets

WIDTH, LENGTH, LAYERS, SYMBOLS = 192, 48, 6, 96
EVEN = [(6, 1, 2, 16_384)] * 8
"""Blocks that take the same, with as much to send between them as to average."""


class Embedding(nn.Module):
    """Symbols and their places."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.symbols(x) + self.places(torch.arange(x.shape[1]))


class Layer(nn.Module):
    """A transformer's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (4, -1)).transpose(1, 2) for part in self.mixed(self.before(x)).chunk(3, 2)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.joined(seen)
        return x + self.narrow(functional.gelu(self.wide(self.between(x))))


def blocks(kind: str) -> list[nn.Module]:
    """A fresh model of a kind."""
    if kind == "vgg":
        return nets.vgg()
    if kind == "emulated":
        return nets.timed()
    if kind == "even":
        return [nets.Timed(*each) for each in EVEN]
    return [Embedding(), *(Layer() for _ in range(LAYERS)), nn.Linear(WIDTH, SYMBOLS)]


def example(kind: str, rows: int) -> tuple[Tensor, Tensor]:
    """A batch, the same in every process."""
    if kind != "gpt":
        return nets.example(kind, rows)
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(SYMBOLS, (rows, LENGTH + 1), generator=draw)
    return x[:, :-1], x[:, 1:]


def loss(output: Tensor, target: Tensor) -> Tensor:
    """A mean over rows."""
    if output.dim() == 3:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())
    return functional.cross_entropy(output, target)


def loss_of(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The same of a whole batch."""
    return loss(output, batch[1])
