"""What can be seen of jobs, devices and memory: which job a device takes next, and what the store is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from plait.spill.policies import JobView, Policy, Sticky, View
from plait.spill.segment import Request
from plait.spill.sharing import Sharing
from plait.spill.slot import Slot
from plait.spill.store import Store
from plait.spill.task import Task

_SOON = 2
"""Units of a job that may have to wait for others, of which the store is told in advance."""


class Outlook:
    """The alternator's view of things, in the form in which policies and the store want it."""

    def __init__(
        self,
        *,
        store: Store,
        slots: Sequence[Slot],
        tasks: Mapping[str, Task],
        sharing: Sharing,
        policy: Policy,
        private_bytes: int,
    ) -> None:
        self._store = store
        self._slots = slots
        self._tasks = tasks
        self._sharing = sharing
        self._policy = policy
        self._stays = isinstance(policy, Sticky)
        self._private_bytes = private_bytes
        self._expected: list[tuple[Request, ...]] = []

    def choose(self, slot: Slot) -> Task | None:
        """What a device is to do next; None leaves it, or waits for what it does now."""
        now = None if slot.running is None else slot.running.task
        if now is not None and now.updates_next:
            return None  # its gradients wait in the device's memory for the update
        live = [task for task in self._tasks.values() if task.state != "ended"]
        for task in live:
            if task.tied == slot.index and task.unit is not None and task.unit.phase == "update":
                return task if task.state == "waiting" else None
        view = View(
            device=slot.index,
            devices=len(self._slots),
            jobs=tuple(self._seen(slot, task) for task in live),
            now=None if now is None else now.name,
        )
        name = self._policy.choose(view)
        return None if name is None else self._tasks[name]

    def _seen(self, slot: Slot, task: Task) -> JobView:
        """A task as the policy sees it."""
        free = self._may_run(slot, task)
        return JobView(
            name=task.name,
            remaining_ms=1e3 * task.remaining_seconds,
            unit_ms=1e3 * task.next_seconds,
            grain_ms=1e3 * task.longest_seconds,
            free=free,
            missing_bytes=self._store.missing_bytes(task.requests()) if free else 0,
            last_device=task.last_device,
            begun=not task.rests,
        )

    def _may_run(self, slot: Slot, task: Task) -> bool:
        return (
            task.state == "waiting"
            and not task.stays
            and task.tied in (None, slot.index)
            and self._sharing.allows(task)
            and self._fits(slot, task)
        )

    def _fits(self, slot: Slot, task: Task) -> bool:
        """Whether a device's own memory holds what the task needs beside what others have left there."""
        kept = sum(
            other.plan.forecast.kept_bytes
            for other in self._tasks.values()
            if other is not task and slot.index in (other.tied, self._device_of(other))
        )
        return kept == 0 or kept + task.plan.forecast.private_peak_bytes <= self._private_bytes

    def expect(self) -> None:
        """Tell the store what comes: of what runs and is next first, one unit of each job in turn."""
        begun = [turn.task for slot in self._slots for turn in (slot.running, slot.next) if turn is not None]
        rest = [task for task in self._tasks.values() if task.state == "waiting" and not task.stays]
        rest.sort(key=lambda task: -task.remaining_seconds)
        ahead = [task.upcoming()[: None if self._stays else _SOON] for task in begun]
        order = [unit for turn in zip_longest(*ahead) for unit in turn if unit is not None]
        soon = [task.upcoming()[:_SOON] for task in rest]
        order += [unit for turn in zip_longest(*soon) for unit in turn if unit is not None]
        if order != self._expected:
            self._expected = order
            self._store.expect(order)

    def _device_of(self, task: Task) -> int | None:
        """The device that computes for a task now."""
        for slot in self._slots:
            if slot.running is not None and slot.running.task is task:
                return slot.index
        return None
