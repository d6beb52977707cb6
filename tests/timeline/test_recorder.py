"""Recording: the ring, its count of what was lost, and threads."""

import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import UsageError
from plait.timeline import Sample, Span, Timeline


class Ticks:
    """A clock that moves on by one millisecond whenever it is read."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 1_000_000
        return self.now_ns


def test_spans_marks_and_samples_are_kept_as_they_happened() -> None:
    timeline = Timeline(clock=Ticks())
    with timeline.span("device0", "forward", block=3, name="attention", track="x"):
        timeline.mark("device0", "regrouped", k=2)
    timeline.record("link", "send", 500_000, 750_000, bytes=64)
    timeline.sample("device0", "bytes", 12)
    assert timeline.spans == (
        Span("link", "send", 0.5, 0.75, {"bytes": 64}),
        Span("device0", "forward", 1.0, 3.0, {"block": 3, "name": "attention", "track": "x"}),
        Span("device0", "regrouped", 2.0, 2.0, {"k": 2}),
    )
    assert timeline.samples == (Sample("device0", "bytes", 4.0, 12),)
    assert timeline.dropped == 0


def test_the_default_clock_puts_spans_in_the_order_of_the_code() -> None:
    timeline = Timeline()
    before = timeline.clock()
    with timeline.span("a", "outer"), timeline.span("a", "inner"):
        pass
    outer, inner = timeline.spans
    assert before / 1e6 <= outer.start_ms <= inner.start_ms <= inner.end_ms <= outer.end_ms
    assert outer.end_ms <= timeline.clock() / 1e6


def test_an_exception_passes_through_and_leaves_its_span() -> None:
    timeline = Timeline(clock=Ticks())
    with pytest.raises(KeyError), timeline.span("device0", "forward", block=1):
        raise KeyError("x")
    assert timeline.spans == (Span("device0", "forward", 1.0, 2.0, {"block": 1, "error": "KeyError"}),)


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(0, 60), st.integers(0, 60))
def test_the_ring_keeps_the_latest_and_counts_the_rest(capacity: int, spans: int, samples: int) -> None:
    timeline = Timeline(capacity=capacity, clock=Ticks())
    for i in range(spans):
        timeline.record("t", "s", i * 1_000_000, i * 1_000_000, i=i)
    for i in range(samples):
        timeline.sample("t", "n", i)
    assert [s.info["i"] for s in timeline.spans] == list(range(max(0, spans - capacity), spans))
    assert [s.value for s in timeline.samples] == list(range(max(0, samples - capacity), samples))
    assert timeline.dropped == max(0, spans - capacity) + max(0, samples - capacity)


def test_a_counter_that_is_not_finite_spoils_nothing() -> None:
    timeline = Timeline(clock=Ticks())
    for value in (1.0, float("nan"), float("inf"), 2.0):
        timeline.sample("device0", "loss", value)
    assert [s.value for s in timeline.samples] == [1.0, 2.0]
    assert timeline.dropped == 2


@pytest.mark.parametrize("capacity", [0, -5])
def test_a_ring_needs_room(capacity: int) -> None:
    with pytest.raises(UsageError, match=f"cannot keep {capacity} spans.*capacity.*65536"):
        Timeline(capacity=capacity)


def test_a_recorded_span_cannot_end_before_it_starts() -> None:
    with pytest.raises(UsageError, match=r"ends at 4 ns, before its start at 5 ns.*works: 5 or later"):
        Timeline().record("device0", "forward", 5, 4)


def test_threads_record_at_once_and_nothing_is_lost_or_double() -> None:
    """Four threads write, the main thread reads all the while, the interpreter switches often."""
    each, capacity = 3000, 5000
    roomy, tight = Timeline(), Timeline(capacity=capacity)

    def work(track: str) -> None:
        for i in range(each):
            with roomy.span(track, "s", i=i):
                tight.record(track, "s", i, i, i=i)

    threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert len(tight.spans) <= capacity
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for track in roomy.tracks:
        numbers = [s.info["i"] for s in roomy.spans if s.track == track]
        assert sorted(numbers) == list(range(each))
    assert roomy.dropped == 0
    assert len(tight.spans) == capacity
    assert tight.dropped == 4 * each - capacity
