"""What came of playing a plan."""

import json

import pytest

from plait.errors import UsageError
from plait.sim import Played
from plait.timeline import Span, Timeline


def played(**changes):
    given = {
        "steps_ms": {"a": (9.0, 2.0, 4.0), "b": (7.0,)},
        "makespan_ms": 20.0,
        "timeline": Timeline.of([Span("device0", "F0", 0, 5)]),
        "events": 3,
        "busy_ms": {"device0": 5.0},
        "disk_bytes": (1, 2),
        "decisions": ("1F1B at step 0",),
    }
    return Played(**given | changes)


def test_the_mean_step_leaves_out_the_first_where_there_are_more():
    assert played().step_ms() == played().step_ms("a") == 3
    assert played().step_ms("b") == 7


def test_a_job_without_a_step_has_none():
    with pytest.raises(UsageError, match="job 'c' has made no step"):
        played().step_ms("c")
    with pytest.raises(UsageError, match="no step"):
        played(steps_ms={}).step_ms()


def test_utilisation_is_of_the_makespan():
    assert played().utilisation("device0") == 0.25
    assert played(makespan_ms=0.0).utilisation("device0") == 0


def test_it_is_plain_data():
    data = json.loads(json.dumps(played().to_json(), allow_nan=False))
    assert data["format"] == "plait.played/1"
    assert data["steps_ms"] == {"a": [9, 2, 4], "b": [7]}
    assert data["disk_bytes"] == {"read": 1, "written": 2}
    assert Timeline.from_json(data["timeline"]) == played().timeline
