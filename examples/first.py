"""A first training: python examples/first.py, or plait run examples/first.py."""

import torch
from torch import nn

import plait
from plait.losses import cross_entropy


def net():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


def points(seed):
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(seed))
    return [(row, row[:4].argmax()) for row in x]


job = plait.Job(
    name="first", model=net, data=points, loss=cross_entropy, optimizer=torch.optim.AdamW, batch=32, steps=50
)

if __name__ == "__main__":
    done = plait.run(job)
    print(done["first"].losses[-1], done.report)
