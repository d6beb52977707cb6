"""What is said of steps at the end of a run."""

import pytest
from made_runs import create, planned, row

from plait.engine import expectation
from plait.engine.figures import Placed
from plait.engine.record import Record


def placed(how="foreground", step_ms=61.0):
    where = {"job": "first", "how": how, "option": "data", "devices": ("a",), "wire_bytes": None}
    return Placed(**where, start_ms=0, end_ms=1, step_ms=step_ms)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (placed(), "first: expected 61 ms, took 162 ms a step"),
        (placed("alternated"), "first: expected 61 ms, took 162 ms a step, the turns of others included"),
        (placed("background"), None),
        (placed(step_ms=None), None),
    ],
)
def test_a_line_where_both_are_known(where, said):
    rows = [{"seconds": 0.2}, {"seconds": 0.162}, {"seconds": 0.1}, {"loss": 1.0}]
    assert expectation.line(where, rows) == said
    assert expectation.line(where, [{"loss": 1.0}]) is None


def test_the_lines_of_a_run_are_of_jobs_that_made_steps(tmp_path):
    with create(tmp_path / "run", "gpt", "small") as made:
        made.step(row("gpt", 0, seconds=0.25))
    (said,) = expectation.lines(Record.read(tmp_path / "run"))
    assert said.startswith("gpt: expected ")
    assert said.endswith(" ms, took 250 ms a step")
    assert planned("gpt", "small").placement("gpt").option.step_ms > 0
    (tmp_path / "run" / "plan.json").unlink()
    assert list(expectation.lines(Record.read(tmp_path / "run"))) == []
