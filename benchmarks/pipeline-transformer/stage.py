"""A transformer in two stages, trained for real: letters and half of the layers; the rest and the head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LETTERS = 128


class Stage(nn.Module):
    def __init__(self, config: dict[str, Any], rank: int, world: int) -> None:
        super().__init__()
        width, length = config["width"], config["length"]
        self.first, self.last = rank == 0, rank == world - 1
        if self.first:
            self.letters, self.places = nn.Embedding(LETTERS, width), nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, config["layers"] // world, enable_nested_tensor=False)
        if self.last:
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, LETTERS)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.letters(x) + self.places(torch.arange(x.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.blocks(x, mask=mask, is_causal=True)
        return self.head(self.norm(x)).transpose(1, 2) if self.last else x


def make_stage(config: dict[str, Any], rank: int, world: int) -> nn.Module:
    torch.manual_seed(config["seed"])
    return Stage(config, rank, world)


class Work:
    """Windows of English, the same on all ranks."""

    def __init__(self, config: dict[str, Any]) -> None:
        from plait.english import english

        self.rows = config["rows"]
        self._data = english(config["seed"], context=config["length"] + 1)
        self._draw = torch.Generator().manual_seed(config["seed"])

    def batch(self) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(len(self._data), (self.rows,), generator=self._draw).tolist()
        windows = torch.stack([self._data[row]["input_ids"] for row in drawn])
        return windows[:, :-1], windows[:, 1:]

    @staticmethod
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target)
