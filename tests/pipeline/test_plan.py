"""Plans as files, and as what cannot be."""

import json
from dataclasses import replace

import pytest

from plait.errors import FileError, UsageError
from plait.pipeline.orders import kfkb, work_conserving
from plait.pipeline.plan import Forecast, PipelinePlan, Stage

PLAN = PipelinePlan(
    stages=(Stage(first=0, end=3), Stage(first=3, end=4)),
    order=kfkb(2, 8, 2),
    global_batch=32,
    forecast=Forecast(step_ms=100.0, busy_ms=(80.0, 70.0), peak_bytes=(1000, 900)),
)


def test_there_and_back(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert PipelinePlan.load(tmp_path / "plan.json") == PLAN
    other = replace(PLAN, order=work_conserving(2, 8, [3, 1]))
    assert PipelinePlan.from_json(json.loads(json.dumps(other.to_json()))) == other


def test_what_it_says():
    assert PLAN.cuts == (3,)
    assert PLAN.candidate.rows == 4
    assert PLAN.forecast.idle == pytest.approx(0.25)
    assert PLAN.to_json()["format"] == "plait.plan.pipeline/1"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "plait.plan.spill/1"}, "'plait.plan.spill/1'"),
        ({"more": 1}, "field 'more'"),
        (
            {"stages": [{"first": 0, "end": 3}, {"first": 4, "end": 5}]},
            "begins at block 4 where .* ends at 3",
        ),
        ({"stages": [{"first": 0, "end": 4}]}, "1 stages, an order of 2"),
        ({"stages": [{"first": 2, "end": 1}]}, "blocks 2 to 1"),
        ({"order": {"family": "kfkb", "stages": 2, "micro_batches": 8, "k": 9}}, "k = 9 of only 8"),
        ({"order": {"family": "spiral"}}, "'spiral' is no family"),
        ({"global_batch": 4}, "4 rows cannot be cut into 8"),
        ({"forecast": {"step_ms": -1, "busy_ms": [1, 1], "peak_bytes": [1, 1]}}, "step_ms has -1"),
    ],
)
def test_files_that_cannot_be(change, says):
    with pytest.raises(FileError, match=f"some.json: .*{says}"):
        PipelinePlan.from_json({**PLAN.to_json(), **change}, source="some.json")


def test_a_file_that_is_no_plan(tmp_path):
    (tmp_path / "half.json").write_text('{"format": "pl')
    with pytest.raises(FileError, match="no JSON"):
        PipelinePlan.load(tmp_path / "half.json")
    with pytest.raises(FileError, match="cannot be read"):
        PipelinePlan.load(tmp_path / "none.json")
    with pytest.raises(UsageError, match="blocks 1 to 1"):
        Stage(first=1, end=1)
