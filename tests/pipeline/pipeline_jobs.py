"""Small jobs and plans for training in stages; tests, and ranks with them, import this file by name."""

import dataclasses
import functools
import math
from itertools import pairwise

import torch
from torch import nn

from plait import Chain, losses
from plait.evaluation import Evaluation
from plait.job import Job
from plait.pipeline import orders
from plait.pipeline.plan import Forecast, PipelinePlan, Stage

CLOSE = 1e-10


def plain():
    sizes = [6, 8, 8, 8, 8, 5]
    layers = [[nn.Linear(a, b), nn.Tanh()] for a, b in pairwise(sizes)]
    return nn.Sequential(*[module for pair in layers for module in pair][:-1])


def half_frozen():
    model = plain()
    for layer in (0, 2, 6):  # with two stages or more, none learns on the first
        model[layer].requires_grad_(False)
    return model


def normal():
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(),
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5),
    )  # fmt: skip


def dropping():
    return nn.Sequential(
        nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.4), nn.Linear(8, 5)
    )


class Tied(nn.Module):
    """Words in and out by one table, a value that skips blocks, and a parameter that nothing uses."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(8))
        self.mix = nn.Linear(16, 8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.table.weight
        self.spare = nn.Linear(2, 2)

    def forward(self, tokens):
        first = x = self.table(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return self.out(self.mix(torch.cat([x, first], -1)))


def tabled():
    """Words in and out by one table, in a plain row of layers: quickly cut."""
    model = nn.Sequential(
        nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11)
    )
    model[-1].weight = model[0].weight
    return model


def points(seed, *, rows=40, broken_at=None, weightless=False):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=draw)
    y = torch.randint(5, (rows,), generator=draw)
    y[::3] = losses.IGNORED
    if weightless:
        y[:] = losses.IGNORED
    if broken_at is not None:
        x[broken_at] = math.inf
    return list(zip(x, y, strict=True))


def words(seed, *, rows=40):
    tokens = torch.randint(11, (rows, 7), generator=torch.Generator().manual_seed(seed))
    labels = tokens.clone()
    labels[::3, 2:] = losses.IGNORED
    return [{"tokens": t, "labels": y} for t, y in zip(tokens, labels, strict=True)]


def sentences(seed):
    return [(row["tokens"], row["labels"]) for row in words(seed)]


def adam(parameters, fused=True):
    return torch.optim.AdamW(parameters, lr=0.05, fused=fused)


def adagrad(parameters):
    """It makes its state when it is made itself."""
    return torch.optim.Adagrad(parameters, lr=0.05)


def by_place(parameters):
    """Rates that go by a parameter's place among all, which no stage can tell from its own."""
    rates = [{"params": [pair], "lr": 0.1 / (2 + place)} for place, pair in enumerate(parameters)]
    return torch.optim.SGD(rates, momentum=0.9)


def slower(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def named(name):
    return f"{__file__}:{name}"  # by the path of the file, which is the same in every process


JOB = Job(
    name="small",
    model=named("plain"),
    data=named("points"),
    loss="plait.losses:cross_entropy",
    optimizer=named("adam"),
    schedule=named("slower"),
    batch=10,
    steps=6,
    clip_norm=0.3,
    precision="fp64",
    evaluation=Evaluation(data=named("points"), every=3, metrics={"accuracy": "plait.losses:accuracy"}),
)


def job(base=JOB, **changes):
    for field in ("model", "data", "optimizer"):
        if isinstance(changes.get(field), str):
            changes[field] = named(changes[field])
    return dataclasses.replace(base, **changes)


TABLED = job(model="tabled", data="sentences", loss="plait.losses:next_token", evaluation=None)
TIED = job(model="Tied", data="words", loss="plait.losses:next_token", evaluation=None)


@functools.cache
def blocks_of(model, data):
    return len(Chain.of_job(dataclasses.replace(JOB, model=model, data=data, precision="fp32")))


def plan_for(one, stages, micro_batches=None, *, k=1, order=None):
    """Stages of equal numbers of blocks."""
    blocks = blocks_of(one.model, one.data)
    edges = [blocks * place // stages for place in range(stages + 1)]
    return PipelinePlan(
        stages=tuple(Stage(first=a, end=b) for a, b in pairwise(edges)),
        order=order or orders.kfkb(stages, micro_batches or stages + 1, k),
        global_batch=one.batch,
        forecast=Forecast(step_ms=0.0, busy_ms=(0.0,) * stages, peak_bytes=(0,) * stages),
    )


def summary(result):
    """What can be compared; weights and state where they are whole."""
    whole = not any(p.is_meta for p in result.model.parameters())
    return {
        "losses": result.losses,
        "evaluations": [(e.step, e.loss, *e.metrics.values()) for e in result.evaluations],
        "skipped": result.skipped,
        "finished": result.finished,
        "model": {name: t.clone() for name, t in result.model.state_dict().items()} if whole else None,
        "optimizer": result.optimizer if whole else None,
    }


def assert_near(one, other, close, place="result"):
    """Equal in form and, but for so much, in numbers, through dicts and lists."""
    assert type(one) is type(other), (place, type(one), type(other))
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), place
        assert one.numel() == 0 or (one.double() - other.double()).abs().max() <= close, place
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            assert_near(one[key], other[key], close, f"{place}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), place
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_near(a, b, close, f"{place}.{number}")
    elif isinstance(one, float):
        assert abs(one - other) <= close or (math.isnan(one) and math.isnan(other)), (place, one, other)
    else:
        assert one == other, place


def assert_trained_alike(found, expected, close=CLOSE):
    """Every rank's summary against a plain result: all know the losses, the first rank has all."""
    wanted = summary(expected)
    assert_near(found[0], wanted, close)
    for other in found[1:]:
        assert_near(other, {**wanted, "model": other["model"], "optimizer": other["optimizer"]}, close)
