"""The examples train, and the code in the page about jobs runs as printed."""

import dataclasses
import re
from pathlib import Path

import pytest

from plait import reference
from plait.factory import load_file
from plait.job import Job, read_jobs

ROOT = Path(__file__).parents[1]


def test_the_text_jobs_learn():
    jobs = read_jobs(ROOT / "examples" / "text.py")
    assert [job.name for job in jobs] == ["text", "text-dropout", "text-gpt2"]
    for job in jobs:
        result = reference.train(dataclasses.replace(job, steps=8, evaluation=None))
        assert sum(result.losses[-3:]) < 0.9 * sum(result.losses[:3]), job.name


def test_their_jobs_travel_by_the_path_of_the_file():
    for job in read_jobs(ROOT / "examples" / "text.py"):
        assert Job.from_json(job.to_json()) == job
        assert job.model.target.startswith(str(ROOT / "examples" / "text.py"))


def test_the_digits_are_read():
    (job,) = read_jobs(ROOT / "examples" / "digits.py")
    result = reference.train(dataclasses.replace(job, epochs=None, steps=30))
    assert result.evaluations[-1].metrics["accuracy"] > 0.8


@pytest.mark.parametrize("page", ["job.md"])
def test_the_code_of_a_page_runs_as_printed(page, tmp_path, capsys):
    text = (ROOT / "docs" / page).read_text()
    script = tmp_path / "page.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)))
    load_file(script)
    assert re.search(r"loss \d\.\d\d -> 0\.[0-4]\d in 100 steps", capsys.readouterr().out)
