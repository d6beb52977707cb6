"""What is frozen and the same for several jobs: made by the first, kept once, and only read afterwards."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from plait.spill import units
from plait.spill.description import Description
from plait.spill.plan import SpillPlan
from plait.spill.store import Store
from plait.spill.task import Task


def define(store: Store, description: Description, plan: SpillPlan) -> None:
    """Make the segments of a job known; what it shares stays as it is, if another job has made it."""
    for segment in units.segments(description, plan):
        store.define(segment, constant=units.is_constant(segment.key))


def group_of(task: Task) -> str | None:
    """The group of what a task shares with others, if it does."""
    if not task.description.shares:
        return None
    groups = {segment.group for segment in units.segments(task.description, task.plan)}
    return next(iter(groups - {task.name}), None)


class Sharing:
    """Who makes what is shared; for the loop's thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._makers: dict[str, Task] = {}

    def allows(self, task: Task) -> bool:
        """Whether a task can go on: nobody else is about to make what it shares."""
        group = task.shared
        return group is None or self._makers.get(group, task) is task

    def begin(self, task: Task) -> None:
        """A task creates its weights; it makes what it shares, unless that is there."""
        if task.shared is None or task.head.stage != "create" or self._makers.get(task.shared) is task:
            return
        if self._store.committed(task.shared) is not None:
            task.head = replace(task.head, frozen=True)
        else:
            self._makers[task.shared] = task
            define(self._store, task.description, task.plan)

    def commit(self, task: Task, done: Callable[[Future[None]], None]) -> bool:
        """Commit what a task has made to share; False where there is nothing to."""
        group = task.shared
        if group is None or task.head.stage == "create" or self._makers.get(group) is not task:
            return False
        self._store.commit(group, {}).add_done_callback(done)
        return True

    def made(self, task: Task) -> None:
        """What a task has made is there for all."""
        if task.shared is not None:
            self._makers.pop(task.shared, None)

    def abandon(self, task: Task) -> None:
        """A task ends or goes back; what it was making to share is left to another."""
        if task.shared is not None and self._makers.get(task.shared) is task:
            del self._makers[task.shared]
            self._store.revert(task.shared)
