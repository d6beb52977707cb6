"""Many jobs on one cluster: who runs where and when, what that takes, and what nothing could beat.

Four ways are looked at:

- **side by side**: each foreground job on as many devices as the schedule gives it, in the option that is
  fastest there (:mod:`plait.strategy.schedule`); where that lets no two run at the same time, it is called
  what it is: one after another, or alone;
- **one after another**: each on the whole cluster, in the option that is fastest there;
- **alternated**: all of them in shards that take turns on the devices of a host
  (:mod:`plait.strategy.alternated`);
- **alternated and side by side**: those that fit no other way alternate on some devices, the others have the
  rest.

Background jobs then get what is idle (:mod:`plait.strategy.holes`). By ``makespan`` the way is taken whose
last foreground job ends first; by ``throughput`` the one that gets through most samples a second at its
start, background work included, where each job is as wide as makes that most.

Devices are taken to be alike: the times on k devices are those on the first k of the cluster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from plait.cluster import Cluster
from plait.strategy.comparison import Comparison
from plait.strategy.option import Option
from plait.timeline import Span, Timeline

FORMAT = "plait.workload/1"

Objective = Literal["makespan", "throughput"]
How = Literal["foreground", "background", "alternated"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A job on devices, from when to when."""

    job: str
    how: How
    option: Option
    devices: tuple[str, ...]
    start_ms: float
    end_ms: float
    done: float = 1.0
    """Of a background job, the share of its steps that is done when the last foreground job ends."""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "job": self.job,
            "how": self.how,
            "option": self.option.name,
            "strategy": self.option.strategy,
            "bits": self.option.bits,
            "step_ms": self.option.step_ms,
            "wire_bytes": self.option.wire_bytes,
            "devices": list(self.devices),
            "start_ms": self.start_ms,
            "end_ms": self.end_ms,
            "done": self.done,
            "plan": None if self.option.plan is None else self.option.plan.to_json(),
        }


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to run all jobs."""

    name: str
    placements: tuple[Placement, ...]
    makespan_ms: float
    """When the last foreground job ends."""
    samples_per_s: float
    """What all jobs get through at the start, background work included."""

    @cached_property
    def timeline(self) -> Timeline:
        """Devices as tracks, jobs as spans; background work on tracks of its own."""
        spans = []
        for placement in self.placements:
            for device in placement.devices:
                track = f"{device} (background)" if placement.how == "background" else device
                name = f"{placement.job}: {placement.option.name}"
                if placement.how == "alternated":
                    track, name = f"{device} ({placement.job})", f"{placement.job}: alternated"
                spans.append(Span(track, name, placement.start_ms, placement.end_ms))
        return Timeline.of(spans)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "name": self.name,
            "makespan_ms": self.makespan_ms,
            "samples_per_s": self.samples_per_s,
            "placements": [placement.to_json() for placement in self.placements],
        }


@dataclass(frozen=True, kw_only=True)
class WorkloadPlan:
    """What to run where, and why."""

    cluster: Cluster
    objective: Objective
    ways: tuple[Way, ...]
    """All that were looked at, the one to take first; none where no job fits."""
    comparisons: Mapping[str, Comparison]
    """By job, its options on the whole cluster."""
    bound_ms: float
    """No way to run the foreground jobs ends sooner, by the times of their options."""
    bound_samples_per_s: float
    """No assignment of devices gets through more, by the rates of their options."""
    why: str
    """One sentence, with the numbers."""
    unplaced: tuple[str, ...] = ()
    """Jobs that fit nowhere; their comparisons say what would let them."""
    remarks: tuple[str, ...] = field(default=())

    @property
    def chosen(self) -> Way | None:
        """The way to take."""
        return self.ways[0] if self.ways else None

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Who runs where and when."""
        return self.ways[0].placements if self.ways else ()

    @property
    def makespan_ms(self) -> float:
        """When the last foreground job ends; infinite where none can be placed."""
        return self.ways[0].makespan_ms if self.ways else math.inf

    @property
    def samples_per_s(self) -> float:
        """What all jobs get through at the start."""
        return self.ways[0].samples_per_s if self.ways else 0.0

    @property
    def timeline(self) -> Timeline:
        """That of the way to take: devices as tracks, jobs as spans."""
        return self.ways[0].timeline if self.ways else Timeline.of([])

    def placement(self, job: str) -> Placement:
        """That of a job."""
        return next(placement for placement in self.placements if placement.job == job)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        return {
            "format": FORMAT,
            "objective": self.objective,
            "devices": [device.name for device in self.cluster.devices],
            "why": self.why,
            "makespan_ms": self.makespan_ms if self.ways else None,
            "bound_ms": self.bound_ms,
            "samples_per_s": self.samples_per_s,
            "bound_samples_per_s": self.bound_samples_per_s,
            "ways": [way.to_json() for way in self.ways],
            "unplaced": list(self.unplaced),
            "jobs": {name: made.to_json() for name, made in self.comparisons.items()},
            "remarks": list(self.remarks),
        }
