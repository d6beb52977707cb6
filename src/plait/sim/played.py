"""What came of playing a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.errors import UsageError
from plait.timeline import Timeline

FORMAT = "plait.played/1"


@dataclass(frozen=True, kw_only=True)
class Played:
    """Times in milliseconds, sizes in bytes."""

    steps_ms: Mapping[str, tuple[float, ...]]
    """By job: the length of each of its steps."""
    makespan_ms: float
    timeline: Timeline
    events: int
    busy_ms: Mapping[str, float] = field(default_factory=dict)
    """By device: its computing and packing, and what background work it did; but not in ``play_spill``, which
    counts its jobs alone."""
    wire_bytes: Mapping[str, float] = field(default_factory=dict)
    """By host: what it sent to others."""
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    """By memory: the most that it held."""
    disk_bytes: tuple[int, int] = (0, 0)
    """Read and written."""
    decisions: tuple[str, ...] = ()
    """What was decided on the way, and what there is to say about it."""
    work_ms: Mapping[str, float] = field(default_factory=dict)
    """By job: device time that it got done at full speed; for background work, its progress."""

    def step_ms(self, job: str | None = None) -> float:
        """The mean step of a job (the first, unless said), without its first step where there are more."""
        name = next(iter(self.steps_ms), "") if job is None else job
        steps = self.steps_ms.get(name, ())
        if not steps:
            raise UsageError(
                f"job {name!r} has made no step",
                setting="job",
                works=", ".join(self.steps_ms) or "no job has",
            )
        kept = steps[1:] or steps
        return math.fsum(kept) / len(kept)

    def utilisation(self, device: str) -> float:
        """The share of the makespan for which a device was busy (see ``busy_ms``), 0 to 1."""
        return self.busy_ms[device] / self.makespan_ms if self.makespan_ms else 0.0

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data, format ``plait.played/1``."""
        return {
            "format": FORMAT,
            "steps_ms": {job: list(steps) for job, steps in self.steps_ms.items()},
            "makespan_ms": self.makespan_ms,
            "events": self.events,
            "busy_ms": dict(self.busy_ms),
            "wire_bytes": dict(self.wire_bytes),
            "peak_bytes": dict(self.peak_bytes),
            "disk_bytes": {"read": self.disk_bytes[0], "written": self.disk_bytes[1]},
            "decisions": list(self.decisions),
            "work_ms": dict(self.work_ms),
            "timeline": self.timeline.to_json(),
        }
