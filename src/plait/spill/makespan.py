"""Plays many jobs on many devices under a policy: how long until all are done, and what crosses the disk.

The policies are those of a run (:mod:`plait.spill.policies`), asked at the same moments: a device that
begins a unit chooses what comes next, or leaves that open and goes on with the same job. Segments live in
one memory that all devices share; what was used longest ago makes room, and is written first if it was
changed. The disk reads one thing at a time and writes one thing at a time. A unit computes once its
segments are there:

    device 0   | A F0 | A F1 | C F0 |
    device 1   | B F0 |  . B F1 | B T2 |        the dot: its segments were still on their way
    read       |A1 B1|C0|B2 ...

`lower_bound_ms` is what no schedule beats, however quick the disk: a job runs one unit at a time, and there
are so many devices.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from plait.errors import UsageError
from plait.spill.forecast import Machine
from plait.spill.intervals import Intervals
from plait.spill.plan import SpillPlan
from plait.spill.policies import JobView, Policy, View
from plait.timeline import Span, Timeline


@dataclass(frozen=True, kw_only=True)
class ShardLoad:
    """A shard of a job: what it computes and what it needs in memory."""

    forward_ms: float
    backward_ms: float
    """Backward and update."""
    weight_bytes: int = 0
    moment_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Load:
    """A job to be played."""

    name: str
    steps: int
    shards: tuple[ShardLoad, ...]

    @classmethod
    def planned(cls, name: str, steps: int, of: Intervals, plan: SpillPlan) -> Load:
        """A job as it was planned: the units of its forecast, with what each costs beside its work."""
        shards = []
        for shard in plan.shards:
            place = (shard.first, shard.end)
            last = shard.end == of.blocks  # it goes back at once
            again = {"keep": 0.0, "recompute": of.forward_ms[place]}
            again_ms = float(again.get(shard.activations, of.thrift_ms[place]))
            # They cross the disk once each way in a step, as the optimizer's state does.
            spilled_bytes = int(of.spilled[place]) if shard.activations == "spill" and not last else 0
            more_ms = of.loss_ms if last else again_ms
            shards.append(
                ShardLoad(
                    forward_ms=float(of.forward_ms[place]) + (0.0 if last else Machine.unit_ms),
                    backward_ms=float(of.backward_ms[place] + of.update_ms[place])
                    + more_ms
                    + 2 * Machine.unit_ms,
                    weight_bytes=int(of.weights[place]),
                    moment_bytes=int(of.moments[place]) + spilled_bytes,
                )
            )
        return cls(name=name, steps=steps, shards=tuple(shards))

    @property
    def units(self) -> tuple[tuple[str, int, float], ...]:
        """Of one step: phase, shard, milliseconds. The last shard goes forward and back in one turn."""
        last = len(self.shards) - 1
        forward = [("forward", i, self.shards[i].forward_ms) for i in range(last)]
        turn = ("turn", last, self.shards[last].forward_ms + self.shards[last].backward_ms)
        back = [("backward", i, self.shards[i].backward_ms) for i in reversed(range(last))]
        return (*forward, turn, *back)

    @property
    def work_ms(self) -> float:
        """All that it computes."""
        return self.steps * sum(ms for _, _, ms in self.units)


@dataclass(frozen=True, kw_only=True)
class Disk:
    """What lies below memory, and how much memory there is."""

    memory_bytes: float = float("inf")
    read_bytes_per_s: float = float("inf")
    write_bytes_per_s: float = float("inf")


@dataclass(frozen=True, kw_only=True)
class Played:
    """What came of it."""

    makespan_ms: float
    lower_bound_ms: float
    read_bytes: int
    written_bytes: int
    stall_ms: float
    """Time that devices waited for segments, all together."""
    timeline: Timeline

    @property
    def over(self) -> float:
        """The makespan, as a multiple of the lower bound."""
        return self.makespan_ms / self.lower_bound_ms if self.lower_bound_ms else 1.0


def lower_bound_ms(jobs: Sequence[Load], devices: int) -> float:
    """No schedule is shorter: all work shared evenly, or the longest job."""
    return max(sum(job.work_ms for job in jobs) / devices, max((job.work_ms for job in jobs), default=0.0))


def play(jobs: Sequence[Load], devices: int, policy: Policy, disk: Disk | None = None) -> Played:
    """Play jobs to their end."""
    if devices < 1:
        raise UsageError(f"jobs cannot run on {devices} devices", setting="devices", works="1")
    names = [job.name for job in jobs]
    if len(set(names)) < len(names):
        raise UsageError("two jobs have the same name", setting="jobs", works="one name each")
    return _Game(jobs, devices, policy, Disk() if disk is None else disk).played()


Key = tuple[str, str, int]
"""Job, kind, shard of a segment."""


class _Unit(NamedTuple):
    phase: str
    shard: int
    ms: float
    needs: dict[Key, tuple[int, bool]]
    """By segment: bytes, and whether they are changed."""


class _Task:
    """A job under way."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.units = [_unit(load, phase, shard, ms) for phase, shard, ms in load.units]
        self.grain_ms = max(unit.ms for unit in self.units)
        self.left_ms = load.work_ms
        self.position = 0
        """Units done."""
        self.device: int | None = None
        """Where it runs, or is to run next."""
        self.last_device: int | None = None

    @property
    def done(self) -> bool:
        return self.position == self.load.steps * len(self.units)

    @property
    def unit(self) -> _Unit:
        return self.units[self.position % len(self.units)]

    @property
    def needs_next(self) -> dict[Key, tuple[int, bool]]:
        """What the unit after the present one needs."""
        if self.position + 1 == self.load.steps * len(self.units):
            return {}
        return self.units[(self.position + 1) % len(self.units)].needs

    def advance(self, device: int) -> None:
        self.left_ms -= self.unit.ms
        self.position += 1
        self.device, self.last_device = None, device


def _unit(load: Load, phase: str, shard: int, ms: float) -> _Unit:
    changes, of = phase != "forward", load.shards[shard]
    needs: dict[Key, tuple[int, bool]] = {(load.name, "weights", shard): (of.weight_bytes, changes)}
    if changes and of.moment_bytes:
        needs[load.name, "moments", shard] = (of.moment_bytes, True)
    return _Unit(phase, shard, ms, needs)


@dataclass(kw_only=True, eq=False)
class _Slot:
    running: _Task | None = None
    next: _Task | None = None
    ready_ms: float = 0.0
    """When the segments of ``next`` are there."""
    idle_ms: float = 0.0
    """Since when it waits."""


@dataclass(kw_only=True, eq=False)
class _Memory:
    """Segments in memory, the one used longest ago first."""

    disk: Disk
    present: OrderedDict[Key, tuple[int, bool]] = field(default_factory=OrderedDict)
    there_ms: dict[Key, float] = field(default_factory=dict)
    used_bytes: int = 0
    reader_ms: float = 0.0
    writer_ms: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0
    spans: list[Span] = field(default_factory=list)

    def bring(
        self,
        needs: dict[Key, tuple[int, bool]],
        pinned: set[Key],
        now_ms: float,
    ) -> float:
        """Bring segments in; when they are all there."""
        ready_ms = now_ms
        for key, (size, _) in needs.items():
            if key not in self.present:
                self._load(key, size, pinned | set(needs), now_ms)
            self.present.move_to_end(key)
            ready_ms = max(ready_ms, self.there_ms[key])
        return ready_ms

    def _load(self, key: Key, size: int, pinned: set[Key], now_ms: float) -> None:
        start_ms = max(now_ms, self.reader_ms)
        for other in [key for key in self.present if key not in pinned]:
            if self.used_bytes + size <= self.disk.memory_bytes:
                break
            count, dirty = self.present.pop(other)
            self.used_bytes -= count
            if dirty:
                begun_ms = max(now_ms, self.writer_ms)
                self.writer_ms = begun_ms + 1e3 * count / self.disk.write_bytes_per_s
                self.written_bytes += count
                self._note("write", other, begun_ms, self.writer_ms)
                start_ms = max(start_ms, self.writer_ms)
        self.reader_ms = start_ms + 1e3 * size / self.disk.read_bytes_per_s
        self.read_bytes += size
        self.used_bytes += size
        self.present[key] = (size, False)
        self.there_ms[key] = self.reader_ms
        self._note("read", key, start_ms, self.reader_ms)

    def _note(self, track: str, key: Key, start_ms: float, end_ms: float) -> None:
        if end_ms > start_ms:
            self.spans.append(Span(track, f"{key[0]} {key[1]} {key[2]}", start_ms, end_ms))

    def change(self, needs: dict[Key, tuple[int, bool]]) -> None:
        for key, (size, changes) in needs.items():
            self.present[key] = (size, changes or self.present[key][1])


class _Game:
    def __init__(self, jobs: Sequence[Load], devices: int, policy: Policy, disk: Disk) -> None:
        self.policy, self.loads = policy, jobs
        self.tasks = {job.name: _Task(job) for job in jobs if job.steps}
        self.slots = [_Slot() for _ in range(devices)]
        self.memory = _Memory(disk=disk)
        self.ends: list[tuple[float, int]] = []
        self.now_ms = self.stall_ms = 0.0
        self.spans: list[Span] = []

    def played(self) -> Played:
        self._fill()
        while self.ends:
            self.now_ms = self.ends[0][0]
            while self.ends and self.ends[0][0] <= self.now_ms:
                self._finish(heapq.heappop(self.ends)[1])
            self._fill()
        assert not self.tasks, "a policy left jobs undone"
        return Played(
            makespan_ms=self.now_ms,
            lower_bound_ms=lower_bound_ms(self.loads, len(self.slots)),
            read_bytes=self.memory.read_bytes,
            written_bytes=self.memory.written_bytes,
            stall_ms=self.stall_ms,
            timeline=Timeline.of([*self.spans, *self.memory.spans]),
        )

    def _finish(self, index: int) -> None:
        slot = self.slots[index]
        task = slot.running
        assert task is not None, "only what runs ends"
        self.memory.change(task.unit.needs)
        task.advance(index)
        if task.done:
            del self.tasks[task.load.name]
        slot.running, slot.idle_ms = None, self.now_ms

    def _fill(self) -> None:
        """Give idle devices work, then let those at work choose what comes next."""
        for index, slot in enumerate(self.slots):
            if slot.running is None:
                if slot.next is None:
                    self._choose(index, slot)
                if slot.next is not None:
                    self._begin(index, slot, slot.next)
        for index, slot in enumerate(self.slots):
            if slot.running is not None and slot.next is None:
                self._choose(index, slot)

    def _choose(self, index: int, slot: _Slot) -> None:
        name = self.policy.choose(self._view(index, slot))
        if name is not None:
            slot.next = self.tasks[name]
            slot.next.device = index
            slot.ready_ms = self.memory.bring(slot.next.unit.needs, self._pinned(), self.now_ms)
        elif slot.running is not None:
            self.memory.bring(slot.running.needs_next, self._pinned(), self.now_ms)

    def _begin(self, index: int, slot: _Slot, task: _Task) -> None:
        there_ms = self.memory.bring(task.unit.needs, self._pinned(), self.now_ms)
        start_ms = max(self.now_ms, slot.ready_ms, there_ms)
        self.stall_ms += start_ms - slot.idle_ms
        slot.running, slot.next = task, None
        name = f"{task.load.name} {task.unit.phase} {task.unit.shard}"
        self.spans.append(Span(f"device{index}", name, start_ms, start_ms + task.unit.ms))
        heapq.heappush(self.ends, (start_ms + task.unit.ms, index))

    def _pinned(self) -> set[Key]:
        """What units need that run or are to run next."""
        return {
            key
            for slot in self.slots
            for task in (slot.running, slot.next)
            if task is not None
            for key in task.unit.needs
        }

    def _view(self, index: int, slot: _Slot) -> View:
        present = self.memory.present
        jobs = []
        for name, task in self.tasks.items():
            missing = sum(size for key, (size, _) in task.unit.needs.items() if key not in present)
            jobs.append(
                JobView(
                    name=name,
                    remaining_ms=task.left_ms,
                    unit_ms=task.unit.ms,
                    grain_ms=task.grain_ms,
                    free=task.device is None,
                    missing_bytes=missing,
                    last_device=task.last_device,
                    begun=task.position % len(task.units) > 0,
                )
            )
        now = None if slot.running is None else slot.running.load.name
        return View(device=index, devices=len(self.slots), now=now, jobs=tuple(jobs))
