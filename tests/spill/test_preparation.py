"""Dividing a budget: what is left beside the processes, shared out so that plans fit."""

import re
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from plait import Factory, Job
from plait.cluster.disk import DiskSpeed
from plait.errors import UsageError
from plait.spill.announcement import announce, bound_seconds, foretell
from plait.spill.footprint import SLACK_BYTES
from plait.spill.preparation import Known, Preparation, divide, unit_seconds
from plait.spill.room import commit_bytes
from plait.spill.runner import Runner
from plait.spill.task import Task
from plait.spill.units import Head
from plait.units import counted, parse_bytes

HERE = Path(__file__).parent / "small_jobs.py"
DISK = DiskSpeed(read_bytes_per_s=1e9, write_bytes_per_s=1e9, direct=True)
MIB = 1 << 20


@pytest.fixture(scope="module")
def known():
    job = Job(
        name="wide",
        model=Factory(f"{HERE}:mlp", width=768, depth=4),
        data=Factory(f"{HERE}:rows"),
        loss="plait.losses:mean_squared_error",
        optimizer=Factory("torch.optim:AdamW", lr=1e-2),
        batch=16,
        steps=6,
    )
    runner = Runner(memoryview(b""))
    return Known(job=job, description=runner.describe(job), costs=runner.measure(job))


class Hand:
    """A device in this process, which notes what it is asked."""

    def __init__(self):
        self.runner, self.asked = Runner(memoryview(b"")), []

    def call(self, method, job):
        self.asked.append((method, job.name))
        answer = Future()
        answer.set_result(getattr(self.runner, method)(job))
        return answer


def test_devices_with_nothing_to_learn_trace_what_they_will_run(known):
    jobs = [known.job, replace(known.job, name="second", optimizer=Factory("torch.optim:AdamW", lr=1e-3))]
    hands = [Hand(), Hand(), Hand()]
    learned = Preparation(hands).learn(jobs)
    assert [one.job.name for one in learned] == ["wide", "second"]
    assert hands[0].asked == [("describe", "wide"), ("describe", "second"), ("measure", "wide")]
    assert hands[1].asked == hands[2].asked == [("describe", "wide")]


def test_jobs_of_another_work_are_measured_and_planned_by_themselves(known):
    """A momentum that one keeps on disk and another has not is part of what its shards hold."""
    plain, heavy, other = (
        replace(known.job, name=name, optimizer=Factory("torch.optim:SGD", lr=0.1, momentum=momentum))
        for name, momentum in (("plain", 0.0), ("heavy", 0.9), ("other", 0.8))
    )
    hand = Hand()
    first, second, third = Preparation([hand]).learn([plain, heavy, other])
    assert [name for method, name in hand.asked if method == "measure"] == ["plain", "heavy"]
    assert second.costs is third.costs is not first.costs
    planner = divide([first, second], memory_bytes=256 * MIB, own_bytes=32 * MIB, devices=1, disk=DISK)
    small, large = (planner.plan(one).forecast.disk_bytes for one in (first, second))
    assert large > small


def task(known, planner):
    plan = planner.plan(known)
    head = Head(job="wide", stage="step", step=2, losses=(1.0, 2.0))
    return Task(
        job=known.job,
        description=known.description,
        plan=plan,
        head=head,
        unit_seconds=unit_seconds(known, plan),
    )


@pytest.mark.parametrize("devices", [1, 2])
def test_a_budget_is_divided_whole_and_the_least_that_is_named_works(known, devices):
    own = 112 * MIB - (devices + 1) * SLACK_BYTES
    with pytest.raises(UsageError, match=r"  . processes take 112\.00 MiB by themselves\n") as refused:
        divide([known] * devices, memory_bytes=113 * MIB, own_bytes=own, devices=devices, disk=DISK)
    assert refused.value.works.endswith(", or fewer devices") == (devices > 1)
    works = refused.value.works.removesuffix(", or fewer devices")
    first, *rest = refused.value.what.splitlines()  # the first line alone says what to do
    assert first == f"113.00 MiB of memory is too little for job 'wide'; {works} works"
    assert all(line.startswith("  ") for line in rest)
    assert "optimizer state" in refused.value.what
    least = parse_bytes(works)
    for memory in (least, least + 8 * MIB, 2 * least):
        planner = divide([known] * devices, memory_bytes=memory, own_bytes=own, devices=devices, disk=DISK)
        budget, plan = planner.budget, planner.plan(known)
        taken = budget.own_bytes + budget.arena_bytes + devices * budget.private_bytes
        assert memory - 8192 <= taken <= memory
        assert plan.forecast.private_peak_bytes <= budget.private_bytes
        assert devices * plan.forecast.arena_peak_bytes <= budget.arena_bytes


def test_more_memory_is_not_slower(known):
    times = []
    for memory in (130, 140, 170, 1000):
        planner = divide([known], memory_bytes=memory * MIB, own_bytes=100 * MIB, devices=1, disk=DISK)
        times.append(planner.plan(known).forecast.step_ms)
    assert times == sorted(times, reverse=True)


def test_plans_of_jobs_that_go_on_have_to_fit(known):
    wide = divide([known], memory_bytes=1000 * MIB, own_bytes=100 * MIB, devices=1, disk=DISK).plan(known)
    begun = {"a": wide}
    with pytest.raises(UsageError, match=r"on each device for job 'a', which was begun and keeps") as refused:
        divide([known], begun, memory_bytes=125 * MIB, own_bytes=100 * MIB, devices=1, disk=DISK)
    least = parse_bytes(refused.value.works)
    divide([known], begun, memory_bytes=least, own_bytes=100 * MIB, devices=1, disk=DISK)


@pytest.mark.parametrize("memory", [140, 200])
def test_one_job_more_and_processes_that_have_grown_do_not_keep_begun_jobs_from_going_on(known, memory):
    given = {"memory_bytes": memory * MIB, "devices": 2, "disk": DISK}
    plan = divide([known], own_bytes=100 * MIB, **given).plan(known)
    grown = divide([known, known], {"a": plan}, own_bytes=100 * MIB + 3 * SLACK_BYTES, **given)
    assert grown.budget.arena_bytes >= plan.forecast.arena_peak_bytes
    assert grown.budget.private_bytes >= plan.forecast.private_peak_bytes
    assert grown.budget.own_bytes + grown.budget.arena_bytes + 2 * grown.budget.private_bytes <= memory * MIB


def test_a_run_is_announced_with_what_it_should_take(known):
    planner = divide([known], memory_bytes=130 * MIB, own_bytes=100 * MIB, devices=2, disk=DISK)
    one = task(known, planner)
    told, plan = foretell([one], planner.budget), one.plan.forecast
    assert told.memory_bytes <= 130 * MIB
    assert told.read_bytes == 4 * plan.read_bytes  # two of six steps are done
    assert told.seconds == pytest.approx(4 * plan.step_ms / 1e3)
    lines = announce([one], planner.budget, DISK)
    assert lines[0].startswith("memory ")
    assert lines[1].startswith(f"wide: {counted(len(one.plan.shards), 'shard')}")
    changed = 3 * sum(p.nbytes for p in one.description.parameters)  # and two numbers of AdamW for each
    assert re.search(r"; 4 steps; each commit writes (.*) besides$", lines[1])
    assert changed <= commit_bytes(one) < 1.01 * changed
    assert lines[-1].startswith("1 of 2 devices has nothing to do: a job runs on one at a time; lend=True")


def test_no_schedule_is_shorter_than_the_longest_job_or_an_even_share():
    assert bound_seconds([3.0, 1.0], 2) == 3.0
    assert bound_seconds([2.0, 2.0, 2.0], 2) == 3.0
    assert bound_seconds([], 2) == 0.0


def test_a_task_knows_where_it_is_tied_and_what_comes(known):
    planner = divide([known], memory_bytes=130 * MIB, own_bytes=100 * MIB, devices=1, disk=DISK)
    one = task(known, planner)
    shards = len(one.plan.shards)
    assert shards > 1
    assert (one.rests, one.tied, one.updates_next) == (True, None, False)
    assert one.remaining_seconds == pytest.approx(4 * one.step_seconds)
    assert len(one.upcoming()) == 2 * len(one._order)
    one.paused = True
    assert one.stays
    one.head = Head(job="wide", stage="step", step=2, position=1, devices={0: 1})
    assert (one.rests, one.tied) == (False, 1)
    assert not one.stays  # what it keeps on the device would be in the way of others
    one.head = Head(job="wide", stage="step", step=2, position=shards - 1)  # the turn, and then its update
    assert one.updates_next
    before = one.unit_seconds["forward", 0]
    one.took(one.unit.__class__("wide", 2, "forward", 0), 3 * before)
    assert one.unit_seconds["forward", 0] == pytest.approx(2 * before)
