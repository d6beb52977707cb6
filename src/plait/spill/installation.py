"""What jobs run on: the devices, the memory as it is divided, and the store; and jobs made ready for it.

Devices are started for the first jobs, which they describe and measure. Then the memory is divided, and the
store is opened. All that could be wrong with a job is found before a segment of it is defined.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from plait.cluster.disk import DiskSpeed, measure_disk, probe_disk
from plait.errors import FileError
from plait.job import Job
from plait.spill import units
from plait.spill.device import Device
from plait.spill.export import is_exporting
from plait.spill.footprint import MARGIN_BYTES, private_bytes
from plait.spill.intervals import Intervals
from plait.spill.makespan import Load
from plait.spill.plan import SpillPlan
from plait.spill.preparation import Known, Planner, Preparation, divide, unit_seconds
from plait.spill.record import Record
from plait.spill.room import disk_bytes
from plait.spill.segment import SHARED
from plait.spill.settings import Settings
from plait.spill.sharing import define, group_of
from plait.spill.store import Store
from plait.spill.task import Task
from plait.timeline import Timeline

_DISK_PROBE_BYTES = 64 << 20


class Installation:
    """Devices and a store; each is there when it is needed first."""

    def __init__(self, record: Record, timeline: Timeline | None) -> None:
        self._record = record
        self._timeline = timeline
        self.devices: list[Device] = []
        """Those that were started."""
        self.planner: Planner | None = None
        """Once the memory is divided."""
        self.store: Store | None = None
        self._preparation: Preparation | None = None
        self._device_bytes = 0
        """What the process of a device may hold of its own."""

    @property
    def is_started(self) -> bool:
        """Whether there are devices; their number and threads then stay."""
        return self._preparation is not None

    def learn(self, jobs: Sequence[Job], settings: Settings) -> list[Known]:
        """Describe and measure jobs, on devices that are started for the first of them."""
        if self._preparation is None:
            threads = max(job.threads for job in jobs)
            self.devices = [
                Device(i, cores=settings.cores(i), threads=threads, kind=settings.device)
                for i in range(settings.devices)
            ]
            for device in self.devices:
                device.start()
            self._preparation = Preparation(self.devices)
        return self._preparation.learn(jobs)

    def open(self, known: Sequence[Known], settings: Settings) -> None:
        """Divide the memory and open the store, for the first jobs."""
        # Each device will come to hold what the busiest of them does now: torch, and the models as chains.
        idle = max(private_bytes(device.pid) for device in self.devices)
        own = private_bytes() + settings.devices * idle
        notes = {one.job.name: note for one in known if (note := self._record.note(one.job.name))}
        planner = divide(
            known,
            {name: SpillPlan.from_json(note["plan"]) for name, note in notes.items()},
            memory_bytes=settings.memory_bytes,
            own_bytes=own + (settings.devices + 1) * MARGIN_BYTES,
            devices=settings.devices,
            cores=len(settings.cores(0)),
            disk=self._disk_speed(settings, [note["disk"] for note in notes.values() if "disk" in note]),
        )
        memory_bytes, state = planner.budget.arena_bytes, settings.state
        if settings.resume:
            self.store = Store.open(
                state, memory_bytes=memory_bytes, timeline=self._timeline, skip_damaged=True
            )
        else:
            self.store = Store.create(state, memory_bytes=memory_bytes, timeline=self._timeline)
        self.planner = planner
        self._device_bytes = idle + planner.budget.private_bytes
        for device in self.devices:
            self._map(device)

    @staticmethod
    def _disk_speed(settings: Settings, noted: Sequence[dict[str, float]]) -> DiskSpeed:
        """The disk's; where the run's own files have filled it, as it was when they were begun."""
        found = probe_disk(settings.path, most_bytes=_DISK_PROBE_BYTES)
        if found is None and noted:
            speed = noted[0]
            return DiskSpeed(
                read_bytes_per_s=speed["read_bytes_per_s"],
                write_bytes_per_s=speed["write_bytes_per_s"],
                direct=bool(speed["direct"]),
            )
        return found or measure_disk(
            settings.path, size_bytes=_DISK_PROBE_BYTES
        )  # which says what is missing

    def _map(self, device: Device) -> None:
        """Give a device the memory that it computes in: the arena, and what it has of its own."""
        assert self.store is not None, "there is an arena to map"
        device.map(self.store.arena_fd, self.store.arena_bytes)
        device.call("keep_freed", self._device_bytes)

    def revive(self, device: Device) -> None:
        """Start a device that has died."""
        device.stop()
        device.start()
        self._map(device)

    # Jobs.

    def tasks(
        self, known: Sequence[Known], settings: Settings, refuse: Callable[[Job, FileError], None]
    ) -> list[Task]:
        """Jobs as the loop knows them, from their last commits where they have one, with segments defined.

        Those whose files are damaged are refused, one by one. Nothing is defined unless the disk has room for
        all others.
        """
        assert self.store is not None, "the store is open"
        store, tasks = self.store, []
        for one in known:
            trouble = store.damaged.get(one.job.name)
            task = None if trouble else self._task(one, settings)
            if task is not None and task.shared is not None:
                trouble = store.damaged.get(task.shared)
            if trouble is not None:
                refuse(one.job, trouble)
            elif task is not None:
                tasks.append(task)
        begin = [task for task in tasks if task.end is None]
        have = {segment.key for group in store.groups() for segment in store.segments(group)}
        names = ", ".join(task.name for task in begin[:5]) + (" and others" if len(begin) > 5 else "")
        what = f"training of {names} (two copies of all state, and what a step may spill)"
        store.check_room(disk_bytes(begin, have=have), what=what)
        for task in begin:
            define(store, task.description, task.plan)
        return tasks

    def _task(self, known: Known, settings: Settings) -> Task:
        assert self.planner is not None, "the memory is divided"
        job, note = known.job, self._record.note(known.job.name)
        if note is None:
            plan, head = self.planner.plan(known), units.Head(job=job.name)
        else:
            plan, head = SpillPlan.from_json(note["plan"]), units.Head.from_json(note["head"])
            if head.stage == "done" and head.step < known.description.steps:
                head = replace(head, stage="step")
        start = settings.weights.get(job.name)
        frozen = any(not parameter.trained for parameter in known.description.parameters)
        task = Task(
            job=job,
            description=replace(known.description, shares=frozen, base=f"{known.description.base} {start}"),
            weights=start,
            plan=plan,
            head=head,
            unit_seconds=unit_seconds(known, plan),
            load=Load.planned(
                job.name,
                known.description.steps,
                Intervals.of(known.description, known.costs),
                plan,
            ),
            committed_step=head.step,
            disk=self.planner.disk,
        )
        task.shared = group_of(task)
        if is_exporting(note):  # all that is left is to write the rest of its weights
            task.state, task.end = "ended", "finished"
        return task

    # For those who watch, and at the end.

    def pids(self) -> list[int]:
        """Of the devices that live."""
        return [device.pid for device in self.devices if device.alive]

    def shared_bytes(self) -> int:
        """Of the arena, what has been touched."""
        try:
            return 0 if self.store is None else os.fstat(self.store.arena_fd).st_blocks * 512
        except OSError:  # it has just been closed
            return 0

    def close(self, settings: Settings, *, keep: bool, names: Sequence[str]) -> None:
        """Give up the store; what is committed stays where it is to be kept, or is of jobs not named."""
        if self.store is not None:
            held = {*self.store.groups(), *self.store.damaged}
            others = {group for group in held if not group.startswith(SHARED)}.difference(names)
            self.store.close(keep=keep or bool(others))
            with suppress(OSError):  # it is not empty
                settings.state.rmdir()
