"""Choosing from a frontier."""

import pytest

from plait.burst import BurstPlan, Frontier
from plait.burst.burst_plan import Forecast
from plait.errors import UsageError


def plan(width, step_ms, device_ms):
    forecast = Forecast(step_ms=step_ms, device_ms=device_ms, single_ms=12.0, idle_ms=(0.0,) * 4)
    return BurstPlan(blocks=("a",), widths=(width,), devices=4, batch=8, forecast=forecast)


FRONTIER = Frontier(plans=(plan(4, 4.0, 16.0), plan(2, 7.0, 14.0), plan(1, 12.0, 12.0)))


def test_what_it_has():
    assert FRONTIER.points == ((4.0, 16.0), (7.0, 14.0), (12.0, 12.0))
    assert FRONTIER.fastest.widths == (4,)
    assert FRONTIER.cheapest.widths == (1,)
    assert FRONTIER.chosen is FRONTIER.fastest
    assert len(FRONTIER) == 3
    assert list(FRONTIER) == list(FRONTIER.plans)


@pytest.mark.parametrize(("limit", "width"), [(1, 1), (1.15, 1), (1.17, 2), (1.4, 4), (9, 4)])
def test_a_limit_on_device_time(limit, width):
    assert FRONTIER.within(limit).widths == (width,)
    assert FRONTIER.choosing("limit", limit).chosen.widths == (width,)


@pytest.mark.parametrize(("deadline_ms", "width"), [(4, 4), (6.9, 4), (7, 2), (100, 1)])
def test_a_deadline(deadline_ms, width):
    assert FRONTIER.before(deadline_ms).widths == (width,)


@pytest.mark.parametrize(("value", "width"), [(0.0, 4), (0.5, 4), (0.6, 4), (1.0, 1)])
def test_background_work(value, width):
    """12 / s + value * (4 - d / s):  3, 1.71, 1 and 3, 1.71, 1 less 4, 2, 1 for each unit of value."""
    assert FRONTIER.best(value).widths == (width,)


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: FRONTIER.within(0.9), "limit of 0.9 .*works: 1"),
        (lambda: Frontier(plans=FRONTIER.plans[:2]).within(1), "the least is 1.167.*works: 1.167"),
        (lambda: FRONTIER.before(3.9), "no step takes 3.9 ms or less; the fastest takes 4 ms"),
        (lambda: FRONTIER.best(-0.1), "background work of value -0.1"),
        (lambda: FRONTIER.choosing("deadline_ms", 1), "no step takes 1 ms"),
        (lambda: Frontier(plans=()), "a frontier needs a plan"),
    ],
)
def test_what_cannot_be_had(ask, says):
    with pytest.raises(UsageError, match=says):
        ask()


@pytest.mark.parametrize("device_ms", [12.0012, 14.81192, 14.8191, 119.99])
def test_a_value_that_an_error_names_works(device_ms):
    frontier = Frontier(plans=(plan(2, device_ms, device_ms),))
    with pytest.raises(UsageError) as error:
        frontier.within(1)
    frontier.within(float(error.value.works))
    with pytest.raises(UsageError) as error:
        frontier.before(1)
    frontier.before(float(error.value.works))
