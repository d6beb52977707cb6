"""A VGG-like net: heavy convolutions, then large dense layers that hold nearly all parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

CLASSES = 10
SIDE = 32


def blocks(channels: int = 48, dense: int = 2048) -> list[nn.Module]:
    """Each a block of the chain."""

    def convolution(inputs: int, outputs: int, *, pool: bool) -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.MaxPool2d(2)) if pool else nn.Sequential(*layers)

    side = SIDE // 8
    return [
        convolution(3, channels, pool=True),
        convolution(channels, 2 * channels, pool=True),
        convolution(2 * channels, 4 * channels, pool=False),
        convolution(4 * channels, 4 * channels, pool=True),
        nn.Sequential(nn.Flatten(), nn.Linear(4 * channels * side**2, dense), nn.ReLU()),
        nn.Sequential(nn.Linear(dense, dense), nn.ReLU()),
        nn.Linear(dense, CLASSES),
    ]


CONVOLUTIONS = 4
"""How many of the blocks are convolutions."""


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images and their classes, which a linear rule knows."""
    made = torch.Generator().manual_seed(seed)
    images = torch.randn(rows, 3, SIDE, SIDE, generator=made)
    return images, images.flatten(1)[:, :CLASSES].argmax(1)
