"""Weights come to be shard by shard, in the store: as the constructor makes them, or from a file."""

import dataclasses
import functools
import itertools

import numpy
import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from plait import losses
from plait.errors import FileError
from plait.job import Job
from plait.spill import units
from plait.spill.executor import tensors
from plait.spill.runner import Runner
from plait.spill.units import Head


@dataclasses.dataclass(frozen=True)
class Part:
    first: int
    end: int
    activations: str = "keep"
    saved_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Cut:
    shards: tuple


class Net(nn.Module):
    """A tied weight, a frozen one, one that was loaded, one in another layout, random and plain buffers."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.other = nn.Linear(6, 6, bias=False)
        self.other.weight = self.first.weight
        self.middle.requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.turned = nn.Parameter(torch.randn(6, 6).t())
        self.loaded = nn.Parameter(torch.from_numpy(numpy.arange(6, dtype=numpy.float32)))
        self.register_buffer("noise", torch.rand(6))
        self.register_buffer("table", torch.arange(6.0), persistent=False)

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        x = torch.tanh(self.middle(x)) @ self.turned
        return self.last(torch.tanh(self.other(x)) * self.table + self.noise * self.loaded)


def net():
    return Net()


def points(seed):
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(seed))
    return [(x[i], int(x[i].argmax()) % 4) for i in range(16)]


JOB = Job(name="net", model=net, data=points, loss=losses.cross_entropy, batch=8, steps=3,
          optimizer=functools.partial(torch.optim.SGD, lr=0.01))  # fmt: skip
RUNNER = Runner(memoryview(b""))


def created(job, store, frozen=False, shares=False, cuts=1, **options):
    """What is in the store once all shards were created."""
    RUNNER.map(store.memory)
    description = dataclasses.replace(RUNNER.describe(job), shares=shares)
    edges = [*range(0, len(description.blocks), cuts), len(description.blocks)]
    plan = Cut(tuple(Part(first, end) for first, end in itertools.pairwise(edges)))
    RUNNER.adopt(job, plan, description, **options)
    for segment in units.segments(description, plan):
        store.define(segment)
    head = Head(job=job.name, frozen=frozen)
    while (unit := units.next_unit(description, plan, head)).phase == "create":
        lease = store.request(units.requests(description, plan, unit, head)).result()
        report = RUNNER.perform(unit, lease.places, head)
        lease.release()
        head = units.advance(description, plan, head, unit, report)
    return {name: tensor for name, _, tensor in tensors(description, plan, head, store)}


def check(found, model):
    wanted = dict([*model.named_parameters(), *model.named_buffers()])
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor.detach()), name
        assert found[name].dtype == tensor.dtype


@pytest.mark.parametrize("cuts", [1, 2, 100])
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_created_in_parts_it_equals_the_whole(cuts, precision, shifting):
    job = dataclasses.replace(JOB, precision=precision, seed=5)
    check(created(job, shifting(), cuts=cuts), job.build_model())


def test_jobs_of_one_model_have_weights_and_buffers_of_their_own_seeds(shifting):
    for seed in (1, 2):
        job = dataclasses.replace(JOB, seed=seed)
        check(created(job, shifting()), job.build_model())
    assert len(RUNNER._traced) <= 2, "and one chain"


def test_what_is_frozen_is_made_once_for_jobs_that_share_it(shifting):
    store = shifting()
    for name, frozen in (("one", False), ("two", True)):
        job = dataclasses.replace(JOB, name=name)
        check(created(job, store, frozen=frozen, shares=True), job.build_model())
    assert sum("/frozen/" in key for key in store.contents) == 1
    assert not [key for key in store.contents if key.startswith("one/frozen")]


def test_weights_come_from_a_file(shifting, tmp_path):
    other = dataclasses.replace(JOB, seed=9).build_model()
    with torch.no_grad():
        other.norm.running_mean.fill_(3)
    save_model(other, str(tmp_path / "model.safetensors"))
    for path in (tmp_path, tmp_path / "model.safetensors"):
        check(created(JOB, shifting(), weights=path), other)


def test_a_file_of_something_else_is_refused(shifting, tmp_path):
    model = JOB.build_model()
    state = {name: t.contiguous() for name, t in model.state_dict().items() if name != "other.weight"}
    save_file({**state, "last.bias": torch.zeros(5)}, str(tmp_path / "wrong.safetensors"))
    with pytest.raises(FileError, match=r"'last.bias' with shape \(5,\), and the model wants \(4,\)"):
        created(JOB, shifting(), weights=tmp_path / "wrong.safetensors")
    del state["last.bias"]
    save_file(state, str(tmp_path / "short.safetensors"))
    with pytest.raises(FileError, match=r"holds no tensor 'last.bias'"):
        created(JOB, shifting(), weights=tmp_path / "short.safetensors")


def test_optimizers_that_begin_with_state(shifting):
    adagrad = functools.partial(torch.optim.Adagrad, initial_accumulator_value=0.5)
    job = dataclasses.replace(JOB, optimizer=adagrad)
    store = shifting()
    created(job, store)
    assert any("/moments/" in key for key in store.contents)
