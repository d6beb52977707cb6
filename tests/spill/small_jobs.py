"""Models and data of the jobs in tests of running; devices import this file by its path."""

import os
import time

import torch
from torch import nn


def rows(seed, width=8, count=64):
    drawn = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    return [(row, row.sum(0, keepdim=True)) for row in drawn]


def tokens(seed, count=32, length=6):
    drawn = torch.randint(0, 40, (count, length + 1), generator=torch.Generator().manual_seed(seed))
    return [{"tokens": row[:-1], "labels": row[1:]} for row in drawn]


def mlp(width=48, depth=3, dropout=0.1):
    layers = [nn.Linear(8, width)]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def normed(width=32):
    return nn.Sequential(
        nn.Linear(8, width), nn.BatchNorm1d(width), nn.GELU(), nn.Linear(width, width), nn.BatchNorm1d(width),
        nn.Tanh(), nn.Linear(width, 1),
    )  # fmt: skip


def on_frozen_base(width=64):
    model = mlp(width=width)
    for parameter in list(model.parameters())[:-2]:
        parameter.requires_grad_(False)
    return model


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, width=24):
        super().__init__()
        self.embedding = nn.Embedding(40, width)
        wide = 2 * width
        layers = [nn.Linear(width, wide), nn.GELU(), nn.Dropout(0.1), nn.Linear(wide, width)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens)))


def tied(width=24):
    return Tied(width)


def failing_loss(output, batch, at=0.0, how="error"):
    """The mean squared error, until it is below a number."""
    loss = nn.functional.mse_loss(output, batch[-1])
    if float(loss) < at:
        if how == "kill":
            os.kill(os.getpid(), 9)
        if how == "nan":
            return loss * float("nan")
        raise (MemoryError if how == "memory" else ArithmeticError)(f"a loss of {float(loss)} is below {at}")
    return loss


def slow_loss(output, batch, seconds=0.05):
    time.sleep(seconds)
    return nn.functional.mse_loss(output, batch[-1])


def tokens_of(batch):
    return (batch["tokens"],)
