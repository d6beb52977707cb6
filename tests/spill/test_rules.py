"""Which trials go on: against the rules of the papers, on small tables."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import UsageError
from plait.spill.rules import Bracket, Rule, asha, halving, hyperband, no_halving, rungs


def test_rungs_lie_a_factor_apart():
    assert rungs(1, 27, 3) == (1, 3, 9, 27)
    assert rungs(4, 27, 3) == (9, 27)
    assert rungs(5, 100, 4) == (6, 25, 100)
    assert rungs(7, 7, 2) == (7,)


def test_hyperbands_brackets_are_those_of_the_paper():
    # R = 81, eta = 3, n = ceil((s_max + 1) eta^s / (s + 1)) of arXiv 1603.06560.
    found = [(rule.trials, rule.rungs[0]) for rule in hyperband(least_steps=1, most_steps=81)]
    assert found == [(81, 1), (34, 3), (15, 9), (8, 27), (5, 81)]


def run(rule, values):
    """Play a bracket in which the trial asked for last reports next; the trials on each rung, in order."""
    bracket = Bracket(rule=rule)
    running = []
    for number in range(rule.trials):
        assert bracket.has_room
        bracket.begin()
        running.append((number, 0))
    while running:
        number, rung = running.pop()
        bracket.record(number, rung, values[number])
        while (found := bracket.promote()) is not None:
            running.append((found[0], found[1] + 1))
    return bracket


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.floats(0, 1, allow_nan=False), min_size=1, max_size=40, unique=True),
    eta=st.integers(2, 4),
)
def test_halving_keeps_the_best_of_each_rung(values, eta):
    rule = Rule(rungs=(1, 10, 100), trials=len(values), eta=eta)
    bracket = run(rule, values)
    expected = sorted(range(len(values)), key=lambda trial: values[trial])
    for rung in range(3):
        assert bracket.best(rung) == expected
        expected = expected[: max(1, len(expected) // eta)]
    assert bracket.rests


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.floats(0, 1, allow_nan=False), min_size=1, max_size=40, unique=True),
    eta=st.integers(2, 4),
    seed=st.integers(0, 100),
)
def test_asha_promotes_by_its_rule_whatever_the_order(values, eta, seed):
    rule = Rule(rungs=(1, 10, 100), trials=len(values), eta=eta, waits=False)
    bracket, source, running = Bracket(rule=rule), random.Random(seed), []
    for _ in range(1000):
        found = bracket.promote()
        if found is not None:
            number, rung = found
            came = sorted(bracket.values[rung], key=lambda trial: values[trial])
            share = len(came) // eta
            assert number in came[: max(1, share)]
            # Beyond its share a rung lets only the best go on, and only once no more can come to it.
            assert number in came[:share] or (len(bracket.values[0]) == len(values) and number == came[0])
            running.append((number, rung + 1))
        elif bracket.has_room:
            running.append((bracket.expected, 0))
            bracket.begin()
        elif not running:
            break
        if running and source.random() < 0.7:
            number, rung = running.pop(source.randrange(len(running)))
            bracket.record(number, rung, values[number])
    assert len(bracket.values[0]) == len(values)
    assert bracket.values[-1], "no trial came to the end"
    for rung in range(2):
        count = len(bracket.values[rung])
        # Late comers may push early ones out of the best, who have gone on by then.
        assert count // eta <= len(bracket.promoted[rung]) <= max(1, 2 * count // eta + 2)
        assert set(bracket.best(rung)[: count // eta]) <= bracket.promoted[rung]


def test_a_fraction_of_one_in_eta_goes_on():
    source = random.Random(0)
    values = [source.random() for _ in range(270)]
    (rule,) = halving(trials=270, least_steps=1, most_steps=27)
    assert [len(rung) for rung in run(rule, values).values] == [270, 90, 30, 10]


def test_what_is_not_a_number_never_goes_on():
    (rule,) = asha(trials=3, least_steps=1, most_steps=3)
    bracket = run(rule, [float("nan"), float("inf"), 0.5])
    assert set(bracket.values[1]) == {2}
    assert bracket.hopeless() == {0, 1}
    assert not run(rule, [float("nan")] * 3).values[1]


def test_a_rung_waits_for_all():
    bracket = Bracket(rule=Rule(rungs=(1, 2), trials=4, eta=2))
    for _ in range(4):
        bracket.begin()
    for trial in range(3):
        bracket.record(trial, 0, trial)
        assert bracket.promote() is None
        assert bracket.hopeless() == set()
    bracket.record(3, 0, 0.5)
    assert [bracket.promote(), bracket.promote(), bracket.promote()] == [(0, 0), (3, 0), None]
    assert bracket.hopeless() == {1, 2}


def test_no_halving_lets_every_trial_end():
    (rule,) = no_halving(trials=4, most_steps=10)
    assert set(run(rule, [4, 3, 2, 1]).values[0]) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rule(rungs=(), trials=1),
        lambda: Rule(rungs=(2, 2), trials=1),
        lambda: Rule(rungs=(0, 2), trials=1),
        lambda: Rule(rungs=(1,), trials=0),
        lambda: Rule(rungs=(1,), trials=1, eta=1),
        lambda: asha(trials=3, least_steps=5, most_steps=4),
        lambda: asha(trials=3, least_steps=0, most_steps=4),
        lambda: hyperband(least_steps=1, most_steps=4, eta=1),
    ],
)
def test_rules_that_cannot_be_are_refused(make):
    with pytest.raises(UsageError):
        make()
