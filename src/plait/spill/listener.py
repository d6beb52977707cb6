"""Who hears of what happens to jobs while they take turns."""

from __future__ import annotations

from typing import Protocol

from plait.spill.selection import Decision
from plait.spill.task import Task


class Listener(Protocol):
    """Who is told what happens, in the loop's thread."""

    def moved(self, task: Task, where: str) -> None:
        """A unit of the task begins or is done."""

    def stepped(self, task: Task) -> Decision:
        """The task is between two steps: what is to become of it."""

    def ended(self, task: Task) -> None:
        """The task has ended; what it has come to is committed, if it is finished or interrupted."""

    def noted(self, text: str) -> None:
        """Something happened that a user should know."""
