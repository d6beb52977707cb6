"""What planning and scheduling know of a job, from a model without weights."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

from plait import losses
from plait.errors import UsageError
from plait.job import Evaluation, Job
from plait.spill.runner import Runner


class Net(nn.Module):
    def __init__(self, *, gap=False):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norms = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(8, track_running_stats=False)])
        self.still = nn.BatchNorm1d(8).eval()
        self.inner = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight = self.inner[0].weight
        self.frozen = nn.Linear(8, 4).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.ones(8), persistent=False)
        self.register_buffer("count", torch.zeros(()))
        if gap:
            self.gap = nn.Parameter(torch.empty(8, 8)[:, ::2])

    def train(self, mode=True):
        super().train(mode)
        self.still.training = False
        return self

    def forward(self, x):
        x = self.norms[1](self.norms[0](self.first(x)))
        self.count.add_(1)
        x = self.still(x * self.scale)
        for layer in self.inner:
            x = x + torch.tanh(layer(x))
        return self.frozen(self.last(x))


def net(**options):
    return Net(**options)


def sequential():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def points(seed, *, count=20):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return [(x[i], i % 4) for i in range(count)]


JOB = Job(
    name="net", model=net, data=points, loss=losses.cross_entropy, batch=8, accumulate=3, epochs=2,
    optimizer=functools.partial(torch.optim.Adam, lr=0.01),
    evaluation=Evaluation(data=functools.partial(points, count=7), batch=3),
)  # fmt: skip


@pytest.fixture(scope="module")
def runner():
    return Runner(memoryview(b""))


@pytest.fixture(scope="module")
def known(runner):
    return runner.describe(JOB)


def test_the_job(known):
    assert (known.job, known.digest, known.steps, known.micro_batches) == ("net", JOB.digest, 4, (3, 3, 2))
    assert (known.clips, known.skips, known.rows) == (False, False, 3)
    assert dataclasses.astuple(known.evaluation) == (None, 7, 3)


def test_parameters(known):
    found = {parameter.name: parameter for parameter in known.parameters}
    assert list(found) == [name for name, _ in net().named_parameters()]
    assert found["inner.0.weight"].blocks[-1] > found["inner.0.weight"].blocks[0], "two blocks use it"
    assert "last.weight" not in found
    assert known.aliases == (("last.weight", "inner.0.weight"),)
    assert found["unused"].blocks == ()
    assert (found["frozen.weight"].trained, found["frozen.weight"].state) == (False, ())
    assert [name for name, _, _ in found["first.weight"].state] == ["step", "exp_avg", "exp_avg_sq"]
    assert found["first.weight"].nbytes == 6 * 8 * 4
    assert found["first.weight"].state_bytes == 2 * 6 * 8 * 4 + 4


def test_buffers_and_who_changes_them(known):
    found = {buffer.name: bool(buffer.changes) for buffer in known.buffers}
    assert {name for name, changes in found.items() if changes} == {
        "norms.0.running_mean", "norms.0.running_var", "norms.0.num_batches_tracked", "count",
    }  # fmt: skip
    assert not found["still.running_mean"], "it stays in evaluation"
    assert not found["scale"]
    assert {buffer.name for buffer in known.buffers if not buffer.saved} == {"scale"}


def test_buffers_of_modules_that_are_called_as_they_are(runner):
    described = runner.describe(dataclasses.replace(JOB, model=sequential))
    changed = {buffer.name for buffer in described.buffers if buffer.changes}
    assert changed == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_blocks_of_one_kind(known):
    kinds = [block.kind for block in known.blocks]
    alike = [block.name for block in known.blocks if kinds.count(block.kind) > 1]
    assert alike == ["inner.0", "inner.1", "inner.2"]
    assert len(set(kinds)) == len(kinds) - 2


def test_values(known):
    assert known.live(0) == ()
    assert known.live(len(known.blocks)) == known.outputs
    names = {name for block in known.blocks for name in block.writes}
    assert {value.name for value in known.values} >= names
    assert known.cut_bytes(1, 5) > 0
    assert not names & set(known.inputs)


def test_jobs_of_one_model_share_a_chain(runner, known):
    before = len(runner._traced)
    other = dataclasses.replace(JOB, name="other", seed=4, batch=4, clip_norm=1.0, nonfinite="skip")
    described = runner.describe(other)
    assert len(runner._traced) == before
    assert (described.clips, described.skips, described.job) == (True, True, "other")
    assert described.base != known.base, "the weights differ, with the seed"
    assert runner.describe(dataclasses.replace(JOB, name="third")).base == known.base
    runner.describe(dataclasses.replace(JOB, precision="fp64"))
    assert len(runner._traced) == before + 1


def test_parameters_with_gaps_are_refused(runner):
    with pytest.raises(UsageError, match=r"'gap' of shape \(8, 4\) has gaps"):
        runner.describe(dataclasses.replace(JOB, model=functools.partial(net, gap=True)))
