"""Selections, played to their end with devices that report by turns."""

import random

import pytest

from plait.errors import UsageError
from plait.factory import Factory
from plait.job import Job
from plait.spill.rules import asha, halving, hyperband, no_halving
from plait.spill.sampling import Grid
from plait.spill.selection import Selection
from plait.spill.space import Choice, Real, Whole

JOB = Job(
    name="search",
    model=Factory("collections:OrderedDict", layers=2),
    data="collections:OrderedDict",
    loss="plait.losses:rows",
    optimizer=Factory("torch.optim:AdamW", lr=1e-3),
    batch=8,
    steps=27,
)
SPACE = {"optimizer.lr": Real(1e-4, 1, log=True), "model.layers": Whole(1, 3)}


def loss(job, step):
    """Falls with the steps; lowest for a rate of 1e-2."""
    rate = job.optimizer.arguments["lr"]
    return abs(rate - 1e-2) + 1 / step


def play(selection, *, devices=3, fails=(), seed=0):
    """Run trials a step at a time on some devices; the steps that each took."""
    running, steps, source = [], {}, random.Random(seed)
    for _ in range(100_000):
        while len(running) < devices and (job := selection.next()) is not None:
            assert job.name not in [other.name for other in running], "a trial runs once at a time"
            running.append(job)
            steps.setdefault(job.name, 0)
        for name in selection.given_up():
            assert name not in [job.name for job in running]
        if not running:
            break
        job = source.choice(running)
        steps[job.name] += 1
        if (job.name, steps[job.name]) in fails:
            selection.fail(job.name)
            running.remove(job)
            continue
        decision = selection.report(job.name, steps[job.name], loss(job, steps[job.name]))
        if decision != "continue" or steps[job.name] == job.steps:
            running.remove(job)
    assert selection.done
    assert selection.next() is None
    assert {trial.state for trial in selection.trials.values()} <= {"finished", "stopped"}
    return steps


RULES = [
    asha(trials=18, least_steps=1, most_steps=27),
    halving(trials=18, least_steps=1, most_steps=27),
    hyperband(least_steps=3, most_steps=27),
    no_halving(trials=5, most_steps=27),
]


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("rules", RULES, ids=["asha", "halving", "hyperband", "none"])
def test_every_search_ends_with_a_trial_that_ran_to_its_end(rules, devices):
    selection = Selection(JOB, SPACE, rules, seed=1)
    steps = play(selection, devices=devices)
    assert len(steps) == sum(rule.trials for rule in rules)
    assert max(steps.values()) == 27
    assert steps[selection.best.job.name] == 27
    assert selection.best.value == loss(selection.best.job, 27)
    assert set(steps.values()) <= {step for rule in rules for step in rule.rungs}


def test_halving_finds_the_best_of_all():
    selection = Selection(JOB, SPACE, halving(trials=27, least_steps=1, most_steps=27), seed=2)
    steps = play(selection)
    closest = min(selection.trials.values(), key=lambda trial: loss(trial.job, 27))
    assert selection.best is closest
    assert sorted(steps.values()) == [1] * 18 + [3] * 6 + [9] * 2 + [27]


def test_the_same_seed_tries_the_same():
    played = [play(Selection(JOB, SPACE, RULES[0], seed=5)) for _ in range(2)]
    assert played[0] == played[1]
    assert list(played[0]) == [f"search-{i}" for i in range(18)]


def test_a_grid_ends_the_search_when_it_is_used_up():
    space = {"optimizer.lr": Choice([1e-3, 1e-2, 1e-1, 1]), "model.layers": Choice([1, 2])}
    selection = Selection(
        JOB, space, asha(trials=100, least_steps=1, most_steps=27, eta=2), sampler=Grid(space)
    )
    steps = play(selection)
    assert len(steps) == 8
    assert selection.best.values == {"optimizer.lr": 1e-2, "model.layers": 1}


@pytest.mark.parametrize("rules", RULES[:3], ids=["asha", "halving", "hyperband"])
def test_failed_trials_hold_nobody_up(rules):
    selection = Selection(JOB, SPACE, rules, seed=1)
    steps = play(selection, fails={("search-0", 1), ("search-3", 1), ("search-5", 3)})
    assert max(steps.values()) == 27
    assert selection.best.job.name != "search-0"
    assert selection.trials["search-0"].state == "stopped"


def test_where_all_fail_there_is_no_best():
    selection = Selection(JOB, SPACE, halving(trials=3, least_steps=1, most_steps=27))
    play(selection, fails={(f"search-{i}", 1) for i in range(3)})
    assert selection.best is None


def test_values_to_be_maximized():
    selection = Selection(JOB, SPACE, no_halving(trials=2, most_steps=27), maximize=True)
    for value in (0.25, 0.75):
        selection.report(selection.next().name, 27, value)
    assert selection.best.value == 0.75


def test_what_a_report_leads_to():
    selection = Selection(JOB, SPACE, halving(trials=2, least_steps=9, most_steps=27))
    one, two = selection.next(), selection.next()
    assert selection.next() is None
    assert not selection.done
    assert selection.report(one.name, 8, 1.0) == "continue"
    assert selection.report(one.name, 9, 1.0) == "pause"
    assert selection.report(one.name, 9, 1.0) == "pause"
    assert selection.report(two.name, 9, 0.5) == "continue"  # the best of both goes on at once
    assert selection.given_up() == [one.name]
    assert selection.given_up() == []
    assert selection.report(one.name, 10, 1.0) == "stop"
    assert selection.report(two.name, 27, 0.1) == "continue"
    assert selection.done


def test_a_loss_that_is_not_a_number_is_given_up_at_once():
    selection = Selection(JOB, SPACE, asha(trials=9, least_steps=1, most_steps=27))
    assert selection.report(selection.next().name, 1, float("nan")) == "stop"


def test_jobs_without_steps_get_those_of_the_rules():
    by_epochs = Job(**{**vars(JOB), "steps": None, "epochs": 2})
    assert Selection(by_epochs, SPACE, RULES[0]).next().steps == 27


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ((), "without rules"),
        (asha(trials=3, least_steps=1, most_steps=9), r"end at step \[9\] and the job at 27"),
    ],
)
def test_rules_that_do_not_fit_are_refused(rules, says):
    with pytest.raises(UsageError, match=says):
        Selection(JOB, SPACE, rules)


def test_a_trial_that_there_is_not():
    selection = Selection(JOB, SPACE, RULES[0])
    with pytest.raises(UsageError, match="no trial 'search-0'"):
        selection.report("search-0", 1, 1.0)
