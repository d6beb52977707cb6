"""Figures that change over time."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.cluster import Cluster
from plait.errors import UsageError
from plait.lab.trace import Trace as RateTrace
from plait.sim import Trace
from plait.sim.trace import host_traces


@st.composite
def traces(draw):
    gaps = draw(st.lists(st.floats(0.1, 50), max_size=5))
    times = [math.fsum(gaps[:count]) for count in range(len(gaps) + 1)]
    values = [draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])) for _ in times]
    values[-1] = draw(st.sampled_from([0.5, 1.0, 3.0]))
    repeat = draw(st.one_of(st.none(), st.floats(0.1, 20)))
    return Trace.of(zip(times, values, strict=True), repeat_ms=repeat and times[-1] + repeat)


def test_a_value_holds_until_the_next():
    trace = Trace.of([(0, 1.0), (500, 0.25)])
    assert [trace.at(ms) for ms in (0, 499.9, 500, 1e9)] == [1, 1, 0.25, 0.25]
    assert [trace.next_change(ms) for ms in (0, 499.9, 500)] == [500, 500, math.inf]


def test_a_trace_may_start_over():
    trace = Trace.of([(0, 1.0), (30, 0.5)], repeat_ms=100)
    assert [trace.at(ms) for ms in (29, 30, 99, 100, 130, 1e6, 1e6 + 30)] == [1, 0.5, 0.5, 1, 0.5, 1, 0.5]
    assert [trace.next_change(ms) for ms in (0, 30, 100, 1e6)] == [30, 100, 130, 1e6 + 30]


def test_work_takes_as_long_as_the_speed_says():
    trace = Trace.of([(0, 1.0), (10, 0.0), (20, 0.5)])
    assert trace.area(5, 24) == 5 + 2
    assert trace.reaches(5, 7) == 24
    assert trace.reaches(5, 5) == 10
    assert trace.reaches(12, 0) == 12
    repeating = Trace.of([(0, 1.0), (10, 0.0)], repeat_ms=20)
    assert repeating.area(0, 1e6) == 5e5
    # What ends with the last of the work does not wait for the end of the repetition.
    assert repeating.reaches(0, 1000) == 1990


@given(traces(), st.floats(0, 300), st.floats(0, 300))
def test_area_and_reaches_are_each_others_inverse(trace, start, length):
    area = trace.area(start, start + length)
    end = trace.reaches(start, area)
    assert end <= start + length + 1e-6
    assert trace.area(start, end) == pytest.approx(area, rel=1e-9, abs=1e-9)


@given(traces(), st.floats(0, 300), st.floats(0, 150), st.floats(0, 150))
def test_areas_add_up(trace, start, one, other):
    middle, end = start + one, start + one + other
    assert trace.area(start, end) == pytest.approx(
        trace.area(start, middle) + trace.area(middle, end), rel=1e-9, abs=1e-9
    )


@given(traces(), st.floats(0, 1e6))
def test_changes_lie_ahead_and_the_value_holds_until_then(trace, now):
    change = trace.next_change(now)
    assert change > now
    if change < math.inf:
        assert trace.at(math.nextafter(change, 0)) == trace.at(now)
        # Where the value before is the same, at() cannot tell; the next change must still be another one.
        assert trace.next_change(change) > change


@given(traces(), st.floats(0.1, 9))
def test_a_scaled_trace_is_scaled_everywhere(trace, factor):
    assert trace.scaled(factor).at(33.3) == trace.at(33.3) * factor


def test_one_value_for_ever():
    assert Trace.constant(3).at(1e9) == 3
    assert Trace.constant(2).reaches(1, 10) == 6


@pytest.mark.parametrize(
    ("points", "repeat", "says"),
    [
        ([], None, "0 times"),
        ([(1, 1.0)], None, "begins at 1.0 ms"),
        ([(0, 1.0), (0, 2.0)], None, "times of a trace"),
        ([(0, 1.0), (math.inf, 2.0)], None, "times of a trace"),
        ([(0, -1.0)], None, "values of a trace"),
        ([(0, math.nan)], None, "values of a trace"),
        ([(0, 1.0), (5, 0.0)], None, "0 for ever"),
        ([(0, 0.0)], 10, "0 for ever"),
        ([(0, 1.0), (5, 2.0)], 5, "repeats after 5 ms"),
    ],
)
def test_what_cannot_be_is_refused(points, repeat, says):
    with pytest.raises(UsageError, match=says):
        Trace.of(points, repeat_ms=repeat)


def test_a_trace_of_the_lab_becomes_one_of_each_host_that_it_changes():
    cluster = Cluster.uniform(hosts=3, memory="1GiB", bandwidth="1gbit")
    rates = RateTrace.parse("0 1gbit\n1 500mbit 1\n2 none 1\n3 4gbit 2\n4 repeat")
    assert host_traces(rates, cluster) == {
        "node1": Trace.of([(0, 1.0), (1000, 0.5), (2000, 1.0)], repeat_ms=4000),
    }
    slow = host_traces(RateTrace.parse("0.5 250mbit"), cluster)
    assert slow == {f"node{i}": Trace.of([(0, 1.0), (500, 0.25)]) for i in range(3)}
    with pytest.raises(UsageError, match=r"host 3 at 0\.0 s, but there are 3 hosts"):
        host_traces(RateTrace.parse("0 1gbit 3"), cluster)


def test_a_host_alone_has_no_network_that_a_trace_could_change():
    cluster = Cluster.uniform(hosts=1, devices_per_host=2, memory="1GiB", bandwidth="1gbit")
    assert host_traces(RateTrace.parse("0 1gbit\n1 500mbit"), cluster) == {}
