"""Before the run: jobs are described and measured on the devices, and the budget is divided.

The budget is for all processes together. What they take by themselves (interpreters, torch, the traced
models) is measured and taken off; what is left is divided between the arena, which all share, and each
device's own working memory, so that all jobs together should take the least time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from plait.cluster.disk import DiskSpeed
from plait.errors import UsageError
from plait.factory import Factory
from plait.job import Job
from plait.optimizer import work
from plait.spill.description import Costs, Description
from plait.spill.device import Device
from plait.spill.footprint import SLACK_BYTES
from plait.spill.intervals import Intervals
from plait.spill.makespan import Disk
from plait.spill.partition import Smallest, partition, smallest
from plait.spill.plan import SpillPlan
from plait.spill.segment import PAGE_BYTES
from plait.units import counted, format_bytes

_OWN_LEAST_BYTES = 4 << 20
"""Of a device: small tensors come and go besides those that are planned."""
_VARIES_MIB = 8
"""By how much a process may hold more of its own than the last time."""
_DIVISIONS = 6
"""Ways to divide the budget that are tried."""
_MEASURED_ALIKE = ("name", "seed", "steps", "epochs", "evaluation", "schedule", "nonfinite", "clip_norm")
"""What does not change a job's costs; of the optimizer, see :mod:`plait.optimizer`."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """A job that has been described and measured."""

    job: Job
    description: Description
    costs: Costs


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How memory is divided."""

    memory_bytes: int
    """Of all processes together."""
    own_bytes: int
    """What they take by themselves, with a margin."""
    arena_bytes: int
    private_bytes: int
    """Of each device, for what it computes with."""
    devices: int
    cores: int = 1
    """Of each device."""


class Preparation:
    """Describes and measures jobs; costs of jobs that are alike are measured once."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._costs: dict[str, Costs] = {}

    def learn(self, jobs: Sequence[Job]) -> list[Known]:
        """Describe and measure jobs; an error in a job's own code says which job."""
        alike: dict[str, list[Job]] = {}
        for job in jobs:
            alike.setdefault(_kind(job), []).append(job)
        # Jobs that are alike go to one device, which traces their model once.
        homes = {kind: self._devices[i % len(self._devices)] for i, kind in enumerate(alike)}
        # Devices that have nothing to learn trace what they will run: their first unit does not wait for it.
        kinds = list(alike.values())
        for i, device in enumerate(self._devices[len(kinds) :] if kinds else ()):
            device.call("describe", kinds[i % len(kinds)][0])
        described = {job.name: homes[_kind(job)].call("describe", job) for job in jobs}
        measured = {
            kind: homes[kind].call("measure", some[0])
            for kind, some in alike.items()
            if kind not in self._costs
        }
        known = []
        for job in jobs:
            kind = _kind(job)
            try:
                description = described[job.name].result()
                if kind in measured:
                    self._costs[kind] = measured[kind].result()
            except Exception as error:
                error.add_note(f"while job {job.name!r} was prepared")
                raise
            known.append(Known(job=job, description=description, costs=self._costs[kind]))
        return known


def _kind(job: Job) -> str:
    """Jobs of one kind cost the same."""
    plain = json.loads(job.to_json())
    kept = {name: value for name, value in plain.items() if name not in _MEASURED_ALIKE}
    return json.dumps({**kept, "optimizer": work(cast(Factory, job.optimizer))}, sort_keys=True)


class Planner:
    """Makes plans of jobs for one way to divide the memory; jobs that are alike are planned once."""

    def __init__(self, budget: Budget, disk: DiskSpeed, *, at_once: int) -> None:
        self.budget = budget
        self.disk = disk
        self._at_once = at_once
        """Jobs that run at the same time."""
        self._plans: dict[tuple[int, bool], SpillPlan] = {}

    @property
    def below(self) -> Disk:
        """The memory that jobs share, and the disk, as a player sees them."""
        return Disk(
            memory_bytes=self.budget.arena_bytes,
            read_bytes_per_s=self.disk.read_bytes_per_s,
            write_bytes_per_s=self.disk.write_bytes_per_s,
        )

    def plan(self, known: Known) -> SpillPlan:
        """The plan of a job, or an error that says what it needs at least."""
        kind = (id(known.costs), known.description.clips)
        if kind not in self._plans:
            self._plans[kind] = partition(
                known.description,
                known.costs,
                arena_bytes=self.budget.arena_bytes,
                private_bytes=self.budget.private_bytes,
                read_bytes_per_s=self.disk.read_bytes_per_s,
                write_bytes_per_s=self.disk.write_bytes_per_s,
                devices=self._at_once,
            )
        plan = self._plans[kind]
        return replace(plan, forecast=replace(plan.forecast, steps=known.description.steps))


def unit_seconds(known: Known, plan: SpillPlan) -> dict[tuple[str, int], float]:
    """What the units of a step should take, by phase and shard."""
    times, seconds = len(known.description.micro_batches), {}
    for i, shard in enumerate(plan.shards):
        blocks = known.costs.blocks[shard.first : shard.end]
        forward, backward = sum(b.forward_ms for b in blocks), sum(b.backward_ms for b in blocks)
        again = {"recompute": forward, "keep": 0.0}.get(shard.activations, sum(b.thrift_ms for b in blocks))
        seconds["forward", i] = times * forward / 1e3
        seconds["turn", i] = times * (forward + backward + known.costs.loss_ms) / 1e3
        seconds["backward", i] = times * (backward + again) / 1e3
        seconds["update", i] = sum(b.update_ms for b in blocks) / 1e3
    return seconds


def divide(
    known: Sequence[Known],
    begun: Mapping[str, SpillPlan] | None = None,
    *,
    memory_bytes: int,
    own_bytes: int,
    devices: int,
    disk: DiskSpeed,
    cores: int = 1,
) -> Planner:
    """Divide the budget so that the jobs should take the least time together; refuse one that is too small.

    ``begun`` are plans of jobs that go on, by name: they cannot change any more, and have to fit. Where there
    is too little room for as many of them at a time as there are devices, they wait for each other.
    """
    begun = begun or {}
    at_once = min(devices, len(known))
    kinds = {(id(one.costs), one.description.clips): one for one in reversed(known)}
    least = {
        one.job.name: smallest(Intervals.of(one.description, one.costs), devices=at_once)
        for one in kinds.values()
    }
    going = [plan.forecast for plan in begun.values()]
    owns = [*(of.private_bytes for of in least.values()), *(of.private_peak_bytes for of in going)]
    arenas = [*(of.arena_bytes for of in least.values()), *(of.arena_peak_bytes for of in going)]
    own_least, arena_least = max(_OWN_LEAST_BYTES, *owns), max(arenas)
    need = arena_least + devices * own_least
    slack = (devices + 1) * SLACK_BYTES
    if begun:  # this is what the slack was left for
        slack = min(slack, max(0, memory_bytes - own_bytes - need))
    own_bytes += slack
    left = memory_bytes - own_bytes
    if left < need:
        works = f"{_rounded(own_bytes + need, devices + 1) >> 20}MiB"
        raise UsageError(
            _too_little(least, begun, memory_bytes, own_bytes, devices, works),
            setting="memory",
            works=f"{works}{', or fewer devices' * (devices > 1)}",
        )
    best: tuple[float, Planner] | None = None
    own_most = max(own_least, (left - arena_least) // devices)
    for i in range(_DIVISIONS):
        share = int(own_least * (own_most / own_least) ** (i / (_DIVISIONS - 1)))
        budget = Budget(
            memory_bytes=memory_bytes,
            own_bytes=own_bytes,
            arena_bytes=(left - devices * share) // PAGE_BYTES * PAGE_BYTES,
            private_bytes=share,
            devices=devices,
            cores=cores,
        )
        planner = Planner(budget, disk, at_once=at_once)
        try:
            took_ms = sum(planner.plan(one).forecast.run_ms for one in known)
        except UsageError:  # more of the one leaves too little of the other
            continue
        if best is None or took_ms < best[0]:
            best = took_ms, planner
    assert best is not None, "the least that works is among the ways to divide"
    return best[1]


def _too_little(
    least: Mapping[str, Smallest],
    begun: Mapping[str, SpillPlan],
    memory_bytes: int,
    own_bytes: int,
    devices: int,
    works: str,
) -> str:
    """For which job memory does not suffice and what would, in one line; then what takes it."""
    needs = {name: of.arena_bytes + devices * of.private_bytes for name, of in least.items()}
    whole = {
        name: of.forecast.arena_peak_bytes + devices * of.forecast.private_peak_bytes
        for name, of in begun.items()
    }
    job = max(needs | whole, key=lambda name: max(needs.get(name, 0), whole.get(name, 0)))
    if whole.get(job, 0) > needs.get(job, 0):
        plan = begun[job].forecast
        takes = (
            f"{format_bytes(plan.arena_peak_bytes)} shared and {format_bytes(plan.private_peak_bytes)} "
            f"on each device for job {job!r}, which was begun and keeps its cuts"
        )
    else:
        takes = f"at least {least[job].shared},\n  and {least[job].own}"
    return (
        f"{format_bytes(memory_bytes)} of memory is too little for job {job!r}; {works} works\n"
        f"  {counted(devices + 1, 'process')} take {format_bytes(own_bytes)} by themselves\n"
        f"  training takes {takes}"
    )


def _rounded(count_bytes: int, processes: int) -> int:
    """Up to whole MiB, and more for each process: what one holds by itself differs from run to run."""
    return (-(-count_bytes // (1 << 20)) + processes * _VARIES_MIB) << 20
