"""Schedules of jobs with several widths, against all that there are."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.strategy import schedule
from plait.strategy.schedule import (
    fullest,
    in_order,
    in_waves,
    lower_bound_ms,
    makespan_ms,
    shortest,
    upper_bound_rate,
)

TIMES = st.dictionaries(st.integers(2, 4), st.floats(1, 100), max_size=2).flatmap(
    lambda wide: st.floats(1, 100).map(lambda one: {1: one, **wide})
)


def test_a_drawing():
    """
    device 0  | A A A A | C C
    device 1  | A A A A | D D D
    device 2  | B B | D D D is not as wide: it starts where it is free first
    """
    times = [{2: 4.0}, {1: 2.0}, {1: 2.0}, {1: 3.0}]
    runs = in_order(times, [2, 1, 1, 1], [0, 1, 2, 3], 3)
    assert [(run.devices, run.start_ms, run.end_ms) for run in runs] == [
        ((0, 1), 0, 4),
        ((2,), 0, 2),
        ((2,), 2, 4),
        ((0,), 4, 7),
    ]


def check(runs, times, devices):
    assert sorted(run.job for run in runs) == list(range(len(times)))
    for run in runs:
        assert run.end_ms - run.start_ms == pytest.approx(times[run.job][len(run.devices)])
        assert len(set(run.devices)) == len(run.devices)
        assert set(run.devices) <= set(range(devices))
    for one in runs:
        for other in runs:
            if one.job < other.job and set(one.devices) & set(other.devices):
                assert one.end_ms <= other.start_ms + 1e-9 or other.end_ms <= one.start_ms + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.lists(TIMES, min_size=1, max_size=4), st.integers(1, 4))
def test_with_few_jobs_it_is_the_best_of_all(times, devices):
    best = min(makespan_ms(runs) for runs in schedule.every(times, devices))
    runs = shortest(times, devices)
    check(runs, times, devices)
    assert makespan_ms(runs) == pytest.approx(best)
    assert lower_bound_ms(times, devices) <= best * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.lists(TIMES, min_size=1, max_size=4), st.integers(1, 4))
def test_the_search_for_many_jobs_is_near_the_best_of_few(times, devices):
    best = min(makespan_ms(runs) for runs in schedule.every(times, devices))
    runs = schedule._Search(times, devices).best()
    check(runs, times, devices)
    assert makespan_ms(runs) <= 1.2 * best


@settings(max_examples=20, deadline=None)
@given(st.lists(TIMES, min_size=5, max_size=20), st.integers(1, 8))
def test_with_many_jobs_it_is_within_twice_the_bound(times, devices):
    runs = shortest(times, devices)
    check(runs, times, devices)
    bound = lower_bound_ms(times, devices)
    assert bound <= makespan_ms(runs) * (1 + 1e-9)
    assert makespan_ms(runs) <= 2 * bound


def test_a_bound_that_counts_the_area_of_narrow_enough_widths():
    # Alone it takes 10; to end within 6 it must be two wide, which costs 12 of device time.
    assert lower_bound_ms([{1: 10.0, 2: 6.0}] * 2, 2) == 10
    assert lower_bound_ms([{1: 10.0, 2: 6.0}], 2) == 6
    assert lower_bound_ms([{1: 10.0, 2: 6.0}] * 3, 2) == 15
    assert lower_bound_ms([], 2) == 0


RATES = st.dictionaries(st.integers(1, 4), st.floats(0.1, 10), min_size=1)


@settings(max_examples=60, deadline=None)
@given(st.lists(RATES, min_size=1, max_size=4), st.integers(1, 5))
def test_the_fullest_assignment_is_the_best_of_all(rates, devices):
    from itertools import product

    def total(widths):
        return sum(one.get(k, 0.0) for one, k in zip(rates, widths, strict=True))

    every = [w for w in product(*([0, *one] for one in rates)) if sum(w) <= devices]
    widths = fullest(rates, devices)
    assert sum(widths) <= devices
    assert total(widths) == pytest.approx(max(map(total, every)))
    assert upper_bound_rate(rates, devices) >= total(widths) - 1e-9


def test_time_shared_widths_are_on_the_envelope():
    # Three devices for two jobs that each want two: by turns, both are as wide for half of the time.
    assert upper_bound_rate([{2: 4.0}, {2: 4.0}], 3) == pytest.approx(6)
    assert upper_bound_rate([{1: 0.5, 3: 6.0}], 3) == pytest.approx(6)
    assert upper_bound_rate([{1: 2.0}], 4) == 2


@settings(max_examples=40, deadline=None)
@given(st.lists(TIMES, min_size=1, max_size=6), st.integers(1, 4))
def test_waves_run_every_job_once(times, devices):
    rates = [{k: 1 / ms for k, ms in one.items() if k <= devices} for one in times]
    check(in_waves(times, rates, devices), times, devices)
