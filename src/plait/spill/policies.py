"""Which job a device takes next: pure choices from what can be seen, the same in a run and in a simulation.

`ShardedLRTF` is Hydra's policy (K. Nagrecha and A. Kumar, "Hydra: a system for large multi-model deep
learning", arXiv 2110.08633): jobs are cut into units, a job runs one unit at a time, and a device that has
room takes the next unit of the job with the longest remaining time among those that do not run. That keeps
jobs even, so that no long one is left over at the end. It also changes the job with every unit, whatever
lies in memory.

`Sticky` is ours. Keeping jobs even matters only as far as no job becomes *critical*: with R the remaining
time of all jobs together and m devices, all can end after R / m as long as none has more than that left for
itself. So

1. a job that has almost R / m left goes first, the longest before others, as Hydra has it;
2. otherwise a device stays with its job, whose next unit is read while the present one computes;
3. otherwise it takes the job whose next unit lies in memory, or lacks least; of equals, one that it ran
   before, one that is in the middle of a step, and the longest;
4. of every job a *reserve* is left for the end, when all take turns as Hydra has it: many small units even
   out what a few large ones cannot. A *crumb* is not: where the device has come as far as that with a job
   (others did not fit beside it), so little evens out nothing, and its segments would have to come back.

Unlike Hydra, a device that computes may also decide to go on with the same job, and does not choose until
then. "Almost" is two units of the job, for a decision comes too late by the unit under way at most, and
another may just have begun; the reserve is two of the longest units of all, and a crumb a quarter of the
job's own longest.

| Hydra | here |
| --- | --- |
| model, shard unit | job, unit |
| remaining time of a model | ``JobView.remaining_ms`` |
| idle models | jobs that are ``free`` |
| double buffering: the next shard comes in | ``View.now``: a device chooses while it computes |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

PolicyName = Literal["sticky", "lrtf"]

_MARGIN_UNITS = 2
_RESERVE_UNITS = 2
_CRUMB_UNITS = 0.25


@dataclass(frozen=True, kw_only=True)
class JobView:
    """A job with work left, as a device that chooses sees it."""

    name: str
    remaining_ms: float
    """Computing that is left of it, what is under way included."""
    unit_ms: float = 0.0
    """Its next unit, or the one under way."""
    grain_ms: float = 0.0
    """Its longest unit."""
    free: bool = True
    """Whether this device may take its next unit now: it runs nowhere, is tied to no other, and fits."""
    missing_bytes: int = 0
    """What its next unit would have to read from disk first."""
    last_device: int | None = None
    """Who ran its last unit."""
    begun: bool = False
    """In the middle of a step: boundary values and kept activations take room until it ends."""

    @property
    def after(self) -> JobView:
        """As it will be after the unit under way, for all that is known now."""
        return replace(self, remaining_ms=self.remaining_ms - self.unit_ms)


@dataclass(frozen=True, kw_only=True)
class View:
    """What a device sees when it chooses."""

    device: int
    devices: int
    jobs: tuple[JobView, ...]
    """All jobs with work left, those that run included."""
    now: str | None = None
    """The job that the device computes at present, if it does; it may then leave the choice for later."""


class Policy(Protocol):
    """A choice of jobs; has no state."""

    def choose(self, view: View) -> str | None:
        """The job whose next unit the device is to take; None: none, or (while it computes) not yet."""


class ShardedLRTF:
    """The longest remaining time first, unit by unit."""

    def choose(self, view: View) -> str | None:
        """The longest of the free jobs."""
        return _longest([job for job in view.jobs if job.free])


class Sticky:
    """Stays with a job for as long as no other becomes critical, and leaves some of each for the end."""

    def choose(self, view: View) -> str | None:
        """A critical job, or the one that has most of what it needs in memory."""
        now = [job.after for job in view.jobs if job.name == view.now and job.remaining_ms > job.unit_ms]
        could = now + [job for job in view.jobs if job.free]
        grain_ms = max((job.grain_ms for job in view.jobs), default=0.0)
        share_ms = sum(job.remaining_ms for job in view.jobs) / view.devices
        critical = [job for job in could if job.remaining_ms + _MARGIN_UNITS * job.grain_ms >= share_ms]
        crumbs = [job for job in (could if view.now is None else now) if _is_crumb(view, job)]
        early = [job for job in could if job.remaining_ms > _RESERVE_UNITS * grain_ms]
        if critical or not (crumbs or early):
            chosen = _longest(critical or could)
        else:
            chosen = min(crumbs or early, key=lambda job: _distance(view, job)).name
        return None if chosen == view.now else chosen


def _is_crumb(view: View, job: JobView) -> bool:
    """Whether next to nothing is left of a job that the device has worked for."""
    return job.last_device == view.device and 0 < job.remaining_ms <= _CRUMB_UNITS * job.grain_ms


def _distance(view: View, job: JobView) -> tuple[bool, int, bool, bool, float, str]:
    """How far a job is from going on at once, by rules 2 and 3; in the end by name, so that all agree."""
    return (
        job.name != view.now,
        job.missing_bytes,
        job.last_device != view.device,
        not job.begun,
        -job.remaining_ms,
        job.name,
    )


def _longest(jobs: list[JobView]) -> str | None:
    """The one with the longest remaining time; of equals, the first by name."""
    found = min(jobs, key=lambda job: (-job.remaining_ms, job.name), default=None)
    return None if found is None else found.name


def policy(name: PolicyName) -> Policy:
    """A policy by its name."""
    return Sticky() if name == "sticky" else ShardedLRTF()
