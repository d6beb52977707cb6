"""Spans and what is said of sets of them."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import UsageError
from plait.timeline.span import (
    Sample,
    Span,
    busy_ms,
    by_track,
    covered,
    extent,
    gaps,
    innermost,
    lanes,
    natural,
)

times = st.integers(0, 60)


@st.composite
def some_spans(draw: st.DrawFn) -> list[Span]:
    count = draw(st.integers(0, 12))
    return [
        Span("t", draw(st.sampled_from("abc")), start / 4, (start + draw(st.integers(0, 20))) / 4)
        for start in draw(st.lists(times, min_size=count, max_size=count))
    ]


def open_at(spans: list[Span], at_ms: float) -> list[Span]:
    return [s for s in spans if s.start_ms <= at_ms < s.end_ms]


@pytest.mark.parametrize(("start", "end"), [(math.nan, 1.0), (0.0, math.inf), (-math.inf, 0.0)])
def test_times_must_be_finite(start: float, end: float) -> None:
    with pytest.raises(UsageError, match=r"'forward' on 'device0'.*start_ms, end_ms.*finite"):
        Span("device0", "forward", start, end)


def test_a_span_cannot_end_before_it_starts() -> None:
    with pytest.raises(UsageError, match=r"ends at 1\.5 ms, before its start at 2 ms.*works: 2 or later"):
        Span("device0", "forward", 2, 1.5)


@pytest.mark.parametrize(("at", "value"), [(math.nan, 1.0), (0.0, math.inf)])
def test_samples_must_be_finite(at: float, value: float) -> None:
    with pytest.raises(UsageError, match="sample 'bytes' on 'device0'"):
        Sample("device0", "bytes", at, value)


def test_spans_are_values() -> None:
    assert Span("a", "b", 0, 1, {"x": 1}) == Span("a", "b", 0.0, 1.0, {"x": 1})
    assert len({Span("a", "b", 0, 1, {"x": 1}), Span("a", "b", 0, 1, {"x": 1})}) == 1
    with pytest.raises(AttributeError):
        Span("a", "b", 0, 1).start_ms = 3  # type: ignore[misc]


def test_tracks_are_in_natural_order() -> None:
    names = ["device10", "device2", "link", "host1/device0", "host1", "7", "device2b", ""]
    assert sorted(names, key=natural) == [
        "", "7", "device2", "device2b", "device10", "host1", "host1/device0", "link",
    ]  # fmt: skip
    assert list(by_track(Span(name, "x", 0, 1) for name in ("d10", "d9"))) == ["d9", "d10"]


def test_overlaps_count_once() -> None:
    spans = [Span("t", "a", 0, 4), Span("t", "b", 1, 2), Span("t", "c", 3, 6), Span("t", "d", 8, 9)]
    assert covered(spans) == [(0, 6), (8, 9)]
    assert busy_ms(spans) == 7
    assert gaps(spans, -1, 12) == [(-1, 0), (6, 8), (9, 12)]


@settings(deadline=None)
@given(some_spans())
def test_busy_time_and_gaps_make_up_the_extent(spans: list[Span]) -> None:
    start, end = extent(spans)
    idle = gaps(spans, start, end)
    assert busy_ms(spans) + math.fsum(b - a for a, b in idle) == pytest.approx(end - start)
    edges = sorted({edge for s in spans for edge in (s.start_ms, s.end_ms)})
    for left, right in pairwise(edges):
        middle = (left + right) / 2
        assert any(a < middle < b for a, b in idle) == (not open_at(spans, middle))


@settings(deadline=None)
@given(some_spans())
def test_spans_in_a_lane_are_apart_or_nested(spans: list[Span]) -> None:
    shared = lanes(spans)
    assert sorted(map(repr, (s for lane in shared for s, _ in lane))) == sorted(map(repr, spans))
    for lane in shared:
        for i, (a, depth) in enumerate(lane):
            for b, below in lane[:i]:
                apart = b.end_ms <= a.start_ms or a.end_ms <= b.start_ms
                nested = b.start_ms <= a.start_ms and a.end_ms <= b.end_ms
                assert apart or (nested and below < depth)


def test_lanes_are_as_few_as_nesting_allows() -> None:
    step, forward, backward = Span("t", "step", 0, 9), Span("t", "forward", 0, 3), Span("t", "backward", 4, 9)
    assert lanes([forward, backward, step]) == [[(step, 0), (forward, 1), (backward, 1)]]
    first, second = Span("t", "send", 0, 3), Span("t", "send", 1, 4)
    assert lanes([first, second]) == [[(first, 0)], [(second, 0)]]


@settings(deadline=None)
@given(some_spans())
def test_each_moment_belongs_to_the_innermost_span(spans: list[Span]) -> None:
    pieces = innermost(spans)
    assert math.fsum(right - left for left, right, _ in pieces) == pytest.approx(busy_ms(spans))
    for left, right, span in pieces:
        among = open_at(spans, (left + right) / 2)
        assert span in among
        assert span.start_ms == max(s.start_ms for s in among)
