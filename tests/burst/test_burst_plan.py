"""Plans as files, and as what cannot be."""

import json

import pytest

from plait.burst import BurstPlan
from plait.burst.burst_plan import Forecast
from plait.errors import FileError, UsageError

FORECAST = Forecast(step_ms=10.0, device_ms=18.0, single_ms=12.0, idle_ms=(0.0, 2.0, 10.0))
PLAN = BurstPlan(blocks=("a", "b", "c"), widths=(2, 2, 1), devices=3, batch=5, forecast=FORECAST)


def test_there_and_back(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert BurstPlan.load(tmp_path / "plan.json") == PLAN
    by_hand = BurstPlan.of(["a", "b"], [3, 1], batch=4)
    assert by_hand.devices == 3
    assert BurstPlan.from_json(json.loads(json.dumps(by_hand.to_json()))) == by_hand


def test_what_it_says():
    assert PLAN.width == 2
    assert PLAN.shares(0) == (3, 2)
    assert PLAN.held(0) == (0, 1, 2)
    assert PLAN.held(1) == (0, 1)
    assert PLAN.held(2) == ()
    assert FORECAST.amplification == 1.5
    assert FORECAST.speedup == 1.2
    assert PLAN.to_json()["format"] == "plait.plan.burst/1"
    assert PLAN.to_json()["widths"] == [2, 2, 1]


def test_differences_are_named():
    assert PLAN.difference(PLAN) is None
    of = BurstPlan.of
    assert "devices is 3 and 2" in PLAN.difference(of("abc", [2, 2, 1], batch=5))
    assert "batch is 5 and 6" in PLAN.difference(of("abc", [2, 2, 1], batch=6, devices=3))
    assert "3 and 2 blocks" in PLAN.difference(of("ab", [2, 2], batch=5, devices=3))
    assert "block 1 is 'b' and 'x'" in PLAN.difference(of("axc", [2, 2, 1], batch=5, devices=3))
    assert "block 'b' has width 2 and 3" in PLAN.difference(of("abc", [2, 3, 1], batch=5))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "plait.plan.spill/1"}, "'plait.plan.spill/1'"),
        ({"more": 1}, "field 'more'"),
        ({"widths": [1, 1]}, "2 widths for 3 blocks"),
        ({"blocks": ["a", "a", "b"]}, "two blocks are called 'a'"),
        ({"widths": [4, 1, 1]}, "block 'a' has width 4, with 3 devices"),
        ({"batch": 1}, "block 'a' has width 2, with 3 devices and 1 rows"),
        ({"widths": [0, 1, 1]}, "widths is 0"),
        ({"devices": 2}, "a forecast of 3 devices for 2"),
        ({"forecast": {"step_ms": -1, "device_ms": 1, "single_ms": 1, "idle_ms": []}}, "step_ms has -1"),
    ],
)
def test_files_that_cannot_be(change, says):
    with pytest.raises(FileError, match=f"some.json: .*{says}"):
        BurstPlan.from_json({**PLAN.to_json(), **change}, source="some.json")


def test_a_file_that_is_no_plan(tmp_path):
    (tmp_path / "half.json").write_text('{"format": "pl')
    with pytest.raises(FileError, match="no JSON"):
        BurstPlan.load(tmp_path / "half.json")
    with pytest.raises(FileError, match="cannot be read"):
        BurstPlan.load(tmp_path / "none.json")


def test_no_width_beyond_the_devices():
    with pytest.raises(UsageError, match="1 to 2"):
        BurstPlan.of(["a"], [3], batch=8, devices=2)
