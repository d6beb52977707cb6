"""Background jobs in what foreground jobs leave of their devices: pure arithmetic over intervals.

Of each device it is known what share of it is free, and how much memory, from when to when. A background job
stays on one device, takes what is free there while its memory suffices, and rests otherwise. After the last
interval a device is all its own.

    device 0  | A, 30% free      | free           B gets 0.3 x 100 ms here, and the rest after 100 ms
              0                 100
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class Hole:
    """What is free of a device for a while."""

    start_ms: float
    end_ms: float
    share: float
    """Of the device's time."""
    memory_bytes: float
    """Beside what is there."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A background job on one device."""

    name: str
    work_ms: float
    """Of a device that does nothing else."""
    memory_bytes: float


@dataclass(frozen=True, kw_only=True)
class Filled:
    """Where a background job runs."""

    name: str
    device: int
    start_ms: float
    end_ms: float


def filled(holes: Sequence[Sequence[Hole]], works: Sequence[Work]) -> list[Filled]:
    """Give each job, the longest first, the device on which it ends first; what fits nowhere is left out.

    ``holes`` are those of each device, in order and without gaps; the last goes on forever.
    """
    left = [list(its) for its in holes]
    found = []
    for work in sorted(works, key=lambda each: (-each.work_ms, each.name)):
        ends = [_end_ms(its, work) for its in left]
        device = min(range(len(left)), key=lambda place: ends[place])
        if ends[device] == math.inf:
            continue
        end_ms = ends[device]
        start_ms = next(hole.start_ms for hole in left[device] if _helps(hole, work))
        left[device] = _taken(left[device], work, end_ms)
        found.append(Filled(name=work.name, device=device, start_ms=start_ms, end_ms=end_ms))
    return found


def done_ms(holes: Sequence[Hole], one: Filled, memory_bytes: float, until_ms: float) -> float:
    """The work that a job that runs there has done until a moment, if it is alone in these holes."""
    return sum(
        hole.share * max(0.0, min(hole.end_ms, one.end_ms, until_ms) - max(hole.start_ms, one.start_ms))
        for hole in holes
        if hole.memory_bytes >= memory_bytes
    )


def _helps(hole: Hole, work: Work) -> bool:
    return hole.share > 0 and hole.memory_bytes >= work.memory_bytes and hole.end_ms > hole.start_ms


def _end_ms(holes: Sequence[Hole], work: Work) -> float:
    left_ms = work.work_ms
    for hole in holes:
        if not _helps(hole, work):
            continue
        gets_ms = hole.share * (hole.end_ms - hole.start_ms)
        if gets_ms >= left_ms:
            return hole.start_ms + left_ms / hole.share
        left_ms -= gets_ms
    return math.inf


def _taken(holes: Sequence[Hole], work: Work, end_ms: float) -> list[Hole]:
    """What is left of a device's holes while and after a job uses them."""
    found = []
    for hole in holes:
        if not _helps(hole, work) or hole.start_ms >= end_ms:
            found.append(hole)
            continue
        found.append(replace(hole, end_ms=min(hole.end_ms, end_ms), share=0.0))
        if hole.end_ms > end_ms:
            found.append(replace(hole, start_ms=end_ms))
    return found


def gapless(holes: Sequence[Hole], memory_bytes: float) -> list[Hole]:
    """With a wholly free hole wherever there is none, before, between and after."""
    known = sorted(holes, key=lambda hole: hole.start_ms)
    marks = [
        Hole(start_ms=0.0, end_ms=0.0, share=0.0, memory_bytes=memory_bytes),
        *known,
        Hole(start_ms=math.inf, end_ms=math.inf, share=0.0, memory_bytes=memory_bytes),
    ]
    found = []
    for one, other in pairwise(marks):
        if one.end_ms > one.start_ms:
            found.append(one)
        if other.start_ms > one.end_ms:
            free = Hole(start_ms=one.end_ms, end_ms=other.start_ms, share=1.0, memory_bytes=memory_bytes)
            found.append(free)
    return found
