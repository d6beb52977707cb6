"""What is said of background work."""

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


def test_in_words():
    report = Report(
        max_slowdown=1.05, slowdown=Slowdown.of([1.0, 1.04]), baseline_ms=100.0, share=0.62, steps=3,
        processor_seconds=1.0, seconds=2.0, paused=0.1, preemptions=2, level="always", protection="freezer",
        decisions=(),
    )  # fmt: skip
    assert str(report) == (
        "foreground 1.020 times its step alone, within the bound of 1.05 (std 0.028, quarters 1.010 and "
        "1.030, 2 steps); "
        "background at 62% of its own throughput; preempted 2 times, paused 10% of the time"
    )
