"""The plan: to JSON and back, and what it refuses."""

import json
from itertools import pairwise

import pytest

from plait.errors import FileError, UsageError
from plait.spill.plan import Forecast, Shard, SpillPlan

FORECAST = Forecast(
    arena_peak_bytes=10,
    private_peak_bytes=20,
    kept_bytes=5,
    disk_bytes=100,
    read_bytes=7,
    written_bytes=8,
    compute_ms=1.0,
    read_ms=2.5,
    write_ms=0.5,
    step_ms=3.0,
    steps=4,
)


def plan(*edges, **changes):
    shards = tuple(
        Shard(first=first, end=end, activations="spill", saved_bytes=3) for first, end in pairwise(edges)
    )
    given = {
        "shards": shards,
        "arena_bytes": 11,
        "private_bytes": 21,
        "window_bytes": 10,
        "forecast": FORECAST,
    }
    return SpillPlan(**{**given, **changes})


def test_to_json_and_back(tmp_path):
    made = plan(0, 2, 5)
    assert SpillPlan.from_json(json.loads(json.dumps(made.to_json()))) == made
    made.save(tmp_path / "plan.json")
    assert SpillPlan.load(tmp_path / "plan.json") == made
    assert made.to_json()["format"] == "plait.plan.spill/1"


def test_what_follows_from_the_figures():
    assert plan(0, 2, 5).cuts == (2,)
    assert FORECAST.bottleneck == "read"
    assert FORECAST.stall_ms == 2.0
    assert FORECAST.run_ms == 12.0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "plait.plan.spill/2"}, "plait.plan.spill/1"),
        ({"shards": []}, "without shards"),
        ({"shards": [{"first": 1, "end": 2}]}, "begins at block 1"),
        ({"shards": [{"first": 0, "end": 2, "activations": "burn"}]}, "activations"),
        ({"shards": [{"first": 2, "end": 2}]}, "blocks 2 to 2"),
        ({"more": 1}, "more"),
    ],
)
def test_files_that_say_something_else_are_refused(change, says):
    with pytest.raises(FileError, match=says):
        SpillPlan.from_json({**plan(0, 1).to_json(), **change}, source="p.json")


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "p.json").write_text("{")
    for name in ("p.json", "none.json"):
        with pytest.raises(FileError, match=name):
            SpillPlan.load(tmp_path / name)


def test_figures_below_zero_are_refused():
    with pytest.raises(UsageError, match="step_ms is -1"):
        Forecast(**{**vars(FORECAST), "step_ms": -1})
