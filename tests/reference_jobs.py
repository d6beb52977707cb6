"""Small jobs for the plain trainer, and how two results are compared; tests import this file by name."""

import dataclasses
import functools
import math
import sys

import torch
from torch import nn

from plait import losses, reference_worker
from plait.data import indices
from plait.factory import Factory
from plait.job import Evaluation, Job


class Net(nn.Module):
    def __init__(self, dropout, norm):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.frozen(self.drop(self.norm(self.first(x)).relu())))


def net(*, dropout=0.0, norm=False):
    return Net(dropout, norm)


def points(seed, *, count=40, masked=False, broken_at=None):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    y = x.argmax(1) % 4
    if masked:
        y[torch.arange(count) % 5 > 1] = losses.IGNORED
    if broken_at is not None:
        x[broken_at] = math.inf
    return [(x[i], y[i]) for i in range(count)]


BASE = Job(
    name="small",
    model=net,
    data=points,
    loss=losses.cross_entropy,
    optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    batch=8,
    steps=7,
    seed=3,
)
SGD = functools.partial(torch.optim.SGD, lr=0.1)
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, fused=True)
COSINE = Factory("torch.optim.lr_scheduler:CosineAnnealingLR", T_max=10)
STEPS = Factory("torch.optim.lr_scheduler:MultiStepLR", milestones=[2, 5])
EVERYTHING = dataclasses.replace(
    BASE,
    model=functools.partial(net, dropout=0.3, norm=True),
    optimizer=ADAMW,
    schedule=STEPS,
    accumulate=3,
    clip_norm=0.5,
    evaluation=Evaluation(
        data=functools.partial(points, count=11), every=2, metrics={"right": losses.accuracy}
    ),
)


def job(base=BASE, **changes):
    return dataclasses.replace(base, **changes)


def assert_equal(one, other, place="state"):
    """Equal to the bit, through dicts and lists."""
    assert type(one) is type(other), place
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, place
        assert torch.equal(one, other), place
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            assert_equal(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), place
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{place}.{number}")
    else:
        assert one == other or (one != one and other != other), place


def assert_same(one, other):
    """Two results, equal to the bit in all but their time."""
    assert_equal(one.model.state_dict(), other.model.state_dict(), "model")
    assert_equal(one.optimizer, other.optimizer, "optimizer")
    assert_equal(one.losses, other.losses, "losses")
    for field in ("evaluations", "skipped", "steps", "finished"):
        assert getattr(one, field) == getattr(other, field)


def steps_with(row):
    return [step for step in range(5) if row in indices(seed=3, step=step, batch=8, size=40)]


def work(words):
    """What ``python -m plait.reference`` does, in a process that has torch already."""
    sys.exit(reference_worker.main(words))
