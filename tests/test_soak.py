"""Fault loops: kill -9 at seeded random moments, over and over in `make soak`, a few times in `make test`."""

import random
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from torch import nn

from plait import Job, reference
from plait.lab import Lab
from plait.lab.label import Label
from plait.lab.memory import find_hierarchy
from plait.lab.network import NAMESPACES, missing
from plait.reference import CHECKPOINT
from reference_jobs import work

ROUNDS = [pytest.param(3, id="few"), pytest.param(100, id="many", marks=pytest.mark.soak)]
STEPS = 200


def model():
    return nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 1))


def data(seed):
    rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed))
    return [(row, row.sum(0, keepdim=True)) for row in rows]


def job():
    return Job(
        name="soak", model=model, data=data, loss="plait.losses:mean_squared_error", batch=16, steps=STEPS,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
    )  # fmt: skip


@pytest.mark.parametrize("rounds", ROUNDS)
def test_training_that_is_killed_ends_with_the_same_bits(rounds, tmp_path, forkserver):
    chance = random.Random(rounds)
    description, checkpoint = tmp_path / "job.json", tmp_path / "run" / CHECKPOINT
    description.write_text(job().to_json())
    words = [str(description), "--directory", str(checkpoint.parent), "--save-every", "1", "--resume"]
    for _ in range(rounds):
        before = stamp(checkpoint)
        process = forkserver.Process(target=work, args=(words,), daemon=True)
        process.start()
        while process.is_alive() and stamp(checkpoint) == before:
            time.sleep(0.002)  # until it writes
        time.sleep(chance.random() * 0.1)
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        assert stamp(checkpoint) is not None
    resumed = reference.train(job(), resume=checkpoint, directory=checkpoint.parent)
    whole = reference.train(job())
    assert resumed.losses == whole.losses
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    assert [file.name for file in checkpoint.parent.iterdir()] == [CHECKPOINT]


def stamp(file):
    return file.stat().st_mtime_ns if file.exists() else None


@pytest.mark.skipif(missing() is not None, reason="the lab's namespaces need root and iproute2")
@pytest.mark.parametrize("rounds", ROUNDS)
def test_labs_that_are_killed_leave_nothing(rounds):
    chance, killed = random.Random(rounds), set()
    command = [sys.executable, "-c", "from plait.cli import main; main()", "lab", "run", "--hosts", "3"]
    command += ["--rate", "1gbit", "--memory", "256MiB", "--", "sleep", "600.5"]
    for _ in range(rounds):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        killed.add(process.pid)
        time.sleep(chance.random() * 1.5)
        process.kill()
        process.wait()
    with Lab(hosts=1):
        assert [label for label in labels() if label.pid in killed] == []


def labels():
    """Whose namespaces and memory groups are on this machine."""
    hierarchy = find_hierarchy()
    folders = [NAMESPACES] + ([] if hierarchy is None else [hierarchy.root])
    names = [entry.name for folder in folders if folder.is_dir() for entry in folder.iterdir()]
    return [label for label in map(Label.find, names) if label is not None]
