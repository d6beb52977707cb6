"""Plans as tasks: every job in one of them, and none on a device before whom the plan puts there first."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.cluster import Cluster
from plait.engine.assignment import Manner, narrowed, tasks_of
from plait.errors import UsageError
from plait.spill import Choice, Selection, no_halving
from plait.strategy.option import Option
from plait.strategy.workload import Placement, Way, WorkloadPlan
from reference_jobs import BASE, job

HERE = Cluster.uniform(devices_per_host=4, memory="1GiB", bandwidth="1gbit", latency="50us")
NAMES = [device.name for device in HERE.devices]


def option(strategy="data", devices=NAMES, **settings):
    memory = dict.fromkeys(devices, 1 << 20)
    budget = dict.fromkeys(devices, 1 << 30)
    return Option(
        strategy=strategy, name=strategy, batch=8, step_ms=10.0, memory_bytes=memory, budget_bytes=budget,
        **settings,
    )  # fmt: skip


def placed(name, devices, start_ms=0.0, end_ms=100.0, how="foreground", **settings):
    return Placement(
        job=name, how=how, option=option(devices=devices, **settings), devices=tuple(devices),
        start_ms=start_ms, end_ms=end_ms,
    )  # fmt: skip


def plan_of(*placements, cluster=HERE):
    way = Way(name="by hand", placements=placements, makespan_ms=1.0, samples_per_s=1.0)
    return WorkloadPlan(
        cluster=cluster, objective="makespan", ways=(way,), comparisons={}, bound_ms=1.0,
        bound_samples_per_s=1.0, why="by hand",
    )  # fmt: skip


def tasks(*placements, sweeps=None, **manner):
    jobs = {placement.job: job(BASE, name=placement.job) for placement in placements}
    return tasks_of(plan_of(*placements), jobs, sweeps or {}, Manner(**manner))


@st.composite
def schedules(draw):
    """Placements in which no device has two jobs at once."""
    free = dict.fromkeys(NAMES, 0.0)
    found = []
    for number in range(draw(st.integers(1, 6))):
        devices = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
        start = max(free[name] for name in devices) + draw(st.sampled_from([0.0, 5.0]))
        end = start + draw(st.sampled_from([1.0, 10.0]))
        free |= dict.fromkeys(devices, end)
        found.append(placed(f"job-{number}", devices, start, end))
    return found


@given(schedules())
def test_on_every_device_jobs_come_in_the_order_of_the_plan(placements):
    made = {task.name: task for task in tasks(*placements)}
    assert set(made) == {placement.job for placement in placements}
    for one in placements:
        for other in placements:
            shared = set(one.devices) & set(other.devices)
            first = one.end_ms <= other.start_ms
            assert (one.job in made[other.job].after) == bool(shared and first and one is not other)


def test_a_task_has_what_its_workers_need():
    (task,) = tasks(placed("gpt", NAMES[:2], strategy="data", bits=4), save_every=7)
    assert (task.kind, task.strategy, task.compress, task.save_every) == ("train", "data", 4, 7)
    assert task.devices == tuple(NAMES[:2])
    assert task.read_jobs()[0].name == "gpt"


def test_checkpoints_come_about_every_thirty_seconds():
    (task,) = tasks(placed("gpt", NAMES))
    assert task.save_every == 3000


def test_jobs_that_alternate_are_one_task_with_all_the_memory():
    both = [placed(name, NAMES[:2], how="alternated", strategy="spill") for name in ("a", "b")]
    (task,) = tasks(*both)
    assert (task.kind, task.names, task.workers) == ("spill", ("a", "b"), 1)
    assert task.memory_bytes == 2 << 30
    (task,) = tasks(*both, memory_bytes=1 << 20)
    assert task.memory_bytes == 2 << 20


@pytest.mark.parametrize("save_every", [None, 7])
def test_jobs_that_spill_commit_as_often_as_was_asked_or_by_the_clock(save_every):
    both = [placed(name, NAMES[:2], how="alternated", strategy="spill") for name in ("a", "b")]
    sweep = Selection(
        job(BASE, name="swept"), {"optimizer.lr": Choice([0.1])}, no_halving(trials=1, most_steps=7)
    )
    made = tasks(
        *both, placed("c", NAMES, strategy="spill"), sweeps={"swept-sweep": sweep}, save_every=save_every
    )
    assert {task.name: task.save_every for task in made} == {
        "c": save_every, "spill": save_every, "swept-sweep": save_every
    }  # fmt: skip


def test_background_jobs_wait_for_nobody_and_nobody_for_them():
    front, behind, later = tasks(
        placed("front", NAMES),
        placed("later", NAMES, 100.0, 200.0),
        placed("behind", NAMES[:1], how="background"),
    )[0:3]
    by_name = {task.name: task for task in (front, behind, later)}
    assert by_name["behind"].priority == "background"
    assert by_name["behind"].after == ()
    assert by_name["later"].after == ("front",)


@pytest.mark.parametrize("idlest", [0, 1, 2])
def test_a_sweep_runs_on_the_host_that_the_foreground_uses_least(idlest):
    three = Cluster.uniform(hosts=3, memory="1GiB", bandwidth="1gbit", latency="50us")
    names = [device.name for device in three.devices]
    front = placed(
        "front", names, idle_ms={name: 9.0 if i == idlest else 4.0 for i, name in enumerate(names)}
    )
    sweep = Selection(job(BASE), {"optimizer.lr": Choice([0.1])}, no_halving(trials=1, most_steps=7))
    jobs = {"front": job(BASE, name="front")}
    _, search = tasks_of(plan_of(front, cluster=three), jobs, {"sweep": sweep}, Manner())
    assert search.devices == (names[idlest],)


def test_a_sweep_keeps_away_from_the_host_of_a_background_job():
    two = Cluster.uniform(hosts=2, memory="1GiB", bandwidth="1gbit", latency="50us")
    first, second = (device.name for device in two.devices)
    placements = placed("front", [first, second]), placed("behind", [first], how="background")
    sweep = Selection(job(BASE), {"optimizer.lr": Choice([0.1])}, no_halving(trials=1, most_steps=7))
    jobs = {name: job(BASE, name=name) for name in ("front", "behind")}
    made = tasks_of(plan_of(*placements, cluster=two), jobs, {"sweep": sweep}, Manner())
    assert made[-1].devices == (second,)


@pytest.mark.parametrize("priority", ["foreground", "background"])
def test_a_sweep_comes_after_the_foreground_or_behind_it(priority):
    swept = job(BASE, name="swept", priority=priority, memory="300MiB")
    sweep = Selection(swept, {"optimizer.lr": Choice([0.1])}, no_halving(trials=1, most_steps=7))
    front, search = tasks(placed("front", NAMES), sweeps={"swept-sweep": sweep})
    assert (search.kind, search.priority) == ("search", priority)
    assert search.after == (("front",) if priority == "foreground" else ())
    assert search.memory_bytes == 4 * 300 * 2**20
    assert front.after == ()


@pytest.mark.parametrize(("own", "given"), [("300MiB", 400), ("400MiB", 300), (None, 300), ("300MiB", None)])
def test_a_jobs_own_memory_can_only_lower_what_is_given(own, given):
    given_bytes = None if given is None else given * 2**20
    swept = job(BASE, name="swept", memory=own)
    sweep = Selection(swept, {"optimizer.lr": Choice([0.1])}, no_halving(trials=1, most_steps=7))
    search = tasks(placed("front", NAMES), sweeps={"swept-sweep": sweep}, memory_bytes=given_bytes)[-1]
    assert search.memory_bytes == 4 * 300 * 2**20
    budget = {} if own is None else dict.fromkeys(NAMES, 300 * 2**20)  # what a plan knows of it
    spilled = Placement(
        job="j", how="foreground", devices=tuple(NAMES), start_ms=0.0, end_ms=1.0,
        option=replace(option("spill"), budget_bytes=budget),
    )  # fmt: skip
    (one,) = tasks_of(
        plan_of(spilled), {"j": job(BASE, name="j", memory=own)}, {}, Manner(memory_bytes=given_bytes)
    )
    assert one.memory_bytes == 4 * 300 * 2**20


def test_a_sweep_whose_processes_alone_do_not_fit_is_refused_before_it_starts():
    sweep = Selection(job(BASE), {"optimizer.lr": Choice([0.1])}, no_halving(trials=1, most_steps=7))
    with pytest.raises(UsageError, match=r"80\.00 MiB .* too little for sweep 'small': 5 processes take"):
        tasks(placed("front", NAMES), sweeps={"small": sweep}, memory_bytes=20 * 2**20)


def test_a_task_on_fewer_devices_keeps_its_name_and_its_checkpoints():
    (task,) = tasks(placed("gpt", NAMES, bits=4), save_every=7)
    less = narrowed(task, placed("gpt", NAMES[1:2]), HERE)
    assert less.devices == (NAMES[1],)
    assert less.compress is None
    assert (less.name, less.jobs, less.save_every) == (task.name, task.jobs, task.save_every)
