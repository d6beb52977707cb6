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


def test_an_error_is_told_with_the_log_that_has_all_of_it():
    made = attempt()
    made.blame({**CAUSE, "log": "tasks/j/rank0.log"})
    said = made.ended([1], 0, Path("other.log")).text
    assert said == f"{CAUSE['text']}, all of it in tasks/j/rank0.log"


def test_where_nobody_knows_the_cause_the_first_is_told():
    made = attempt()
    made.blame(SEEN)
    made.blame(BLAMES)
    assert made.is_unsure
    assert made.ended([1, 1], 0, Path("rank0.log")).text == SEEN["text"]


@pytest.mark.parametrize(
    ("kind", "cause"), [("FileError", "disk"), ("OSError", "disk"), ("ValueError", "raised")]
)
def test_what_the_disk_refuses_may_pass(kind, cause):
    made = attempt()
    made.blame({**CAUSE, "kind": kind})
    assert made.ended([1], 0, Path("rank0.log")).cause == cause


def test_the_last_line_of_a_log_is_told_however_long_the_log_is(tmp_path):
    log = tmp_path / "rank0.log"
    with log.open("wb") as file:
        file.truncate(1 << 40)  # a file with a hole; all of it would not fit anywhere
        file.seek(0, 2)
        file.write("\n\nlast words: ½\n\n".encode())

    class Worker:
        name = "here/0"

    made = attempt()
    made.workers.append(Worker())
    assert (
        made.ended([3], 0, log).text
        == f"rank 0 on here/0 ended with exit code 3: last words: ½ (all of it: {log})"
    )
    log.write_text("")
    assert made.ended([3], 0, log).text.endswith(f"{log} is empty")
    log.unlink()
    assert made.ended([3], 0, log).text.endswith(f"see {log}")


def test_a_worker_that_is_not_heard_is_told_with_the_setting_and_a_value_that_works():
    class Worker:
        name = "here/0"

    made = attempt()
    made.workers.append(Worker())
    failure = made.unheard(0, 10.44, 10.0)
    assert failure.cause == "lost"
    assert failure.text.startswith("rank 0 on here/0 has not been heard for 10.4 s: ")
    assert failure.text.endswith("(setting: --silence, limits.silence_s; works: 60)")


@pytest.mark.parametrize(
    "wrong", [{"silence_s": 0.5}, {"silence_s": 1e7}, {"restarts": -1}, {"stall_s": float("nan")}]
)
def test_limits_that_make_no_sense_are_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Limits(**wrong)
