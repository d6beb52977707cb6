"""A digest of code: what defines something counts, what lists jobs does not."""

import pytest

from plait.factory import Factory
from plait.strategy.code import code_digest

FILE = """
import functools, torch
from plait import Job

WIDTH = 4

def net():
    return torch.nn.Linear(WIDTH, 2)

job = Job(name="one", model=net, optimizer=functools.partial(torch.optim.SGD, lr=0.1), steps=5)

if __name__ == "__main__":
    print(job)
"""


@pytest.fixture
def digest_of(tmp_path):
    file = tmp_path / "jobs.py"

    def digest(text):
        file.write_text(text)
        return code_digest(Factory(f"{file}:net"))

    return digest


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("lr=0.1", "lr=0.2"),
        ('name="one"', 'name="two"'),
        ("job = Job(", "job: Job = Job("),
        ('job = Job(name="one"', 'jobs = [Job(name=str) for str in "ab"]\njob = Job(name="one"'),
        ("print(job)", "print(job, 2)"),
        ("WIDTH = 4", "WIDTH  =  4  # wide"),
    ],
)
def test_what_lists_jobs_does_not_count(digest_of, before, after):
    assert before in FILE
    assert digest_of(FILE) == digest_of(FILE.replace(before, after))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("WIDTH = 4", "WIDTH = 8"),
        ("WIDTH, 2", "WIDTH, 3"),
        ("import functools, torch", "import functools, math, torch"),
        ("steps=5", "steps=(WIDTH := 5)"),
        ("steps=5", "steps=widen(5)"),
        ("job = Job", "other = Job"),
        ("print(job)\n", "print(job)\nelse:\n    WIDTH = 8\n"),
    ],
)
def test_what_defines_something_does(digest_of, before, after):
    assert before in FILE
    assert digest_of(FILE) != digest_of(FILE.replace(before, after))


def test_jobs_that_other_code_reads_count(digest_of):
    reading = FILE.replace("WIDTH, 2)", "job.steps, 2)")
    assert digest_of(reading) != digest_of(reading.replace("steps=5", "steps=6"))


def test_a_file_that_python_cannot_read_counts_as_it_is(digest_of):
    assert digest_of("x = = 1") not in (digest_of("x = = 2"), None)


def test_of_a_module_its_file_counts(tmp_path, monkeypatch):
    assert code_digest(Factory("torch.optim:SGD")) == code_digest(Factory("torch.optim:Adam")) is not None
    assert code_digest(Factory("nowhere.at.all:f")) is None
    assert code_digest(Factory("math:sqrt")) == code_digest(Factory("math:floor"))  # no Python file, perhaps
    assert code_digest(Factory(f"{tmp_path}/gone.py:f")) is None
