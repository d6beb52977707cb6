"""What is refused before anything starts."""

import functools
import os
from dataclasses import replace

import pytest
import torch

import plait
from plait.cluster import Cluster
from plait.engine.preparing import launcher_of, planned
from plait.engine.refusal import check_evaluations, check_functions
from plait.engine.workload import Workload
from plait.errors import UsageError
from plait.evaluation import Evaluation
from plait.factory import Factory
from plait.spill import Choice, Selection, no_halving
from reference_jobs import BASE, EVERYTHING, job, points


def on_core(core):
    one = Cluster.uniform(memory="1GiB", bandwidth="10gbit")
    return replace(one, devices=tuple(replace(device, cores=(core,)) for device in one.devices))


def test_a_core_that_is_not_there_is_refused_where_workers_start_here(tmp_path):
    usable = sorted(os.sched_getaffinity(0))
    gone = usable[-1] + 97
    with pytest.raises(UsageError, match=rf"device node0/0 is on core {gone}.*cores {usable[0]}") as caught:
        launcher_of("local", on_core(gone), None, None, tmp_path)
    assert caught.value.works == f"cores = [{usable[0]}], or none to use any"
    launcher_of("local", on_core(gone), None, None, tmp_path, starts=False)  # the files may be for elsewhere
    launcher_of("local", on_core(usable[-1]), None, None, tmp_path)


def raising(seed):
    raise KeyError("no such file")


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (functools.partial(points, count=0), "job 'small': the evaluation data has no rows"),
        (raising, r"its evaluation data raised KeyError: 'no such file' \(test_refusal.py:\d+\)"),
    ],
)
def test_evaluation_data_without_rows_is_refused(data, what):
    with pytest.raises(UsageError, match=what) as caught:
        check_evaluations([BASE, job(evaluation=Evaluation(data=data))])
    assert caught.value.setting == "evaluation.data"
    check_evaluations([BASE, EVERYTHING])


def odd(output):
    return output


def late(optimizer, *, when):
    return torch.optim.lr_scheduler.ConstantLR(optimizer, total_iters=when)


NO_METRIC = Evaluation(data=points, metrics={"right": "plait.losses:rightness"})


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"loss": "plait.losses:entropy"}, "job 'small': plait.losses has no 'entropy'"),
        ({"loss": odd}, r"job 'small': \S*:odd\(output\) is called with \(output, batch\)"),
        (
            {"loss": Factory("plait.losses:cross_entropy", smooth=1)},
            "cross_entropy takes no argument 'smooth'",
        ),
        ({"weight": "nowhere:weight"}, "job 'small': nowhere:weight cannot be imported"),
        ({"inputs": "math:pi"}, "job 'small': math:pi is a float, not a function"),
        ({"evaluation": NO_METRIC}, "job 'small': plait.losses has no 'rightness'"),
        ({"schedule": late}, r"job 'small': \S*:late\(optimizer, when\) is called with \(optimizer\)"),
    ],
)
def test_functions_that_only_workers_would_call_are_refused_before(changes, what):
    (field,) = changes
    with pytest.raises(UsageError, match=what) as caught:
        check_functions(job(**changes))
    assert caught.value.setting.startswith(field)
    check_functions(job(**changes), searched={field})  # trials have one of their own
    check_functions(EVERYTHING)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"evaluation": Evaluation(data=functools.partial(points, count=0))}, "evaluation.data"),
        ({"threads": 10_000}, "threads"),
        ({"loss": "plait.losses:entropy"}, "loss"),
        ({"schedule": "torch.optim.lr_scheduler:StepLR"}, "schedule"),
        ({"evaluation": NO_METRIC}, "evaluation.metrics.right"),
    ],
)
@pytest.mark.parametrize("swept", [False, True])
def test_so_it_is_before_a_plan_is_made(tmp_path, changes, setting, swept):
    wrong = job(**changes)
    space = {"clip_norm": Choice([0.1])}
    given = Selection(wrong, space, no_halving(trials=1, most_steps=7)) if swept else wrong
    one = Cluster.uniform(memory="1GiB", bandwidth="10gbit")
    with pytest.raises(UsageError) as caught:
        planned(Workload.of(given), one, "data", "makespan", tmp_path, print)
    assert caught.value.setting == setting
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "given",
    [
        {"dry_run": True}, {"write": "slurm"}, {"strategy": "data"}, {"compress": 4}, {"devices": 1},
        {"objective": "throughput"}, {"memory": "1GiB"}, {"save_every": 5}, {"max_slowdown": 1.5},
        {"profiles": "there"}, {"directory": "there"}, {"jobs": BASE},
    ],
)  # fmt: skip
def test_a_run_that_goes_on_is_not_changed(tmp_path, given):
    (name,) = given
    with pytest.raises(UsageError, match=f"{name} for a run that goes on") as caught:
        plait.run(resume=tmp_path, **given)
    assert caught.value.setting == name


def test_what_a_sweep_searches_over_is_its_trials_own(tmp_path):
    """The job that they are made of need not work by itself."""
    base = job(schedule="torch.optim.lr_scheduler:StepLR")
    sweep = Selection(base, {"schedule.step_size": Choice([2, 3])}, no_halving(trials=1, most_steps=7))
    one = Cluster.uniform(memory="1GiB", bandwidth="10gbit")
    assert planned(Workload.of(sweep), one, "auto", "makespan", tmp_path, print).ways == ()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("cluster", "cluster.toml"),
        ("limits", {"restarts": 1}),
        ("max_slowdown", None),
        ("max_slowdown", "1.05"),
        ("directory", ""),
        ("directory", 1),
        ("profiles", 1),
        ("sinks", None),
        ("sinks", ""),
        ("devices", "2"),
        ("devices", True),
    ],
)
def test_arguments_of_another_type_are_refused_with_one_that_works(setting, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        plait.run(BASE, **{setting: value})
    assert caught.value.setting == setting
    assert caught.value.works
    assert not list(tmp_path.iterdir())
