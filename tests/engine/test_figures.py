"""Numbers from rows: medians, rates, bytes, curves that can be drawn."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import planned

from plait.engine import figures
from plait.engine.figures import MOST_POINTS, median, placements, thinned, wire_bytes
from plait.plot import Plot, Series

CURVES = st.lists(
    st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([1.0, 1.0 + 2**-52]),
    max_size=500,
).map(lambda ys: [(float(step), y) for step, y in enumerate(ys)])


def test_placements_are_those_of_the_plan():
    made = planned("gpt", "small")
    found = placements(made.to_json())
    assert [(one.job, one.how, one.option, one.devices, one.step_ms) for one in found] == [
        (one.job, one.how, one.option.name, one.devices, one.option.step_ms) for one in made.placements
    ]


def test_planned_bytes_are_those_of_the_placement():
    made = planned("gpt", "small")
    for found, placement in zip(placements(made.to_json()), made.placements, strict=True):
        assert len(found.devices) == 2
        assert found.wire_bytes == placement.option.wire_bytes > 0


def test_a_plan_that_does_not_say_what_is_sent_has_it_from_its_comparison():
    def without(*names):
        data = planned(*names).to_json()
        for one in data["ways"][0]["placements"]:
            del one["wire_bytes"]
        return placements(data)

    (alone,) = without("gpt")
    assert alone.wire_bytes == planned("gpt").placements[0].option.wire_bytes
    assert [one.wire_bytes for one in without("gpt", "small")] == [None, None]  # the comparison is of four


@pytest.mark.parametrize("plan", [{}, {"ways": []}, {"ways": None}, {"ways": [{}]}])
def test_a_plan_without_placements(plan):
    assert placements(plan) == []


def test_medians_leave_out_what_is_no_number():
    rows = [
        {"step": i, "seconds": value} for i, value in enumerate([1.0, None, 3.0, "2", 100.0, True, math.nan])
    ]
    assert median(rows, "seconds") == 3.0
    assert median(rows, "none") is None


def test_bytes_as_told_or_as_a_count_that_grows_with_every_attempt():
    assert wire_bytes([{"step": 0, "wire_bytes": 5}, {"step": 1}]) == [(0.0, 5.0)]
    counted = [
        {"step": 0, "attempt": 0, "sent_bytes": 10},
        {"step": 1, "attempt": 0, "sent_bytes": 30},
        {"step": 2, "attempt": 1, "sent_bytes": 20},
        {"step": 3, "attempt": 1, "sent_bytes": 45},
    ]
    assert wire_bytes(counted) == [(0.0, 10.0), (1.0, 20.0), (2.0, 20.0), (3.0, 25.0)]


def test_a_short_curve_stays_as_it_is_and_keeps_its_gaps():
    curve = [(0.0, 1.5), (1.0, None), (2.0, 0.5)]
    assert thinned(curve) == (curve, 1)


@settings(deadline=None, max_examples=200)
@given(CURVES)
def test_every_curve_can_be_drawn(curve):
    found, width = thinned(curve)
    assert len(found) <= MOST_POINTS
    assert width == max(1, math.ceil(len(curve) / MOST_POINTS))
    assert [x for x, _ in found] == sorted(x for x, _ in found)
    kept = [y for _, y in curve if y is not None and abs(y) <= 1e15]
    if kept:
        drawn = [y for _, y in found if y is not None]
        slack = 1e-8 * max(abs(y) for y in kept)
        assert min(kept) - slack <= min(drawn) <= max(drawn) <= max(kept) + slack
        Plot(title="t", x="step", y="loss", series=[Series(name="s", points=found)], from_zero=False).svg()
    else:
        assert all(y is None for _, y in found)


def test_means_of_many_steps():
    found, width = thinned([(float(step), float(step)) for step in range(1000)])
    assert width == 5
    assert found[0] == (4.0, 2.0)
    assert len(found) == 200


def test_points_are_gaps_where_a_value_is_null():
    rows = [{"step": 0, "loss": 1.0}, {"step": 1, "loss": None}, {"step": 2}]
    assert figures.points(rows, "loss") == [(0.0, 1.0), (1.0, None)]


def test_what_was_foretold_of_spilling_beside_what_was_measured():
    names = ("memory_bytes", "disk_bytes", "read_bytes", "written_bytes", "busy_seconds", "seconds")
    told, got = dict.fromkeys(names, 1 << 20), dict.fromkeys(names, 2 << 20)
    rows = figures.foretold({"foretold": told, "measured": got})
    assert ("read", "1.00 MiB", "2.00 MiB") in rows
    assert len(rows) == len(names)
    for odd in ({}, 1, None, got | {"seconds": None}, got | {"more": 1}):
        assert figures.foretold({"foretold": told, "measured": odd}) == []
    assert figures.foretold({}) == []
