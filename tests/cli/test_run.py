"""`plait run`: a jobs file in, results and a report out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.cli.app import app
from plait.cluster import Cluster
from plait.engine import Limits
from plait.errors import FileError, UsageError

JOBS = """
import functools
import torch
from torch import nn
import plait
from plait.losses import cross_entropy

def net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

def points(seed, *, broken=False):
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(seed))
    if broken:
        x[:] = float("inf")
    return [(row, row.argmax() % 4) for row in x]

good = plait.Job(
    name="good", model=net, data=points, loss=cross_entropy, optimizer=torch.optim.AdamW, batch=8, steps=3,
    strategy="data",
)
import dataclasses
bad = dataclasses.replace(good, name="bad", data=functools.partial(points, broken=True))
"""


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """A jobs file, by what it lists."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def write(listed):
        (tmp_path / "jobs.py").write_text(f"{JOBS}\njobs = [{listed}]\n")
        return "jobs.py"

    return write


def run(*words):
    return CliRunner().invoke(app, ["run", *words])


def test_jobs_are_trained_and_one_that_fails_is_told_by_the_exit_code(jobs, tmp_path):
    done = run(jobs("good, bad"), "--json", "--devices", "1")
    assert done.exit_code == 1, done.output
    told = json.loads(done.stdout)
    assert told["jobs"]["good"]["end"] == "finished"
    assert told["jobs"]["good"]["steps"] == 3
    assert "nonfinite" in told["jobs"]["bad"]["error"]
    assert (tmp_path / told["report"]).is_file()
    assert told["directory"] == "runs/good-and-1"


def test_what_bounds_a_run_reaches_it(jobs, monkeypatch):
    given = {}
    monkeypatch.setattr("plait.engine.running.run", lambda *_, **settings: given.update(settings) or 1 / 0)
    run(jobs("good"), "--silence", "45", "--restarts", "7")
    assert given["limits"] == Limits(silence_s=45.0, restarts=7)


def test_what_is_planned_can_be_looked_at_or_written_for_others(jobs, tmp_path):
    done = run(jobs("good"), "--dry-run", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["plan"]["ways"]
    assert not (tmp_path / "runs").exists()
    done = run("jobs.py", "--dry-run")
    assert done.stdout.startswith("plan: data, fp32 on ")
    assert "  good: data on " in done.stdout
    done = run("jobs.py", "--emit", "torchrun", "--directory", "runs/written")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "runs/written/tasks/good/torchrun.sh").is_file()


def test_files_are_written_for_hosts_on_which_nothing_can_be_started_from_here(jobs, tmp_path):
    Cluster.uniform(hosts=2, memory="4GiB", bandwidth="10gbit", latency="50us").save(tmp_path / "two.toml")
    asked = (jobs("good"), "--cluster", str(tmp_path / "two.toml"), "--strategy", "burst")
    done = run(*asked, "--emit", "slurm", "--directory", "runs/two")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "runs/two/tasks/good/slurm.sh").is_file()
    assert isinstance(run(*asked).exception, UsageError)


def test_a_file_that_runs_its_jobs_while_it_is_read_is_refused(jobs, tmp_path):
    """Before anything is trained: its jobs would be trained twice."""
    jobs("good")
    with (tmp_path / "jobs.py").open("a") as file:
        file.write("plait.run(jobs)\n")
    done = run("jobs.py")
    assert isinstance(done.exception, UsageError)
    assert "plait.run is called where plait run reads jobs.py for its jobs" in str(done.exception)
    assert "if __name__ == '__main__'" in done.exception.works
    assert not Path("runs").exists()


def test_a_file_that_takes_long_to_be_read_is_said(jobs, tmp_path, monkeypatch):
    monkeypatch.setattr("plait.cli.run._READING_S", 0.1)
    (tmp_path / "jobs.py").write_text("import time\ntime.sleep(0.5)\n")
    done = run("jobs.py")
    assert "defines neither jobs nor a job" in str(done.exception)
    assert "plait: jobs.py is still being read" in done.stderr


def test_importing_torch_is_not_the_files_doing(jobs, tmp_path):
    """However long it takes: what follows counts."""
    slow = tmp_path / "slow" / "torch.py"
    slow.parent.mkdir()
    slow.write_text("import time\ntime.sleep(1)\n")
    code = (
        "import pathlib\nfrom plait.cli import run\nrun._READING_S = 0.5\n"
        "with run._said_if_long(pathlib.Path('jobs.py')): import torch"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(slow.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""


def test_a_run_that_is_stopped_while_it_is_planned_says_that_nothing_began(jobs, monkeypatch):
    def stopped(*_, directory, **settings):
        if directory is not None:
            directory.mkdir(parents=True)
            (directory / "config.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("plait.engine.running.run", stopped)
    done = run(jobs("good"))
    assert (done.exit_code, done.stderr) == (130, "plait: stopped before anything was started\n")
    done = run("jobs.py", "--directory", "runs/begun")
    assert (done.exit_code, done.stderr) == (130, "")


def test_the_directory_of_another_run_is_refused_with_what_goes_on_with_it(jobs, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").touch()
    done = run(jobs("good"), "--directory", "old")
    assert isinstance(done.exception, FileError)
    told = "(setting: --directory); works: --resume old to go on with it, or another --directory"
    assert told in str(done.exception)


@pytest.mark.parametrize(
    ("words", "error", "what"),
    [
        ([], UsageError, "neither a jobs file nor a run"),
        (["jobs.py", "--resume", "runs/x"], UsageError, "a jobs file and --resume"),
        (["none.py"], FileError, "there is no jobs file none.py"),
        (["jobs.py", "--compress", "many"], UsageError, "gradients in 'many' bits"),
        (["jobs.py", "--strategy", "magic"], UsageError, "there is no strategy 'magic'"),
        (["jobs.py", "--emit", "condor"], UsageError, "condor"),
        (["--resume", "runs/x"], FileError, "runs/x holds no run"),
        (["--resume", "runs/x"], FileError, "(setting: --resume)"),
        (["jobs.py", "--memory", "2Gb"], UsageError, "(setting: --memory)"),
        (["jobs.py", "--save-every", "0"], UsageError, "(setting: --save-every)"),
        (["--resume", "runs/x", "--strategy", "data"], UsageError, "--strategy for a run that goes on"),
        (["--resume", "runs/x", "--dry-run"], UsageError, "--dry-run for a run that goes on"),
        (["--resume", "runs/x", "--objective", "none"], UsageError, "--objective for a run that goes on"),
        (["--resume", "runs/x", "--objective", "makespan"], UsageError, "--objective for a run that goes on"),
        (["--resume", "runs/x", "--max-slowdown", "0.1"], UsageError, "--max-slowdown for a run that"),
        (["--resume", "runs/x", "--cache", "there"], UsageError, "--cache for a run that goes on"),
        (["--resume", "runs/x", "--restarts", "1", "--sink", "tensorboard"], FileError, "holds no run"),
        (["jobs.py", "--sink", "foo"], UsageError, "there is no sink 'foo'"),
        (["jobs.py", "--max-slowdown", "0.9"], UsageError, "a step at 0.9 times its length"),
        (
            ["jobs.py", "--silence", "0"],
            UsageError,
            "after 0 s: it is heard once a second (setting: --silence)",
        ),
        (["jobs.py", "--silence", "-1"], UsageError, "works: 3 or more, such as 60"),
        (["jobs.py", "--silence", "nan"], UsageError, "after nan s"),
        (["jobs.py", "--silence", "inf"], UsageError, "after inf s"),
        (["jobs.py", "--restarts", "-1"], UsageError, "restarts"),
        (["--resume", "runs/x", "--silence", "30"], FileError, "holds no run"),
    ],
)
def test_what_makes_no_sense_is_refused(jobs, words, error, what):
    jobs("good")
    done = run(*words)
    assert isinstance(done.exception, error)
    assert what in str(done.exception)
    assert not Path("runs").exists()  # nothing that would be in the way next time
