"""The search space: what trials are made of it, and what it refuses."""

import random

import pytest

from plait.errors import UsageError
from plait.evaluation import Evaluation
from plait.factory import Factory
from plait.job import Job
from plait.spill.space import Choice, Real, Whole, check_space, derive

JOB = Job(
    name="search",
    model=Factory("collections:OrderedDict", layers=2),
    data="collections:OrderedDict",
    loss="plait.losses:rows",
    optimizer=Factory("torch.optim:AdamW", lr=1e-3, weight_decay=0.1),
    batch=8,
    steps=10,
    evaluation=Evaluation(data="collections:OrderedDict", every=5),
)


def test_a_trial_is_the_job_with_other_values():
    made = derive(
        JOB, "trial", {"optimizer.lr": 0.5, "model.width": 64, "batch": 4, "evaluation.every": 2, "seed": 7}
    )
    assert made.optimizer == Factory("torch.optim:AdamW", lr=0.5, weight_decay=0.1)
    assert made.model == Factory("collections:OrderedDict", layers=2, width=64)
    assert (made.name, made.batch, made.evaluation.every, made.seed, made.steps) == ("trial", 4, 2, 7, 10)
    assert JOB.batch == 8


def test_several_arguments_of_one_function():
    made = derive(JOB, "trial", {"optimizer.lr": 0.5, "optimizer.weight_decay": 0.0})
    assert made.optimizer == Factory("torch.optim:AdamW", lr=0.5, weight_decay=0.0)


@pytest.mark.parametrize("seed", range(20))
def test_samples_lie_in_their_range(seed):
    source = random.Random(seed)
    assert 1e-5 <= Real(1e-5, 1e-2, log=True).sample(source) <= 1e-2
    assert -1 <= Real(-1, 1).sample(source) <= 1
    assert Whole(2, 6).sample(source) in range(2, 7)
    assert Whole(1, 1000, log=True).sample(source) in range(1, 1001)
    assert Choice(["a", "b"]).sample(source) in ("a", "b")


def test_small_ones_are_as_likely_as_large_ones_where_it_is_logarithmic():
    source = random.Random(0)
    drawn = [Real(1e-4, 1, log=True).sample(source) for _ in range(1000)]
    assert 400 < sum(value < 1e-2 for value in drawn) < 600


@pytest.mark.parametrize(
    ("space", "says"),
    [
        ({}, "nothing to search"),
        ({"momentum": Choice([1])}, "'momentum' cannot be searched over"),
        ({"name": Choice(["a"])}, "'name' cannot be searched over"),
        ({"steps": Choice([1])}, "'steps' cannot be searched over"),
        ({"schedule.gamma": Choice([1])}, "argument of nothing"),
        ({"batch.size": Choice([1])}, "argument of a int"),
        ({"evaluation.rows": Choice([1])}, "there is no 'evaluation.rows'"),
        ({"batch": Choice([0])}, "batch is 0"),
        ({"batch": [1, 2]}, r"is to be \[1, 2\]"),
    ],
)
def test_names_and_values_that_do_not_fit_are_refused(space, says):
    with pytest.raises(UsageError, match=says):
        check_space(JOB, space)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Choice([]),
        lambda: Real(2, 1),
        lambda: Real(0, 1, log=True),
        lambda: Real(0, float("inf")),
        lambda: Whole(3, 2),
        lambda: Real(0, 1).grid(),
    ],
)
def test_ranges_that_cannot_be_are_refused(make):
    with pytest.raises(UsageError):
        make()
