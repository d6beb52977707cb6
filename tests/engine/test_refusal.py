"""What is refused before anything starts."""

import functools
import os
from dataclasses import replace

import pytest

import plait
from plait.cluster import Cluster
from plait.engine.preparing import launcher_of, planned
from plait.engine.refusal import check_evaluations
from plait.engine.workload import Workload
from plait.errors import UsageError
from plait.evaluation import Evaluation
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


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"evaluation": Evaluation(data=functools.partial(points, count=0))}, "evaluation.data"),
        ({"threads": 10_000}, "threads"),
    ],
)
@pytest.mark.parametrize("swept", [False, True])
def test_so_it_is_before_a_plan_is_made(tmp_path, changes, setting, swept):
    wrong = job(**changes)
    space = {"optimizer.lr": Choice([0.1])}
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
