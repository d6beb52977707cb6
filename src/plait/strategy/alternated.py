"""Many jobs that take turns on the devices of one host, shard by shard: what :mod:`plait.spill` would do.

Each is cut into shards for its share of memory, and the whole is played by :mod:`plait.spill.makespan` with
the policy of a run. Of very long jobs about an equal part of each is played, one step at least, and stands
for the rest of its job.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plait.spill.makespan import Disk, Load, Played, lower_bound_ms, play
from plait.spill.plan import SpillPlan
from plait.spill.policies import Sticky
from plait.strategy.demand import Demand
from plait.strategy.option import Option
from plait.strategy.site import Site
from plait.strategy.spilled import Tiers, spill_intervals, spilled

_MOST_UNITS = 8_000
"""That are played."""


@dataclass(frozen=True, kw_only=True)
class Alternated:
    """Jobs that take turns."""

    options: tuple[Option, ...]
    """By job, what it would be alone with its share."""
    makespan_ms: float
    lower_bound_ms: float
    ends_ms: tuple[float, ...]
    """By job."""
    devices: tuple[int, ...]
    played_share: float
    """Of the computing, what was played; 1 is all of it."""


def alternated(demands: Sequence[Demand], site: Site, devices: Sequence[int]) -> Alternated | None:
    """Jobs on devices of one host; None where one of them cannot be had. Tiers must be known."""
    at_once = min(len(devices), len(demands))
    known: dict[object, Option] = {}
    for demand in demands:
        if _alike(demand) not in known:
            known[_alike(demand)] = spilled(demand, site, device=devices[0], at_once=at_once)
    options = [known[_alike(demand)] for demand in demands]
    if not all(option.feasible for option in options):
        return None
    plans = [option.plan for option in options]
    loads = [
        Load.planned(demand.name, demand.steps, spill_intervals(demand.slower(site.speeds[devices[0]])), plan)
        for demand, plan in zip(demands, plans, strict=True)
        if isinstance(plan, SpillPlan)
    ]
    units = sum(load.steps * len(load.units) for load in loads)
    share = min(1.0, _MOST_UNITS / units)
    short = [
        Load(name=load.name, steps=max(1, math.ceil(share * load.steps)), shards=load.shards)
        for load in loads
    ]
    tiers = Tiers.of(site.cluster, site.names[devices[0]], site.budgets[devices[0]])
    assert tiers.disk.read_bytes_per_s is not None, "checked when it was made"
    assert tiers.disk.write_bytes_per_s is not None, "checked when it was made"
    arena = max(plan.arena_bytes for plan in plans if isinstance(plan, SpillPlan))
    played = play(
        short,
        len(devices),
        Sticky(),
        Disk(
            memory_bytes=float(arena * at_once),
            read_bytes_per_s=tiers.disk.read_bytes_per_s,
            write_bytes_per_s=tiers.disk.write_bytes_per_s,
        ),
    )
    bound_ms = lower_bound_ms(loads, len(devices))
    ends_ms = _ends_ms(played, loads, short, bound_ms)
    return Alternated(
        options=tuple(options),
        makespan_ms=max(ends_ms),
        lower_bound_ms=bound_ms,
        ends_ms=ends_ms,
        devices=tuple(devices),
        played_share=sum(load.work_ms for load in short) / sum(load.work_ms for load in loads),
    )


def _alike(demand: Demand) -> object:
    return id(demand.profile), demand.batch, demand.accumulate, demand.clips


def _ends_ms(
    played: Played, loads: Sequence[Load], short: Sequence[Load], bound_ms: float
) -> tuple[float, ...]:
    """When jobs end of which some steps were played: each is as much later as it has more steps.

    Where shares had to be rounded to whole steps, jobs that stand in each other's way longer than was played
    may come out below the bound; then all end later.
    """
    ends_ms = [
        load.steps / part.steps * _end_ms(played, load.name) for load, part in zip(loads, short, strict=True)
    ]
    late = max(1.0, bound_ms / max(ends_ms)) if max(ends_ms) else 1.0
    return tuple(late * end_ms for end_ms in ends_ms)


def _end_ms(played: Played, job: str) -> float:
    return max(
        (
            span.end_ms
            for span in played.timeline.spans
            if span.track.startswith("device") and span.name.rsplit(" ", 2)[0] == job
        ),
        default=0.0,
    )
