"""Weights leave the store as a safetensors file: whole, under the model's names, and killed at any moment."""

import dataclasses
import functools
import itertools
import os
import signal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model
from torch import nn

from plait import losses, reference
from plait.errors import FileError
from plait.job import Job
from plait.spill import export as exporting
from plait.spill.executor import execute
from plait.spill.export import export, is_exporting
from plait.spill.runner import Runner
from plait.spill.store import Store


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
    """A tied weight, a frozen one, one in another memory layout, buffers of which one is not saved."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.other = nn.Linear(6, 6, bias=False)
        self.other.weight = self.first.weight
        self.middle.requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.turned = nn.Parameter(torch.randn(6, 6).t())
        self.unused = nn.Parameter(torch.randn(5))
        self.register_buffer("table", torch.rand(6), persistent=False)

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        x = torch.tanh(self.middle(x)) @ self.turned
        return self.last(torch.tanh(self.other(x)) * self.table)


def net():
    return Net()


def points(seed):
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(seed))
    return [(x[i], int(x[i].argmax()) % 4) for i in range(16)]


JOB = Job(
    name="net", model=net, data=points, loss=losses.cross_entropy, batch=8, steps=3,
    optimizer=functools.partial(torch.optim.Adam, lr=0.01),
)  # fmt: skip


@pytest.fixture(scope="module")
def known():
    runner = Runner(memoryview(b""))
    description = runner.describe(JOB)
    edges = range(len(description.blocks) + 1)
    plan = Cut(tuple(Part(first, end) for first, end in itertools.pairwise(edges)))
    return runner, description, plan, reference.train(JOB).model


@pytest.fixture
def store(tmp_path, known):
    """A store with the result of the job in it."""
    runner, description, plan, _ = known
    with Store.create(tmp_path / "store", memory_bytes=1 << 22) as store:
        runner.map(store.memory)
        execute(JOB, plan, store, runner=runner, description=description)
        runner.map(memoryview(b""))
        yield store


def check(file, model):
    found = net()
    load_model(found, file)
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    with safe_open(file, "pt") as opened:
        assert set(opened.keys()) == set(model.state_dict()) - {"other.weight"}
        assert opened.metadata() == {"format": "pt", "other.weight": "first.weight"}


def test_the_file_holds_the_model(store, known, tmp_path):
    _, description, plan, model = known
    assert model.turned.stride() == (1, 6)
    file = export(store, description, plan, tmp_path / "out" / "net.safetensors")
    check(file, model)
    assert store.groups() == (), "the store has given all of it up"
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_copy_leaves_the_store_as_it_is(store, known, tmp_path):
    _, description, plan, model = known
    before = store.committed("net")
    for name in ("one", "two"):
        check(export(store, description, plan, tmp_path / f"{name}.safetensors", move=False), model)
    assert store.committed("net") == before
    assert not is_exporting(before)


def test_the_disk_never_holds_the_model_twice(store, known, tmp_path, monkeypatch):
    _, description, plan, _ = known
    room, copy = [], exporting._copy

    def watched(*args):
        room.append(store.statistics().disk_bytes)
        copy(*args)

    monkeypatch.setattr(exporting, "_copy", watched)
    full = store.statistics().disk_bytes
    export(store, description, plan, tmp_path / "net.safetensors")
    assert room == sorted(room, reverse=True)
    assert room[0] < full * 0.7, "moments go first"
    assert room[-1] < room[0] / 3


def test_it_says_where_there_is_no_room(store, known, tmp_path):
    _, description, plan, _ = known
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"net.safetensors.partial cannot be written"):
        export(store, description, plan, tmp_path / "file" / "net.safetensors")


def killed(directory, file, moment):
    """In a process of its own: export, and die at the given call of something that touches the disk."""
    from plait.spill.store import Store

    runner = Runner(memoryview(b""))
    description = runner.describe(JOB)
    edges = range(len(description.blocks) + 1)
    plan = Cut(tuple(Part(first, end) for first, end in itertools.pairwise(edges)))
    store = Store.open(directory, memory_bytes=1 << 22)
    calls = itertools.count()
    originals = {"fsync": os.fsync, "replace": os.replace, "rename": os.rename, "fdatasync": os.fdatasync}

    def deadly(name):
        def call(*args, **kwargs):
            result = originals[name](*args, **kwargs)
            if next(calls) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in originals:
        setattr(os, name, deadly(name))
    export(store, description, plan, file)
    os._exit(7)


@pytest.mark.parametrize("moment", [0, 5, 13])
def test_killed_at_any_moment_it_goes_on(moment, store, known, tmp_path, forkserver):
    _, description, plan, model = known
    store.close(keep=True)
    file = tmp_path / "net.safetensors"
    process = forkserver.Process(target=killed, args=(tmp_path / "store", file, moment))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with Store.open(tmp_path / "store", memory_bytes=1 << 22) as again:
        note = again.committed("net")
        assert note["head"]["stage"] == "done"
        check(export(again, description, plan, file), model)
        assert again.groups() == ()
