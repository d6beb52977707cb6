"""The examples train."""

import dataclasses
from pathlib import Path

from plait import reference
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
