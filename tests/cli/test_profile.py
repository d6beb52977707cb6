"""``plait profile``: a jobs file measured, a profile shown, wrong files and options refused."""

import json

import pytest
from typer.testing import CliRunner

from plait.cli.app import app
from plait.errors import FileError, UsageError
from plait.profile import Profile

JOBS = """
import functools, torch
from torch import nn
from plait import Job

def model(): return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
def data(seed): return [(torch.ones(4), torch.tensor(i % 2)) for i in range(8)]

def job(name): return Job(name=name, model=model, data=data, loss="plait.losses:cross_entropy",
                          optimizer=functools.partial(torch.optim.SGD, lr=0.1), batch=4, steps=2)
jobs = [job("one"), job("two")]
"""


@pytest.fixture
def jobs(tmp_path):
    file = tmp_path / "jobs.py"
    file.write_text(JOBS)
    return file


def run(*words):
    result = CliRunner().invoke(app, ["profile", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_jobs_file_is_measured_saved_and_shown(jobs, tmp_path):
    out = tmp_path / "p.json"
    result = run(jobs, "--batch", "2,4", "--repetitions", 1, "--out", out)
    assert result.exit_code == 0
    assert "Sequential on cpu, 1 thread" in result.stdout
    profile = Profile.load(out)
    assert profile.batch_sizes == (2, 4)
    assert [block.optimizer_bytes for block in profile.blocks] == [0, 0]  # plain SGD keeps nothing
    shown = run(out, "--json")
    assert Profile.from_json(json.loads(shown.stdout)) == profile


def test_all_sizes_up_to_the_jobs_batch_are_measured(jobs):
    result = run(jobs, "--repetitions", 1, "--json")
    assert Profile.from_json(json.loads(result.stdout)).batch_sizes == (1, 2, 4)


def test_json_is_alone_on_standard_output(jobs):
    result = run(jobs, "--job", "two", "--batch", "2", "--repetitions", 1, "--json")
    assert Profile.from_json(json.loads(result.stdout)).model == "Sequential"


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["--job", "three"], UsageError, "no job 'three'.*one, two"),
        (["--batch", "two"], UsageError, "'two' is no list of batch sizes"),
        (["--batch", "2,0"], UsageError, r"^a batch of 0 rows \(setting: --batch\); works: 1,2,4,8$"),
        (["--repetitions", "0"], UsageError, r"\(setting: --repetitions\); works: 5$"),
        (["--threads", "0"], UsageError, r"\(setting: --threads\); works: 1$"),
        (["--out", "no/such/p.json"], FileError, "no/such/p.json cannot be written: No such file"),
        (["--out", "/tmp"], FileError, "/tmp cannot be written: Is a directory"),
        (["--out", "/proc/x"], FileError, "/proc/x cannot be written: No such file"),
    ],
)
def test_wrong_options_are_refused(jobs, words, error, message, monkeypatch):
    monkeypatch.setattr("plait.chain.Chain.of_job", lambda job: pytest.fail("it was traced first"))
    with pytest.raises(error, match=message):
        run(jobs, *words)


def test_what_was_measured_is_printed_before_a_file_fails(jobs):
    words = ["profile", str(jobs), "--batch", "2", "--repetitions", "1", "--json", "--out", "/dev/full"]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, FileError)
    assert "/dev/full cannot be written: No space left" in str(result.exception)
    assert Profile.from_json(json.loads(result.stdout)).batch_sizes == (2,)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 1\nx = = 2", ", line 2: SyntaxError: invalid syntax"),
        ("\nimport nowhere_to_be_found", ", line 2: ModuleNotFoundError: No module named 'nowhere"),
        ("def f():\n  1 / 0\n\nf()", ", line 2: ZeroDivisionError: division by zero"),
    ],
)
def test_a_jobs_file_that_fails_is_named_with_line_and_reason(tmp_path, text, reason):
    file = tmp_path / "bad.py"
    file.write_text(text)
    with pytest.raises(FileError) as caught:
        run(file)
    assert caught.value.what.startswith(f"{file}{reason}")
    assert "\n" not in str(caught.value)


def test_files_beyond_a_parsers_limits_are_named(tmp_path):
    file = tmp_path / "p.json"
    for text in ("[" * 100_000, '{"threads": ' + "1" * 5000 + "}"):
        file.write_text(text)
        with pytest.raises(FileError, match=r"p\.json is no JSON, or not whole: "):
            run(file)


def test_wrong_files_are_named(tmp_path):
    with pytest.raises(FileError, match=r"gone\.py"):
        run(tmp_path / "gone.py")
    cut = tmp_path / "cut.json"
    cut.write_text('{"format": "plait.prof')
    with pytest.raises(FileError, match=r"cut\.json is no JSON"):
        run(cut)
