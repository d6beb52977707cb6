"""``plait.burst.background``: commands and jobs, their reports, checkpoints and ends.

Jobs are not idle here: on a machine that is busy with tests, importing torch would take them minutes.
"""

import json
import os
import signal
import time
from dataclasses import replace

import pytest

import plait.burst
from plait import reference
from plait.burst import leftover, task
from plait.errors import UsageError, WorkerError
from plait.job import Job

FACTORIES = """
import torch

def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

def data(seed):
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 4, generator=made)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

def loss(output, batch):
    return torch.nn.functional.mse_loss(output, batch[1])

def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)
"""
pytestmark = pytest.mark.usefixtures("published")


@pytest.fixture
def job(tmp_path, monkeypatch):
    name = f"background_factories_{os.getpid()}"
    (tmp_path / f"{name}.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    parts = {part: f"{name}:{part}" for part in ("model", "data", "loss", "optimizer")}
    return Job(name="small", batch=8, steps=400, **parts)


def test_a_job_is_moved_in_the_middle_and_ends_as_if_it_had_not_been(job, tmp_path, published):
    folder = tmp_path / "run"
    work = plait.burst.background(job, directory=folder, save_every=10, idle=False)
    while work.report.level == "" or not (folder / reference.CHECKPOINT).exists():
        assert work.exit_code is None, (folder / "background.log").read_text()
        time.sleep(0.05)
    assert work.checkpoint(60) == folder
    moved = work.exit_code
    report = work.stop()
    assert (report.slowdown, report.seconds) == (None, 0.0), "there was no foreground"
    assert not (folder / "result.json").exists() or moved == 0
    with plait.burst.background(job, directory=folder, save_every=10, idle=False) as again:
        assert again.wait(120) == 0, (folder / "background.log").read_text()
    told = json.loads((folder / "result.json").read_text())
    assert moved in (task.EXIT_MOVED, 0)
    assert told["losses"] == list(reference.train(job).losses)
    assert told["losses"][-1] < 0.5 * told["losses"][0]
    assert not published.exists()


def test_a_command_runs_beside_others_and_is_paused_by_hand(tmp_path):
    spin = ["sh", "-c", "while :; do :; done"]
    with plait.burst.background(spin, directory=tmp_path / "out") as work:
        other = work.add(["sh", "-c", "echo beside; exit 4"], directory=tmp_path / "out")
        assert other.wait(60) == 4
        other.stop()
        assert work.exit_code is None
        assert (tmp_path / "out" / "background.log").read_text() == "beside\n"
        work.pause()
        time.sleep(0.1)
        used = work._work.seconds()
        time.sleep(0.3)
        assert work._work.seconds() < used + 0.02  # what waits for a core stops when it gets one
        work.resume()
        while work._work.seconds() < used + 0.02:
            time.sleep(0.01)
        with pytest.raises(UsageError, match="cannot be checkpointed"):
            work.checkpoint()
        label = work._work.label
        assert work.report.level == "always"
    assert work.exit_code == -signal.SIGTERM
    assert leftover.members(label) == []


def test_what_is_added_is_paused_by_itself_and_has_the_bound_of_the_first():
    spin = ["sh", "-c", "while :; do :; done"]
    with plait.burst.background(spin) as work:
        other = work.add(spin)
        other.pause()
        assert (work._work.paused, other._work.paused) == (False, True)
        work.pause()
        other.resume()
        assert (work._work.paused, other._work.paused) == (True, True)
        work.resume()
        assert (work._work.paused, other._work.paused) == (False, False)
        with pytest.raises(UsageError, match="one for all works") as caught:
            work.add(spin, max_slowdown=1.5)
        assert caught.value.setting == "max_slowdown"


def test_a_background_that_is_killed_is_no_harm(job, tmp_path):
    work = plait.burst.background(job, directory=tmp_path / "run", idle=False)
    os.kill(work.pid, signal.SIGKILL)
    assert work.wait(60) == -signal.SIGKILL
    with pytest.raises(WorkerError, match="ended with -9 on the way to a checkpoint"):
        work.checkpoint(5)
    report = work.stop()
    assert report.preemptions == 0


def test_what_cannot_run_is_refused(job, tmp_path, published):
    cores = len(os.sched_getaffinity(0))
    (tmp_path / "file").write_text("")
    true = ["true"]
    for given, settings, setting in (
        ("sh -c true", {}, "command"),
        ([], {}, "command"),
        (true, {"max_slowdown": 0.9}, "max_slowdown"),
        (true, {"threads": 0}, "threads"),
        (true, {"threads": cores + 1}, "threads"),
        (true, {"memory": "1MiB"}, "memory"),
        (true, {"memory": "4Gb"}, "memory"),
        (true, {"cores": [10_000]}, "cores"),
        (true, {"directory": tmp_path / "file"}, "directory"),
        (job, {"threads": 2}, "threads"),
        (job, {"directory": tmp_path / "run", "save_every": 0}, "save_every"),
    ):
        with pytest.raises((UsageError, ValueError)) as caught:
            plait.burst.background(given, **settings)
        assert caught.value.setting == setting, given
        assert caught.value.works
    assert not published.exists()


def test_a_job_that_cannot_be_built_says_why(job, capsys):
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert task.main([replace(job, model="no_such_module:model").to_json()]) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "no_such_module" in capsys.readouterr().err
