"""A job whose own code raises is told in one sentence, by every command that measures it; of `plait run`, see
tests/engine/test_diagnosis.py."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from plait.cli.app import app
from plait.errors import UsageError

JOBS = """
import dataclasses, functools, pathlib, torch
from torch import nn
from plait import Job

def model(width=4): return nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 2))
def data(seed): return [(torch.ones(4), torch.tensor(i % 2)) for i in range(8)]
def no_model(): raise ValueError("no model today")
def no_data(seed): raise KeyError("rows")
def while_it_is_there(seed): return data(pathlib.Path("rows").stat() and seed)
def no_inputs(batch): return batch["x"]
def no_optimizer(parameters): raise OSError("no file of rates")

fine = Job(name="fine", model=model, data=data, loss="plait.losses:cross_entropy",
           optimizer=functools.partial(torch.optim.SGD, lr=0.1), batch=4, epochs=2)
wrong = functools.partial(dataclasses.replace, fine, name="wrong")
"""
BROKEN = {
    "model": ("model=no_model", r"its model \S*:no_model raised ValueError: no model today"),
    "data": ("data=no_data", r"its data \S*:no_data raised KeyError: 'rows'"),
    "inputs": ("inputs=no_inputs", r"its inputs \S*:no_inputs raised TypeError: "),
    "optimizer": (
        "optimizer=no_optimizer",
        r"its optimizer \S*:no_optimizer raised OSError: no file of rates",
    ),
    "shapes": (
        "model=functools.partial(model, width=5)",
        r"its model .* cannot take a batch of 4 rows, which",
    ),
}
COMMANDS = {
    "plan": ["plan", "--devices", "2"],
    "profile": ["profile", "--batch", "2", "--repetitions", "1", "--job", "wrong"],
    "sim": ["sim", "--devices", "2"],
}


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """A jobs file, by what it lists."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def write(listed):
        file = tmp_path / "jobs.py"
        file.write_text(f"{JOBS}\njobs = [{listed}]\n")
        return str(file)

    return write


@pytest.mark.parametrize("part", BROKEN)
@pytest.mark.parametrize("command", COMMANDS)
def test_it_is_told_with_the_job_the_part_and_the_line(jobs, command, part):
    change, what = BROKEN[part]
    name, *words = COMMANDS[command]
    done = CliRunner().invoke(app, [name, jobs(f"wrong({change})"), *words])
    assert isinstance(done.exception, UsageError), done.exception
    with pytest.raises(UsageError, match=rf"^job 'wrong': {what}"):
        raise done.exception
    if part != "shapes":
        assert "(jobs.py:" in str(done.exception)


@pytest.mark.parametrize("command", ["plan", "sim"])
def test_so_it_is_of_one_job_among_several(jobs, command):
    name, *words = COMMANDS[command]
    done = CliRunner().invoke(app, [name, jobs(f"fine, wrong({BROKEN['model'][0]})"), *words])
    with pytest.raises(UsageError, match=r"^job 'wrong': its model "):
        raise done.exception


def test_epochs_that_cannot_be_counted_are_told_where_the_profile_is_known(jobs, tmp_path):
    """The data is asked for them, also where nothing is measured."""
    file = jobs("wrong(data=while_it_is_there)")
    words = ["plan", file, "--devices", "1"]
    (tmp_path / "rows").touch()
    assert CliRunner().invoke(app, words).exit_code == 0
    (tmp_path / "rows").unlink()
    done = CliRunner().invoke(app, words)
    with pytest.raises(UsageError, match=r"^job 'wrong': its data \S*:while_it_is_there raised FileNotFound"):
        raise done.exception


def test_nothing_but_that_sentence_is_printed(jobs):
    name, *words = COMMANDS["plan"]
    file = jobs(f"wrong({BROKEN['shapes'][0]})")
    done = subprocess.run(
        [sys.executable, "-m", "plait", name, file, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (*doing, said) = done.stderr.splitlines()
    assert said.startswith("plait: job 'wrong': its model ")
    assert len(doing) == 1, done.stderr  # what is being done
