"""Two timelines side by side."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.timeline import Span, Timeline


def test_a_run_is_judged_against_another_in_numbers() -> None:
    simulated = Timeline.of(
        [
            Span("device0", "forward", 0, 2),
            Span("device0", "backward", 2, 6),
            Span("device1", "forward", 2, 4),
            Span("device1", "send", 4, 4.5),
        ]
    )
    real = Timeline.of(
        [
            Span("device0", "forward", 100, 103),
            Span("device0", "backward", 104, 108),
            Span("device1", "forward", 103, 105),
            Span("device1", "forward", 106, 107),
        ]
    )
    found = simulated.compare(real)
    assert (found.makespan.this_ms, found.makespan.other_ms) == (6, 8)
    assert found.makespan.difference_ms == -2
    assert found.relative_error == -0.25
    busy = {track.name: (track.this_ms, track.other_ms) for track in found.tracks}
    assert busy == {"device0": (6, 7), "device1": (2.5, 3)}
    names = {n.name: (n.this_ms, n.other_ms, n.this_count, n.other_count) for n in found.names}
    assert names == {"backward": (4, 4, 1, 1), "forward": (4, 6, 2, 3), "send": (0.5, 0, 1, 0)}
    assert found.only_here == (Span("device1", "send", 4, 4.5),)
    assert found.only_there == (Span("device1", "forward", 106, 107),)
    assert found.matched == 3
    assert found.start_error_ms == pytest.approx((0 + 2 + 1) / 3)
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["makespan"]["relative_error"] == -0.25
    assert data["names"][2]["relative_error"] is None
    assert data["only_there"][0]["name"] == "forward"


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    times = st.integers(0, 100)
    return Timeline.of(
        Span(draw(st.sampled_from("ab")), draw(st.sampled_from("xy")), start, start + draw(times))
        for start in draw(st.lists(times, max_size=8))
    )


@settings(deadline=None)
@given(timelines(), st.integers(-1000, 1000))
def test_a_timeline_does_not_differ_from_itself_at_another_time(timeline: Timeline, by_ms: int) -> None:
    found = timeline.compare(timeline.shifted(by_ms))
    assert found.relative_error == 0
    assert found.start_error_ms == 0
    assert (found.only_here, found.only_there, found.matched) == ((), (), len(timeline.spans))
    assert all(part.difference_ms == 0 for part in (*found.tracks, *found.names))


@settings(deadline=None)
@given(timelines(), timelines())
def test_the_other_way_round_is_the_opposite(a: Timeline, b: Timeline) -> None:
    here, there = a.compare(b), b.compare(a)
    assert here.makespan.difference_ms == -there.makespan.difference_ms
    assert (here.only_here, here.only_there) == (there.only_there, there.only_here)
    assert here.matched + len(here.only_here) == len(a.spans)
    assert here.matched + len(here.only_there) == len(b.spans)
