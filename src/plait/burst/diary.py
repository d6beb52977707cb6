"""What a rank does in a step: kept, put on a timeline, and published to whoever shares its device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from plait.burst import script
from plait.burst.phases import Phase, Publisher
from plait.timeline import Timeline

Doing = Literal["forward", "loss", "backward"]
Kind = Literal["forward", "loss", "backward", "wait", "idle", "sync"]


@dataclass(frozen=True)
class Activity:
    """One thing that this rank, or its wire, did; times in nanoseconds of this process's clock."""

    kind: Kind
    """``wait`` is for rows or gradients, ``idle`` for blocks that run elsewhere, ``sync`` is the wire's."""
    block: str
    """Empty for waits."""
    start_ns: int
    end_ns: int

    @property
    def milliseconds(self) -> float:
        """How long it took."""
        return (self.end_ns - self.start_ns) / 1e6


@dataclass
class StepRecord:
    """A step, as one rank saw it."""

    number: int
    begun_ns: int
    end_ns: int = 0
    activities: list[Activity] = field(default_factory=list)
    wire_bytes: int = 0
    """What this rank handed to the wire for it: gradients, rows, and a few figures."""

    @property
    def step_ms(self) -> float:
        """From the start of ``step`` to its end, without the optimizer."""
        return (self.end_ns - self.begun_ns) / 1e6

    def total_ms(self, kind: Kind) -> float:
        """All of one kind together."""
        return sum(each.milliseconds for each in self.activities if each.kind == kind)


class Diary:
    """The present step and the last, on one rank."""

    def __init__(self, rank: int, timeline: Timeline | None) -> None:
        self.last: StepRecord | None = None
        """The last step that has ended."""
        self.idle = False
        """Whether this rank, if it waits now, waits for blocks that run elsewhere."""
        self._rank, self._timeline = rank, timeline
        script.leave_to(self)
        self._publisher = Publisher(device=rank)
        self._now = StepRecord(0, time.perf_counter_ns())
        self._waits_since_ns = self._sent_bytes = 0

    def begin(self) -> int:
        """A step begins; its number."""
        number = self._now.number + 1
        self._publisher.begin_step(number)
        self._now = StepRecord(number, time.perf_counter_ns())
        return number

    def end(self, sent_bytes: int) -> None:
        """The step has ended, by when this rank has handed so much to the wire since its first one."""
        self._now.end_ns = time.perf_counter_ns()
        self._now.wire_bytes, self._sent_bytes = sent_bytes - self._sent_bytes, sent_bytes
        self.last = self._now

    @contextmanager
    def doing(self, what: Doing, block: str) -> Iterator[None]:
        """Note what a ``with`` block takes."""
        start_ns = time.perf_counter_ns()
        yield
        self.note(what, block, start_ns, time.perf_counter_ns())

    def idling(self, idle: bool) -> None:
        """From now on, waits are for blocks that run elsewhere, or not."""
        self.idle = idle

    def waiting(self, begins: bool) -> None:
        """A wait begins, or ends."""
        now_ns = time.perf_counter_ns()
        if begins:
            self._waits_since_ns = now_ns
            self._publisher.phase(Phase.IDLE if self.idle else Phase.COLLECTIVE)
        else:
            self.note("idle" if self.idle else "wait", "", self._waits_since_ns, now_ns)
            self._publisher.phase(Phase.COMPUTE)

    def note(self, kind: Kind, block: str, start_ns: int, end_ns: int) -> None:
        """Note something whose times are known."""
        self._now.activities.append(Activity(kind, block, start_ns, end_ns))
        if self._timeline is not None:
            track = f"wire{self._rank}" if kind == "sync" else f"device{self._rank}"
            name = f"{kind} {block}" if block else kind
            self._timeline.record(track, name, start_ns, end_ns, step=self._now.number)

    def close(self) -> None:
        """Publish no more."""
        self._publisher.close()
        script.take_back_from(self)
