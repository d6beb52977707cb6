"""Cases: ratios, bounds, verdicts."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.bench import Bench, Case, Measured
from plait.bench.machine import Activity
from plait.errors import UsageError

positive = st.floats(1e-6, 1e6)


def case(**settings: Any) -> Case:
    return Case(**{"name": "c", "value": 2.0, "unit": "s", "better": "lower", **settings})


def measured(values: tuple[float, ...], together: int = 1, others: float = 0.0, **settings: Any) -> Measured:
    activity = Activity(seconds=1, steal=0, others=others)
    return Measured(
        **{"name": "m", "better": "lower", **settings}, values=values, activity=activity, together=together
    )


@settings(deadline=None)
@given(positive, positive, positive)
def test_a_ratio_above_one_is_better_for_times_and_rates_alike(a: float, b: float, work: float) -> None:
    time = case(value=a, against="other", against_value=b).ratio
    rate = case(value=work / a, better="higher", against="other", against_value=work / b).ratio
    assert time == pytest.approx(b / a)
    assert rate == pytest.approx(time)


@pytest.mark.parametrize(
    ("settings", "holds", "aim"),
    [
        ({}, None, None),
        ({"at_most": 2.0}, True, None),
        ({"at_most": 1.9}, False, None),
        ({"at_most": 3.0, "aim": 2.0}, True, True),
        ({"at_most": 3.0, "aim": 1.0}, True, False),
        ({"against": "x", "against_value": 3.0, "at_least": 1.5, "aim": 1.6}, True, False),
        ({"against": "x", "against_value": 3.0, "at_least": 1.6}, False, None),
        ({"against": "x", "against_value": 3.0, "at_least": 1.2, "at_most": 1.0}, False, None),
        ({"against": "x", "against_value": 1.0, "at_most": 2.5}, True, None),
        ({"better": "higher", "at_least": 2.0, "aim": 2.0}, True, True),
        ({"better": "higher", "at_least": 2.1}, False, None),
        ({"better": "higher", "against": "x", "against_value": 0.0, "at_least": 1}, False, None),
    ],
)
def test_a_case_holds_when_every_bound_does(
    settings: dict[str, Any], holds: bool | None, aim: bool | None
) -> None:
    found = case(**settings)
    assert found.holds is holds
    assert found.reaches_aim is aim


def test_the_share_of_the_limit() -> None:
    assert case(value=8, better="higher", limit="wire", limit_value=10).of_limit == 0.8
    assert case(value=10, limit="wire", limit_value=8).of_limit == 0.8


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"value": float("nan")}, "case 'c': value is nan.*finite"),
        ({"against": "x", "against_value": float("inf")}, "against_value is inf"),
        ({"aim": 1.0}, "has an aim of 1.0 and no bound"),
        ({"better": "higher", "at_most": 1.0}, "at most, but higher is better.*works: at_least"),
        ({"at_least": 1.0}, "at least, but lower is better.*works: at_most, or something"),
    ],
)
def test_a_case_that_makes_no_sense_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        case(**settings)


def test_a_benchmark_makes_cases_of_what_it_measured() -> None:
    bench = Bench(quick=True)
    ours, theirs = measured((1.0, 2.0, 4.0), others=0.3), measured((2.0, 2.0, 2.0))
    found = bench.case("speed", ours.rate(8), against=("copy", theirs.rate(8)), at_least=1, unit="B/s")
    assert (found.value, found.against_value, found.ratio) == (4, 4, 1)
    assert found.ratio_spread is not None
    assert (found.ratio_spread.minimum, found.ratio_spread.maximum) == (0.5, 2)
    assert (found.repetitions, found.holds, found.disturbed) == (3, True, True)
    time = bench.case("time", ours, against=("copy", theirs), limit=("light", 0.5), unit="s")
    assert time.ratio_spread == found.ratio_spread
    assert time.of_limit == 0.25
    assert bench.cases == [found, time]


def test_a_bare_number_needs_its_direction() -> None:
    bench = Bench()
    with pytest.raises(UsageError, match=r"bare number 3.*better.*higher"):
        bench.case("loss", 3.0, unit="nats")
    assert bench.case(
        "loss", 3.0, against=("plain", 3.3), unit="nats", better="lower"
    ).ratio == pytest.approx(1.1)


def test_a_name_is_used_once() -> None:
    bench = Bench()
    bench.case("a", 1, unit="s", better="lower")
    with pytest.raises(UsageError, match="there is a case 'a' already"):
        bench.case("a", 1, unit="s", better="lower")


@pytest.mark.parametrize("other", [measured((1.0,), together=2), measured((1.0,), better="higher")])
def test_sides_must_have_been_measured_by_turns(other: Measured) -> None:
    with pytest.raises(UsageError, match=r"were not measured by turns.*one interleave"):
        Bench().case("a", measured((1.0,)), against=("b", other), unit="s")


def test_two_interleaves_are_not_one() -> None:
    bench = Bench()
    (a,) = bench.interleave({"a": lambda: None}, repetitions=2)
    (b,) = bench.interleave({"b": lambda: None}, repetitions=2)
    with pytest.raises(UsageError, match="were not measured by turns"):
        bench.case("a", a, against=("b", b), unit="s")


def test_pick_and_configure() -> None:
    assert Bench(quick=True).pick(quick=1, full=9) == 1
    bench = Bench(seed=4)
    assert bench.pick(quick=1, full=9) == 9
    bench.configure(size_bytes=12)
    assert bench.config == {"seed": 4, "size_bytes": 12}


def test_a_case_goes_through_json() -> None:
    bench = Bench()
    found = bench.case(
        "time", measured((1.0, 2.0)), against=("b", measured((3.0, 5.0))), at_least=1, aim=2, unit="s",
        published="3x (a paper)",
    )  # fmt: skip
    data = json.loads(json.dumps(found.to_json()))
    assert Case.from_json(data) == found
    assert data["published"] == "3x (a paper)"
    assert data["holds"] is True
    assert data["ratio"] == found.ratio


def test_a_case_of_a_file_without_means_and_claims_is_read() -> None:
    found = Bench().case("time", measured((1.0, 2.0)), unit="s")
    data = found.to_json()
    del data["published"], data["spread"]["mean"]
    older = Case.from_json(data)
    assert older.spread is not None
    assert (older.published, older.spread.mean, older.value) == (None, None, 1.5)
