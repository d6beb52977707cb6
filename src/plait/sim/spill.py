"""Plays spilled jobs on devices that share one memory and the disk below it, under the policies of a run.

The rules are those of :mod:`plait.spill.makespan`: a policy (:mod:`plait.spill.policies`, its own code) is
asked at the same moments, segments that were used longest ago make room, and the disk reads one thing at a
time and writes one thing at a time. Where devices are all alike and the disk is steady, both come to the
same figures. Here devices may be slower than others, change their speed and jitter, the disk's rates may
change with time, and background work may have the devices while they wait for the disk.

    device 0   | A F0 | A F1 | C F0 |
    device 1   | B F0 |  . B F1 | B T2 |        the dot: its segments were still on their way
    read       |A1 B1|C0|B2 ...
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from plait.errors import UsageError
from plait.sim.background import Background, Crew
from plait.sim.device import Device
from plait.sim.played import Played
from plait.sim.simulation import Simulation
from plait.sim.spilled_job import SpilledJob
from plait.sim.tier import Disk, Memory
from plait.sim.trace import Trace
from plait.spill.makespan import Disk as Below
from plait.spill.makespan import Load
from plait.spill.policies import JobView, Policy, View
from plait.units import format_bytes, parse_whole

Key = tuple[str, str, int]
"""Job, kind, shard of a segment."""
Needs = dict[Key, tuple[int, bool]]
"""By segment: bytes, and whether they are changed."""


def play_spill(
    jobs: Sequence[Load | SpilledJob],
    devices: int,
    policy: Policy,
    below: Below | None = None,
    *,
    speeds: Mapping[int, Trace | float] | None = None,
    jitter: float = 0.0,
    read: Trace | None = None,
    write: Trace | None = None,
    background: Sequence[Background] = (),
    seed: int = 0,
    spans: int = 65_536,
) -> Played:
    """Play jobs to their end on devices 0, 1, ... of one machine.

    ``below`` says how much memory all share, and how fast the disk below it is; ``read`` and ``write``, in
    bytes a second over time, take the place of its rates. ``speeds`` are by number of the device, 1 where
    nothing is said. A step of a job is counted from the end of the one before it.
    """
    parse_whole(devices, setting="devices")
    remarks = tuple(job.remark for job in jobs if isinstance(job, SpilledJob) and job.remark is not None)
    loads = [job.load if isinstance(job, SpilledJob) else job for job in jobs]
    names = [load.name for load in loads] + [work.name for work in background]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"two jobs are called {twice!r}", setting="jobs", works="one name each")
    speeds = {} if speeds is None else speeds
    for index in speeds:
        if not 0 <= index < devices:
            raise UsageError(
                f"a speed is given for device {index} of {devices}",
                setting="speeds",
                works=f"0 to {devices - 1}",
            )
    below = Below() if below is None else below
    simulation = Simulation(seed=seed, spans=spans)
    disk = Disk(
        simulation,
        read=below.read_bytes_per_s if read is None else read,
        write=below.write_bytes_per_s if write is None else write,
    )
    made = [
        Device(simulation, f"device{index}", speed=speeds.get(index, 1.0), jitter=jitter)
        for index in range(devices)
    ]
    store = _Store(disk, Memory("memory", below.memory_bytes), works=_enough(loads, devices))
    game = _Game(simulation, loads, made, policy, store, Crew(simulation, made, background))
    return game.played(remarks)


def _enough(loads: Iterable[Load], devices: int) -> int:
    """Memory that is always enough: a unit at work, of the largest, on every device."""
    sizes = sorted((_size(unit.needs) for load in loads for unit in _units(load)), reverse=True)
    return sum(sizes[:devices])


def _size(needs: Needs) -> int:
    return sum(size for size, _ in needs.values())


class _Unit(NamedTuple):
    name: str
    ms: float
    needs: Needs


def _units(load: Load) -> list[_Unit]:
    """Those of one step."""
    found = []
    for phase, shard, ms in load.units:
        changes, of = phase != "forward", load.shards[shard]
        needs: Needs = {(load.name, "weights", shard): (of.weight_bytes, changes)}
        if changes and of.moment_bytes:
            needs[load.name, "moments", shard] = (of.moment_bytes, True)
        found.append(_Unit(f"{load.name} {phase} {shard}", ms, needs))
    return found


class _Segment:
    """A segment in memory, or on its way there."""

    __slots__ = ("dirty", "size", "there_ms")

    def __init__(self, size: int, there_ms: float) -> None:
        self.size, self.there_ms, self.dirty = size, there_ms, False


class _Store:
    """Memory and the disk below it: what was used longest ago makes room, written first if it was changed."""

    def __init__(self, disk: Disk, memory: Memory, *, works: int) -> None:
        self.disk, self.memory, self._works = disk, memory, works
        self.present: OrderedDict[Key, _Segment] = OrderedDict()
        """The one used longest ago first."""

    def bring(self, needs: Needs, pinned: set[Key]) -> float:
        """See that segments are there, or come; when the last of them is there."""
        for key, (size, _) in needs.items():
            if key not in self.present:
                self._load(key, size, pinned | set(needs))
            self.present.move_to_end(key)
        return max((self.present[key].there_ms for key in needs), default=0.0)

    def has_room(self, needs: Needs, pinned: set[Key]) -> bool:
        """Whether segments fit beside what must stay."""
        sizes = {key: segment.size for key, segment in self.present.items() if key in pinned}
        sizes |= {key: size for key, (size, _) in needs.items()}
        return sum(sizes.values()) <= self.memory.capacity_bytes

    def change(self, needs: Needs) -> None:
        """A unit that needed these has ended."""
        for key, (_, changes) in needs.items():
            self.present[key].dirty |= changes

    def _load(self, key: Key, size: int, pinned: set[Key]) -> None:
        room_ms = 0.0
        for other in [key for key in self.present if key not in pinned]:
            if self._fits(size):
                break
            segment = self.present.pop(other)
            self.memory.free(segment.size)
            if segment.dirty:
                room_ms = self.disk.write(_named(other), segment.size)
        if not self._fits(size):
            raise UsageError(
                f"units at work need {format_bytes(self.memory.used_bytes + size)} of "
                f"{format_bytes(int(self.memory.capacity_bytes))} of memory",
                setting="memory_bytes",
                works=f"{-(-self._works // 2**20)}MiB",
            )
        self.memory.hold(size)
        self.present[key] = _Segment(size, self.disk.read(_named(key), size, earliest_ms=room_ms))

    def _fits(self, size: int) -> bool:
        return self.memory.used_bytes + size <= self.memory.capacity_bytes


def _named(key: Key) -> str:
    return f"{key[0]} {key[1]} {key[2]}"


class _Task:
    """A job under way."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.units = _units(load)
        self.grain_ms = max(unit.ms for unit in self.units)
        self.left_ms = load.work_ms
        self.position = 0
        """Units done."""
        self.unit = self.units[0]
        """The one under way, or the next."""
        self.device: int | None = None
        """Where it runs, or is to run next."""
        self.last_device: int | None = None
        self.stepped_ms = 0.0
        """When its last step ended."""
        self._seen = (-1, False, 0)
        self._view = JobView(name=load.name, remaining_ms=self.left_ms)

    @property
    def done(self) -> bool:
        return self.position == self.load.steps * len(self.units)

    @property
    def needs_next(self) -> Needs:
        """What the unit after the present one needs."""
        if self.position + 1 == self.load.steps * len(self.units):
            return {}
        return self.units[(self.position + 1) % len(self.units)].needs

    def advance(self, device: int) -> None:
        """A device has done a unit."""
        self.left_ms -= self.unit.ms
        self.position += 1
        self.unit = self.units[self.position % len(self.units)]
        self.device, self.last_device = None, device

    def view(self, present: Mapping[Key, _Segment]) -> JobView:
        """As a device that chooses sees it; most have not changed since another did."""
        missing = 0
        for key, (size, _) in self.unit.needs.items():
            if key not in present:
                missing += size
        seen = (self.position, self.device is None, missing)
        if seen != self._seen:
            self._seen = seen
            self._view = JobView(
                name=self.load.name,
                remaining_ms=self.left_ms,
                unit_ms=self.unit.ms,
                grain_ms=self.grain_ms,
                free=self.device is None,
                missing_bytes=missing,
                last_device=self.last_device,
                begun=self.position % len(self.units) > 0,
            )
        return self._view


class _Slot:
    """A device: what it runs, and what it is to run next."""

    __slots__ = ("device", "next", "running")

    def __init__(self, device: Device) -> None:
        self.device = device
        self.running: _Task | None = None
        self.next: _Task | None = None


class _Game:
    def __init__(
        self,
        simulation: Simulation,
        loads: Sequence[Load],
        devices: Sequence[Device],
        policy: Policy,
        store: _Store,
        crew: Crew,
    ) -> None:
        self.simulation, self.policy, self.store, self.crew = simulation, policy, store, crew
        self.tasks = {load.name: _Task(load) for load in loads if load.steps}
        self.slots = [_Slot(device) for device in devices]
        self.steps_ms: dict[str, list[float]] = {load.name: [] for load in loads}
        self.work_ms = dict.fromkeys((load.name for load in loads), 0.0)
        self.end_ms = 0.0
        self._filling = False

    def played(self, remarks: tuple[str, ...]) -> Played:
        self.crew.begin()
        self._fill()
        self.simulation.run()
        assert not self.tasks, "a policy left jobs undone"
        return Played(
            steps_ms={name: tuple(steps) for name, steps in self.steps_ms.items()},
            makespan_ms=self.end_ms,
            timeline=self.simulation.timeline,
            events=self.simulation.events,
            busy_ms={slot.device.name: slot.device.busy_ms(0) for slot in self.slots},
            wire_bytes={},
            peak_bytes={"memory": self.store.memory.peak_bytes},
            disk_bytes=(self.store.disk.read_bytes, self.store.disk.written_bytes),
            decisions=remarks,
            work_ms={**self.work_ms, **self.crew.work_ms},
        )

    def _fill(self) -> None:
        """Give idle devices work, then let those at work choose what comes next."""
        self._filling = False
        if not self.tasks:
            self.crew.stop()
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
        needs: Needs = {}
        if name is not None:
            slot.next = self.tasks[name]
            slot.next.device = index
            needs = slot.next.unit.needs
        elif slot.running is not None:
            needs = slot.running.needs_next
        if self.store.has_room(needs, self._pinned()):  # else it comes when its unit is to begin
            self.store.bring(needs, self._pinned())

    def _view(self, index: int, slot: _Slot) -> View:
        now = None if slot.running is None else slot.running.load.name
        jobs = tuple(task.view(self.store.present) for task in self.tasks.values())
        return View(device=index, devices=len(self.slots), now=now, jobs=jobs)

    def _pinned(self, *, to_come: bool = True) -> set[Key]:
        """What units need that run, or are to run next."""
        return {
            key
            for slot in self.slots
            for task in (slot.running, slot.next if to_come else None)
            if task is not None
            for key in task.unit.needs
        }

    def _begin(self, index: int, slot: _Slot, task: _Task) -> None:
        needs = task.unit.needs
        there_ms = self.store.bring(needs, self._pinned(to_come=self.store.has_room(needs, self._pinned())))
        slot.running, slot.next = task, None
        if there_ms <= self.simulation.now_ms:
            self._run(index)
        else:
            self.simulation.at(there_ms, partial(self._run, index))

    def _run(self, index: int) -> None:
        slot = self.slots[index]
        assert slot.running is not None, "only what was begun runs"
        unit = slot.running.unit
        slot.device.run(unit.name, unit.ms * self.crew.stretch(index), partial(self._finish, index))

    def _finish(self, index: int) -> None:
        slot = self.slots[index]
        task, slot.running = slot.running, None
        assert task is not None, "only what runs ends"
        self.store.change(task.unit.needs)
        self.work_ms[task.load.name] += task.unit.ms
        task.advance(index)
        self.end_ms = self.simulation.now_ms
        if task.position % len(task.units) == 0:
            self.steps_ms[task.load.name].append(self.end_ms - task.stepped_ms)
            task.stepped_ms = self.end_ms
        if task.done:
            del self.tasks[task.load.name]
        if not self._filling:  # once all that end at this time have ended
            self._filling = True
            self.simulation.settle(self._fill)
