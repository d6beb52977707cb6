"""What the store is told of the units to come: what it reads ahead is what they then use."""

import random
from dataclasses import replace

import pytest
from store_letters import SOON_S, until

from plait import Job
from plait.spill import units
from plait.spill.device import Device
from plait.spill.homes import homes
from plait.spill.outlook import Outlook
from plait.spill.partition import partition
from plait.spill.policies import Sticky
from plait.spill.sharing import Sharing, define
from plait.spill.slot import Slot, Turn
from plait.spill.task import Task
from plait.spill.units import Head, Report

PAGE = 4096
BLOCKS = [{"weights": 32, "moments": 2, "saved": 256, "forward": 4}] * 12
ARENA_PAGES = 800
STEPS = 4


@pytest.fixture
def planned(sketch):
    """A job's description, and its plan for one of two devices that share the arena."""
    description, costs = sketch(BLOCKS, value_pages=16)
    description = replace(description, steps=STEPS)
    plan = partition(
        description,
        costs,
        arena_bytes=ARENA_PAGES * PAGE,
        private_bytes=512 * PAGE,
        read_bytes_per_s=1e9,
        write_bytes_per_s=1e9,
        devices=2,
        unit_ms=0.5,  # many shards, none so large that it waits for a gap while the other device computes
    )
    return description, plan


def task(description, plan, name):
    job = Job(
        name=name,
        model="torch.nn:Linear",
        data="small_jobs:rows",
        loss="plait.losses:mean_squared_error",
        optimizer="torch.optim:Adam",
        batch=1,
        steps=STEPS,
    )
    return Task(
        job=job, description=replace(description, job=name), plan=plan, head=Head(job=name), unit_seconds={}
    )


def reported(task, unit):
    """What a device would say of a unit: its backward needs all that its forward left."""
    home = homes(task.description, task.plan)
    made = units.scratch_for(task.description, task.plan, unit, task.head)
    values = [f"{unit.job}/value/{p.name}/0" for p in home.reads[unit.shard]]
    saved = [segment.key for segment in made if "/saved/" in segment.key]
    state = ((1,), (1,), "float32", True)
    return Report(
        references=(*home.parameter_keys(unit.shard), *values, *saved) if unit.phase == "forward" else (),
        layouts={segment.key: state for segment in made},
        present={key: "11" for _, key in home.update_keys(unit.shard)} if unit.phase == "update" else {},
        loss=1.0 if unit.phase == "turn" else None,
        weight=1.0 if unit.phase == "turn" else None,
    )


class Play:
    """Jobs on a device each, whose units take at least as long as the disk needs to come to rest."""

    def __init__(self, store, tasks):
        self.store = store
        self.slots = [Slot(device=Device(i)) for i in range(len(tasks))]
        self.waiting = list(tasks)
        self.outlook = Outlook(
            store=store,
            slots=self.slots,
            tasks={task.name: task for task in tasks},
            sharing=Sharing(store),
            policy=Sticky(),
            private_bytes=1 << 40,
        )

    def run(self, seed):
        """To the end, with whichever device the dice say next."""
        pace = random.Random(seed)
        for slot, one in zip(self.slots, self.waiting, strict=True):
            self.begin(slot, one)
        while busy := [slot for slot in self.slots if slot.running is not None]:
            slot = pace.choice(busy)
            one = self.finish(slot)
            if one.unit is not None:
                self.begin(slot, one)

    def begin(self, slot, one):
        for segment in units.scratch_for(one.description, one.plan, one.unit, one.head):
            self.store.define(segment)
        lease = self.store.request(one.requests()).result(SOON_S)
        slot.running, one.state = Turn(task=one, unit=one.unit, lease=lease), "running"
        self.outlook.expect()
        until(self.store, lambda _: all(h.transfer is None for h in self.holdings()))

    def holdings(self):
        return list(self.store._catalogue.holdings.values())

    def finish(self, slot):
        turn, slot.running = slot.running, None
        one, before = turn.task, turn.task.head
        turn.lease.release()
        one.head = units.advance(one.description, one.plan, before, turn.unit, reported(one, turn.unit))
        for key in units.drops(one.description, one.plan, turn.unit, before, one.head):
            self.store.drop(key)
        return one


@pytest.mark.parametrize("devices", [1, 2])
def test_no_more_moves_than_the_plan_says(planned, make, devices):
    description, plan = planned
    assert len(plan.shards) > 4
    tasks = [task(description, plan, f"job-{i}") for i in range(devices)]
    store = make(pages=ARENA_PAGES)
    for one in tasks:
        define(store, one.description, one.plan)
    Play(store, tasks).run(seed=devices)
    told, found = plan.forecast, store.statistics()
    assert found.read_bytes <= devices * STEPS * told.read_bytes
    assert found.written_bytes <= 1.05 * devices * STEPS * told.written_bytes


def test_what_is_left_of_a_job_is_known_to_the_unit(planned):
    one = task(*planned, "job")
    order = units.step_order(one.description, one.plan)
    one.unit_seconds = dict.fromkeys(order, 2.0)
    assert one.remaining_seconds == STEPS * 2.0 * len(order)
    last = len(order) - 1
    one.head = replace(one.head, stage="step", step=STEPS - 1, position=last, losses=(1.0,) * STEPS)
    assert one.remaining_seconds == one.next_seconds == 2.0  # its loss is known, and an update is to come
    one.took(one.unit, 4.0)
    assert one.remaining_seconds == one.longest_seconds == 3.0
    one.head = replace(one.head, stage="done", step=STEPS, position=0)
    assert one.remaining_seconds == 0.0
