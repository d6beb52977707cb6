"""Measuring by turns."""

import statistics
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.bench.machine import Activity, Moment
from plait.bench.measured import Measured, Spread, interleave
from plait.errors import UsageError

numbers = st.floats(0.001, 1e6)


def measured(*values: float) -> Measured:
    calm = Activity(seconds=1, steal=0, others=0)
    return Measured(name="side", values=values, better="lower", activity=calm)


@settings(deadline=None)
@given(st.lists(numbers, min_size=1, max_size=20))
def test_a_spread_is_in_order_around_the_median(values: list[float]) -> None:
    spread = Spread.of(values)
    middle = statistics.median(values)
    slack = 1e-9 * max(values)
    assert spread.minimum <= spread.q1 + slack
    assert spread.q1 <= middle + slack
    assert middle <= spread.q3 + slack
    assert spread.q3 <= spread.maximum + slack
    assert (spread.std == 0) == (len(set(values)) == 1)
    assert spread.mean == pytest.approx(sum(values) / len(values))


def test_units_and_rates() -> None:
    seconds = measured(0.5, 0.25, 1.0)
    assert seconds.value == 0.5
    assert seconds.scaled(1000).values == (500, 250, 1000)
    rate = seconds.rate(2.0)
    assert (rate.values, rate.better) == ((4, 8, 2), "higher")
    with pytest.raises(UsageError, match="'side' is no time"):
        rate.rate(1.0)


def test_every_round_calls_every_side_once_in_an_order_of_the_seed() -> None:
    def order(seed: int) -> list[str]:
        called: list[str] = []
        sides = {name: (lambda name=name: called.append(name)) for name in "abc"}
        interleave(sides, repetitions=20, warmup=2, seed=seed)
        return called

    called = order(7)
    assert called[:6] == list("aabbcc")
    rounds = ["".join(called[i : i + 3]) for i in range(6, len(called), 3)]
    assert len(rounds) == 20
    assert {"".join(sorted(one)) for one in rounds} == {"abc"}
    assert len(set(rounds)) > 1
    assert order(7) == called
    assert order(8) != called


def test_a_call_is_timed_or_gives_its_own_figure() -> None:
    (timed,) = interleave({"a": lambda: None}, repetitions=3)
    assert len(timed.values) == 3
    assert all(value > 0 for value in timed.values)
    assert timed.better == "lower"
    figures = iter([1, 5, 3])
    (told,) = interleave({"a": lambda: next(figures)}, repetitions=3, warmup=0, better="higher")
    assert (told.values, told.value, told.better) == ((1, 5, 3), 3, "higher")


@pytest.mark.parametrize("returned", [None, "3", True, float("nan"), float("inf")])
def test_a_figure_must_be_a_finite_number(returned: object) -> None:
    with pytest.raises(UsageError, match=r"side 'a' returned .* where it should return its figure"):
        interleave({"a": lambda: returned}, repetitions=1, better="lower")


def test_there_must_be_something_to_measure() -> None:
    with pytest.raises(UsageError, match="nothing to measure"):
        interleave({}, repetitions=3)
    with pytest.raises(UsageError, match=r"0 repetitions.*works: 5"):
        interleave({"a": lambda: None}, repetitions=0)


def moments(*others: float) -> list[Moment]:
    """Pairs of moments a hundred seconds apart between which others used such shares of the processors."""
    at = Moment(busy=0, idle=0, steal=0, own=0)
    end = [Moment(busy=100 * share, idle=100 * (1 - share), steal=0, own=0) for share in others]
    return list(chain.from_iterable((at, one) for one in end))


@pytest.mark.parametrize(
    ("others", "retries", "attempts", "kept"),
    [
        ([0.5], 0, 1, 1),
        ([0.0], 3, 1, 1),
        ([0.5, 0.0], 3, 2, 2),
        ([0.5, 0.3, 0.4], 2, 3, 2),
    ],
)
def test_disturbed_rounds_are_run_again_and_the_calmest_kept(
    others: list[float], retries: int, attempts: int, kept: int
) -> None:
    clock = iter(moments(*others))
    calls = iter(range(1, 10))
    (found,) = interleave(
        {"a": lambda: next(calls)},
        repetitions=1,
        warmup=0,
        better="higher",
        retries=retries,
        moment=lambda: next(clock),
    )
    assert found.attempts == attempts
    assert found.values == (kept,)
    assert next(clock, None) is None
