"""What blocks cost, and that the estimates hold for what is then kept."""

import dataclasses
import functools
import itertools

import pytest
import torch
from torch import nn

from plait import losses
from plait.job import Job
from plait.spill import units
from plait.spill.description import saved_bytes
from plait.spill.executor import execute
from plait.spill.plan import Shard
from plait.spill.runner import Runner
from plait.spill.saving import Saving


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.first, self.last = nn.Linear(6, width), nn.Linear(width, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU("tanh"), nn.Dropout(0.1),
                          nn.Linear(2 * width, width)) for _ in range(4)
        )  # fmt: skip

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


def net():
    return Net()


def points(seed):
    x = torch.randn(600, 6, generator=torch.Generator().manual_seed(seed))
    return [(x[i], i % 4) for i in range(600)]


JOB = Job(name="net", model=net, data=points, loss=losses.cross_entropy, batch=600, accumulate=2, steps=1,
          optimizer=functools.partial(torch.optim.Adam, lr=0.01))  # fmt: skip


@pytest.fixture(scope="module")
def runner():
    return Runner(memoryview(b""))


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def measured(runner, request):
    job = dataclasses.replace(JOB, precision=request.param)
    return job, runner.describe(job), runner.measure(job, repetitions=1)


def test_costs(measured):
    job, description, costs = measured
    assert costs.rows == description.rows == 300
    assert len(costs.blocks) == len(description.blocks)
    assert all(
        block.forward_ms > 0 and block.backward_ms > 0 and block.update_ms > 0 for block in costs.blocks
    )
    assert costs.loss_ms > 0
    assert costs.output_bytes >= 300 * 4 * (4 if job.precision == "fp32" else 2)
    kinds = {}
    for shape, block in zip(description.blocks, costs.blocks, strict=True):
        assert kinds.setdefault(shape.kind, block.saved_bytes) == block.saved_bytes
    inner = [
        block for shape, block in zip(description.blocks, costs.blocks, strict=True) if "layers" in shape.name
    ]
    width = 64 * 300 * (4 if job.precision == "fp32" else 2)
    assert all(block.saved_bytes >= 5 * width for block in inner), (
        "two activations and a mask of twice the width"
    )
    assert all(block.thrift_bytes <= block.saved_bytes - 2 * width for block in inner)
    assert all(block.transient_bytes > 0 for block in inner)
    assert all(block.thrift_transient_bytes > block.transient_bytes for block in inner), (
        "what is made again in the backward pass takes room there"
    )


@pytest.mark.parametrize("mode", ["keep", "thrift", "spill"])
def test_no_more_is_kept_than_was_foretold(measured, runner, mode, shifting, monkeypatch):
    """Of every shard, what its graph holds is within the bound; spilled, nothing is left but the inputs."""
    job, description, costs = measured
    left, close = [], Saving.close

    def watched(saving):
        left.append(saving.nbytes)
        return close(saving)

    monkeypatch.setattr(Saving, "close", watched)
    store = shifting(nbytes=1 << 24)
    runner.map(store.memory)
    thrift = mode != "keep"
    for cut in (1, 3):
        edges = [*range(0, len(description.blocks), cut), len(description.blocks)]
        bounds = [saved_bytes(description, costs, a, b, thrift=thrift) for a, b in itertools.pairwise(edges)]
        shards = [Shard(first=a, end=b, activations=mode, saved_bytes=bound)
                  for (a, b), bound in zip(itertools.pairwise(edges), bounds, strict=True)]  # fmt: skip
        left.clear()
        named = dataclasses.replace(job, name=f"{mode}-{cut}")
        plan = type("Cut", (), {"shards": shards})()
        execute(named, plan, store, runner=runner)
        kept = left[: 2 * (len(shards) - 1)]  # of each micro-batch of each forward
        for place, bound in enumerate(bounds[:-1]):
            inputs = 300 * 6 * 4 if place == 0 else 0  # they are there anyway
            for nbytes in kept[2 * place : 2 * place + 2]:
                assert nbytes <= inputs + (0 if mode == "spill" else bound)


def test_a_job_that_is_forgotten_is_not_known(runner, shifting):
    description = runner.describe(JOB)
    plan = type("Cut", (), {"shards": [Shard(first=0, end=len(description.blocks))]})()
    runner.adopt(JOB, plan, description)
    runner.forget(JOB)
    with pytest.raises(KeyError):
        runner.perform(units.Unit("net", 0, "create", 0), {}, units.Head(job="net"))
