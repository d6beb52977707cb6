"""What is worse than before, and what is noise."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.bench import Case, Change, Comparison, Report, Spread, Suite, compare

Suites = Callable[..., Suite]
figures = st.floats(-1e6, 1e6).map(lambda x: round(x, 6))
positive = st.floats(1e-3, 1e6)


def spread(std: float) -> Spread:
    return Spread(std=std, minimum=0, q1=0, q3=0, maximum=0)


def case(value: float, std: float | None = None, rounds: int = 5, **fields: Any) -> Case:
    given = {"name": "c", "unit": "ms", "better": "lower", "repetitions": 1 if std is None else rounds}
    return Case(**{**given, **fields}, value=value, spread=None if std is None else spread(std))


def ratio(value: float, std: float | None = None, **fields: Any) -> Case:
    """A case that is so many times better than its peer, of 1."""
    its = {"against": "peer", "against_value": 1.0, "ratio_spread": None if std is None else spread(std)}
    return case(value, std, **{"better": "higher", **its, **fields})


def only(comparison: Comparison) -> Change:
    (change,) = comparison.changes
    return change


drawn = st.builds(
    lambda value, std, rounds, noisy, better, peer: case(
        value,
        std,
        rounds,
        disturbed=noisy,
        better=better,
        against=None if peer is None else "peer",
        against_value=peer,
    ),
    figures,
    st.none() | positive,
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from(["higher", "lower"]),
    st.none() | positive,
)


@settings(deadline=None)
@given(drawn)
def test_equal_reports_never_differ(suite: Suites, one: Case) -> None:
    found = compare(suite(one), suite(one))
    assert (only(found).verdict, only(found).change) == ("same", 0)
    assert not found.regressed
    assert found.left_out == {}
    assert found.notes == ()


@settings(deadline=None)
@given(drawn, drawn)
def test_a_regression_is_an_improvement_the_other_way_round(suite: Suites, one: Case, other: Case) -> None:
    other = replace(other, better=one.better)
    forth, back = (only(compare(suite(a), suite(b))) for a, b in ((one, other), (other, one)))
    assert forth.change == pytest.approx(-back.change)
    assert (forth.noise, forth.loosely) == (
        pytest.approx(back.noise) if back.noise else back.noise,
        back.loosely,
    )
    opposite = {"same": "same", "better": "worse", "worse": "better"}
    assert forth.verdict == opposite[back.verdict]


@settings(deadline=None)
@given(drawn, drawn, figures)
def test_what_is_still_worse_is_still_a_regression(
    suite: Suites, before: Case, after: Case, other: float
) -> None:
    before, after = (
        replace(one, against=None, against_value=None, better="higher") for one in (before, after)
    )
    low, high = sorted((after.value, other))
    rank = {"worse": 0, "same": 1, "better": 2}
    lower, higher = (
        only(compare(suite(before), suite(replace(after, value=value)))) for value in (low, high)
    )
    assert lower.change <= higher.change + 1e-12
    assert rank[lower.verdict] <= rank[higher.verdict]


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        # Beyond 10% of the mean and two joint standard deviations (here 0.05 * sqrt(2) * 2 = 0.14).
        (ratio(2.0, 0.05), ratio(1.75, 0.05), "worse"),
        (ratio(1.75, 0.05), ratio(2.0, 0.05), "better"),
        (ratio(2.0, 0.05), ratio(1.85, 0.05), "same"),  # 7.8%
        (ratio(2.0, 0.1), ratio(1.75, 0.1), "same"),  # within 2 * 0.141
        # Loosely, beyond 25%: noise that is not known, or hardly.
        (ratio(2.0), ratio(1.6), "same"),
        (ratio(2.0), ratio(1.5), "worse"),
        (ratio(2.0, 0.01), ratio(1.6), "same"),
        (ratio(2.0, 0.01, rounds=2), ratio(1.6, 0.01), "same"),
        (ratio(2.0, 0.01), replace(ratio(1.6, 0.01), spread=None, ratio_spread=None), "same"),
        (ratio(2.0, 0.01), ratio(1.6, 0.01), "worse"),
        # By value, where there is no ratio.
        (case(10, 0.1, at_most=99), case(12, 0.1, at_most=99), "worse"),
        (case(10, 0.1, at_most=99), case(9, 0.1, at_most=99), "better"),
        (case(10, 0.1, better="higher"), case(12, 0.1, better="higher"), "better"),
        (case(0, 0.0), case(0, 0.0), "same"),
        (case(0.0), case(1.0), "worse"),
        (case(-1.0), case(1.0), "worse"),
    ],
)
def test_the_rule(suite: Suites, before: Case, after: Case, verdict: str) -> None:
    assert only(compare(suite(before), suite(after))).verdict == verdict


def test_the_noise_of_a_ratio_whose_rounds_were_not_paired_is_that_of_both_sides(suite: Suites) -> None:
    one = replace(ratio(2.0, 0.06), ratio_spread=None, against_spread=spread(0.04))
    found = only(compare(suite(one), suite(one)))
    assert found.noise == pytest.approx((0.03**2 + 0.04**2) ** 0.5 * 2**0.5)
    assert not found.loosely


def test_what_others_disturbed_is_shown_and_no_regression(
    suite: Suites, report: Callable[..., Report]
) -> None:
    calm = report("q", ratio(2.0))
    noisy = report("q", ratio(1.0, disturbed=True))
    noisy_run = report("q", ratio(1.0), activity={"disturbed": True})
    for before, after, regressed in (
        (calm, report("q", ratio(1.0)), True),
        (calm, noisy, False),
        (calm, noisy_run, False),
        (replace(noisy_run, cases=calm.cases), report("q", ratio(1.0)), False),
        (report("q", ratio(2.0, disturbed=True)), report("q", ratio(1.0)), False),
    ):
        found = compare(suite(before), suite(after))
        assert only(found).verdict == "worse"
        assert (found.regressed, only(found).disturbed) == (regressed, not regressed)


@pytest.mark.parametrize(
    ("one", "counts"),
    [(case(1.0), False), (case(1.0, at_most=9), True), (ratio(1.0), True)],
)
def test_only_what_has_a_peer_or_a_bound_can_regress(suite: Suites, one: Case, counts: bool) -> None:
    worse = replace(one, value=3.0) if one.against is None else replace(one, value=0.2)
    found = compare(suite(one), suite(worse))
    assert only(found).verdict == "worse"
    assert (found.regressed, len(found.regressions)) == (counts, int(counts))


def test_on_another_machine_ratios_alone_are_compared(suite: Suites, report: Callable[..., Report]) -> None:
    cases = (case(1.0, name="time"), ratio(2.0, name="speed"))
    here = report("q", *cases)
    there = report("q", *cases, machine={**here.machine, "cores": 64})
    found = compare(suite(there), suite(here))
    assert [change.case for change in found.changes] == ["speed"]
    assert found.left_out == {"q: time": "has no ratio, and the machine is another"}
    assert found.notes == (
        "another machine, so that ratios alone are compared: a processor, 64 cores before",
    )


def test_what_else_differs_is_said(suite: Suites, report: Callable[..., Report]) -> None:
    one = report("q", ratio(2.0))
    other = report(
        "q",
        ratio(2.0),
        versions={"python": "3.12.0", "torch": "2.13.0", "numpy": "2.4"},
        machine={**one.machine, "kernel": "Linux 7"},
        config={"seed": 0, "batch": 8},
    )
    found = compare(suite(one), suite(other, finished=False))
    assert len(found.changes) == 1
    assert found.notes == (
        "python: 3.11.7 before, 3.12.0 now",
        "numpy: none before, 2.4 now",
        "kernel: Linux 6 before, Linux 7 now",
        "q: other settings: batch",
    )
    assert compare(suite(one, finished=False), suite(one)).notes == (
        "the earlier run did not come to its end",
    )


def test_what_cannot_be_compared_is_said(suite: Suites, report: Callable[..., Report]) -> None:
    before = suite(
        report("q", case(1.0, name="gone"), case(1.0, name="skipped"), case(1.0, name="unit")),
        report("full", case(1.0), quick=False),
        report("unasked", case(1.0)),
    )
    after = suite(
        report("q", case(1.0, name="new"), case(1.0, name="unit", unit="s"), skipped={"skipped": "no root"}),
        report("full", case(9.0)),
        report("fresh", case(1.0)),
    )
    found = compare(before, after)
    assert found.changes == ()
    assert not found.regressed
    assert found.left_out == {
        "q: new": "was not there before",
        "q: unit": "was in 'ms', lower being better",
        "q: gone": "is not there now: no such case",
        "q: skipped": "is not there now: no root",
        "full": "was asked in full before",
        "fresh": "was not asked before",
    }


def test_a_question_that_fails_now_is_a_regression(suite: Suites, report: Callable[..., Report]) -> None:
    good, bad = report("q", case(1.0)), report("q", error="RuntimeError: no")
    found = compare(suite(good), suite(bad))
    assert found.regressed
    assert found.broken == {"q": "RuntimeError: no"}
    assert found.left_out == {"q: c": "is not there now: RuntimeError: no"}
    assert not compare(suite(bad), suite(bad)).regressed
    assert not compare(suite(bad), suite(good)).regressed


def test_a_comparison_as_plain_data(suite: Suites) -> None:
    data = compare(suite(ratio(3.0)), suite(ratio(1.0))).to_json()
    assert data["regressed"] is True
    assert data["before"] == "2026-01-02T03:04:05+00:00"
    (change,) = data["changes"]
    assert (change["before"], change["after"], change["change"]) == (3.0, 1.0, -1.0)
    assert (change["verdict"], change["regression"], change["loosely"]) == ("worse", True, True)
