"""What is said of background work."""

from dataclasses import replace

import pytest

from plait.burst.report import Account, Report, Slowdown


def test_the_spread_of_a_slowdown():
    assert Slowdown.of([]) is None
    assert Slowdown.of([1.0]) is None
    found = Slowdown.of([1.0, 1.02, 1.04, 1.06, 1.08])
    assert (found.q1, found.median, found.q3, found.maximum, found.steps) == (1.02, 1.04, 1.06, 1.08, 5)
    assert found.mean == pytest.approx(1.04)


def test_the_share_of_its_own_throughput():
    assert Account(threads=1).share is None
    by_processor = Account(threads=2, seconds=10, processor_seconds=10)
    assert by_processor.share == 0.5
    seen_alone = Account(
        threads=2, seconds=10, processor_seconds=10, alone_seconds=10, alone_processor_seconds=15
    )
    assert seen_alone.share == pytest.approx(1 / 1.5)
    by_steps = Account(threads=1, seconds=10, steps=40, alone_seconds=5, alone_steps=50)
    assert by_steps.share == 0.4


REPORT = Report(
    max_slowdown=1.05, slowdown=Slowdown.of([1.0, 1.04]), baseline_ms=100.0, share=0.62, steps=3,
    processor_seconds=1.0, seconds=2.0, paused=0.1, preemptions=2, level="always", protection="SIGSTOP",
    decisions=(),
)  # fmt: skip


def test_in_words():
    assert str(REPORT) == (
        "a foreground step took 1.020 times what it takes alone, within the bound of 1.05 "
        "(std 0.028, half of the 2 steps between 1.010 and 1.030); "
        "background at 62% of its own throughput; preempted 2 times, paused 10% of the time"
    )


def test_without_a_foreground_there_is_nothing_else_to_say():
    alone = replace(REPORT, slowdown=None, share=None, seconds=0.0, paused=0.0, preemptions=0)
    assert str(alone) == "no foreground step was seen beside it"
    kept_back = replace(alone, share=0.0, seconds=2.0, paused=0.99)
    assert str(kept_back) == (
        "no foreground step was seen beside it; it was paused 99% of the 2 s for which a foreground trained"
    )


def test_more_than_its_own_throughput_is_said_to_be_the_measurement():
    assert "at 100% of its own throughput; " in str(replace(REPORT, share=1.0))
    assert (
        "background at about 100% of its own throughput (141% as measured: its speed alone varies); "
        in str(replace(REPORT, share=1.41))
    )


def test_a_ratio_below_one_is_no_gain():
    found = str(replace(REPORT, slowdown=Slowdown.of([0.88, 0.92])))
    assert found.startswith(
        "a foreground step was no slower than alone (0.900 times what it takes alone, "
        "std 0.028, half of the 2 steps between 0.890 and 0.910); background at 62%"
    )
    assert "the bound" not in found


def test_without_a_step_beside_the_foreground_there_is_no_ratio():
    late = replace(REPORT, steps=0, alone_steps=40)
    assert str(late) == "it made no step beside the foreground"
    assert "1.020 times" in str(replace(late, alone_steps=0))  # work that does not count its steps
