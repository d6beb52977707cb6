"""What is trained: a net with large dense layers, and trials of a smaller one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from plait import losses
from plait.job import Job
from plait.spill import Choice, Grid, Selection, no_halving
from plait.spill.space import derive

SIDE, CLASSES = 64, 100
RATES = (0.1, 0.03, 0.01, 0.003)
TRIALS = 4


def net(*, channels: tuple[int, ...] = (32, 64, 128, 256), dense: int = 4096) -> nn.Module:
    blocks: list[nn.Module] = []
    before = 3
    for width in channels:
        for again in range(2):
            layers = [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
            blocks.append(nn.Sequential(*layers, *([nn.MaxPool2d(2)] if again else [])))
            before = width
    flat = before * (SIDE // 2 ** len(channels)) ** 2
    blocks += [nn.Sequential(nn.Flatten(), nn.Linear(flat, dense), nn.ReLU())]
    return nn.Sequential(
        *blocks, nn.Sequential(nn.Linear(dense, dense), nn.ReLU()), nn.Linear(dense, CLASSES)
    )


def images(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 3, SIDE, SIDE, generator=drawn)
    return [(image, torch.tensor(i % CLASSES)) for i, image in enumerate(x)]


def foreground(steps: int) -> Job:
    return Job(
        name="front",
        model=net,
        data=images,
        loss=losses.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        batch=16,
        steps=steps,
    )


def _swept(steps: int) -> Job:
    smaller = partial(net, channels=(16, 32, 64, 128), dense=1024)
    return replace(
        foreground(steps), name="swept", model=smaller, batch=8, priority="background", memory="2GiB"
    )


def sweep(steps: int) -> Selection:
    space = {"optimizer.lr": Choice(RATES[:TRIALS])}
    return Selection(_swept(steps), space, no_halving(trials=TRIALS, most_steps=steps), sampler=Grid(space))


def trial(rate: float, number: int, steps: int) -> Job:
    return replace(derive(_swept(steps), f"swept-{number}", {"optimizer.lr": rate}), priority="foreground")
