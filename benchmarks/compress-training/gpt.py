"""A GPT that reads characters, and the English that it reads."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.english import LETTERS, english

CONTEXT = 64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        split = self.mix(self.norm_1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.think(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, LETTERS)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1])
        return self.head(self.norm(self.blocks(self.letters(text) + self.places(places)))).transpose(1, 2)


def windows(*, held_out: bool = False) -> tuple[Tensor, Tensor]:
    """All texts of one context, and for each character the one that follows."""
    data = english(0, context=CONTEXT + 1, held_out=held_out)
    whole = torch.stack([data[place]["input_ids"] for place in range(len(data))])
    return whole[:, :-1], whole[:, 1:]


def draws(count: int, rows: int, seed: int, rank: int) -> Iterator[Tensor]:
    """Which rows of the data a worker takes, step by step: the same for a seed and rank."""
    order = torch.Generator().manual_seed(2 * seed + rank)
    while True:
        yield torch.randint(count, (rows,), generator=order)
