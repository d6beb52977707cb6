"""Outcomes: read and written, found by name, and what was foretold beside what was measured."""

import math

import pytest

from plait.errors import FileError, UsageError
from plait.evaluation import Evaluated
from plait.spill.outcome import Figures, Outcome, Outcomes, comparison

FIGURES = Figures(
    memory_bytes=2**30, disk_bytes=2**31, read_bytes=10, written_bytes=20, busy_seconds=3.5, seconds=2.0
)


def outcome(tmp_path, **changes):
    given = {
        "name": "a",
        "end": "finished",
        "losses": (1.5, math.inf, 0.1),
        "evaluations": (Evaluated(step=3, loss=0.2, metrics={"accuracy": 0.5}),),
        "skipped": (1,),
        "weights": tmp_path / "a.safetensors",
        "busy_seconds": 1.25,
    }
    return Outcome(**(given | changes))


def test_an_outcome_survives_its_file(tmp_path):
    file = tmp_path / "a.json"
    for made in (outcome(tmp_path), outcome(tmp_path, end="failed", weights=None, error="ValueError: no")):
        file.write_text(made.to_json())
        assert Outcome.load(file) == made


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"format": "plait.job/1"}', '{"format": 3'])
def test_a_file_that_is_no_outcome_is_named(content, tmp_path):
    file = tmp_path / "a.json"
    file.write_text(content)
    with pytest.raises(FileError, match=r"a\.json is not the outcome of a job"):
        Outcome.load(file)


def test_outcomes_are_found_by_number_and_name(tmp_path):
    made = [
        outcome(tmp_path),
        outcome(tmp_path, name="b", end="failed", losses=(), error="ValueError: no\nmore"),
    ]
    notes = ["device 0 died"]
    all_of_them = Outcomes(made, forecast=FIGURES, measured=FIGURES, bound_seconds=1.5, notes=notes)
    assert (len(all_of_them), all_of_them["b"], all_of_them[0]) == (2, made[1], made[0])
    assert list(all_of_them) == made
    assert all_of_them[:1] == (made[0],)
    with pytest.raises(UsageError, match=r"no job 'c'.*works: a, b"):
        all_of_them["c"]
    text = str(all_of_them)
    assert "a: finished after 3 steps, loss 0.1" in text
    assert "b: failed after 0 steps: ValueError: no\n" in text
    assert "device 0 died" in text


def test_figures_are_laid_side_by_side():
    rows = comparison(FIGURES, FIGURES)
    assert rows[0] == ("peak memory", "1.00 GiB", "1.00 GiB")
    assert len(rows) == len(vars(FIGURES))
