"""Whether a task that failed is tried again, and when; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plait.units import counted

Cause = Literal["raised", "disk", "killed", "lost", "stalled"]
"""``disk``: a file could not be read or written, which may pass."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How an attempt ended."""

    cause: Cause
    text: str
    """What is said to the user."""
    began: int | None = None
    """The step from which the attempt went on; None if it made none."""
    reached: int | None = None
    """The last step that it told of."""
    final: bool = False
    """Whether it would end so again, whatever is done."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What becomes of the task: tried again after some seconds, or given up, and why."""

    again_s: float | None
    why: str


class Retries:
    """The attempts at one task. Only those count in which no checkpoint was gained."""

    def __init__(self, limit: int, *, first_s: float = 1.0, most_s: float = 60.0) -> None:
        self.count = 0
        """Restarts so far, over all."""
        self._limit, self._first_s, self._most_s = limit, first_s, most_s
        self._fruitless = 0
        self._last: Failure | None = None

    def after(self, failure: Failure) -> Verdict:
        """What becomes of the task after a failure."""
        last, self._last = self._last, failure
        if failure.final:
            return Verdict(again_s=None, why="it would end so again")
        if last is not None and _gained(last, failure):
            self._fruitless = 0
        same = last is not None and (last.cause, last.text, last.reached) == (
            "raised",
            failure.text,
            failure.reached,
        )
        if same and failure.cause == "raised":
            return Verdict(again_s=None, why="it ended twice so, at the same step")
        if self._fruitless >= self._limit:
            return Verdict(
                again_s=None, why=f"{counted(self._limit, 'restart')} in a row gained no checkpoint"
            )
        wait_s = min(self._most_s, self._first_s * 2**self._fruitless)
        self._fruitless += 1
        self.count += 1
        return Verdict(again_s=wait_s, why=f"restart {self.count}, in {wait_s:g} s")


def _gained(last: Failure, now: Failure) -> bool:
    """Whether the attempt before had left a checkpoint that this one could go on from."""
    return now.began is not None and now.began > (last.began or 0)
