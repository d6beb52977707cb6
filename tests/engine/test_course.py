"""Which of several errors is told: the cause, not what others saw of it."""

from pathlib import Path

import pytest

from plait.engine.course import Attempt, Limits
from plait.errors import UsageError

CAUSE = {"kind": "ValueError", "text": "ValueError: row 300 is broken", "final": False}
SEEN = {"kind": "RuntimeError", "text": "RuntimeError: gloo: Connection closed by peer", "final": False}
BLAMES = {"kind": "WorkerError", "text": "rank 1 is gone", "final": False}


def attempt():
    return Attempt(number=0, workers=[], started_s=0.0, moved_s=0.0)


@pytest.mark.parametrize("order", [(SEEN, CAUSE), (CAUSE, SEEN), (BLAMES, SEEN, CAUSE), (CAUSE, BLAMES)])
def test_the_cause_is_told_whoever_speaks_first(order):
    made = attempt()
    assert made.is_unsure
    for error in order:
        made.blame(error)
    assert not made.is_unsure
    assert made.ended([1, 1], 0, Path("rank0.log")).text == CAUSE["text"]


def test_where_nobody_knows_the_cause_the_first_is_told():
    made = attempt()
    made.blame(SEEN)
    made.blame(BLAMES)
    assert made.is_unsure
    assert made.ended([1, 1], 0, Path("rank0.log")).text == SEEN["text"]


@pytest.mark.parametrize("wrong", [{"silence_s": 0.5}, {"restarts": -1}, {"stall_s": float("nan")}])
def test_limits_that_make_no_sense_are_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Limits(**wrong)
