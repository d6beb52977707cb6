"""The smallest change that makes a job fit: more micro-batches, memory, devices, or a smaller batch.

Whether something fits is asked of the formulas that the options themselves go by; what is named was tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from plait.burst.burst_plan import BurstPlan
from plait.burst.candidates import candidates
from plait.cluster import Cluster
from plait.errors import UsageError
from plait.pipeline.planning import cut_to_fit
from plait.spill.partition import smallest
from plait.strategy.bursted import burst_bytes
from plait.strategy.data import data_bytes
from plait.strategy.demand import Demand
from plait.strategy.option import StrategyName
from plait.strategy.pipelined import MOST_STAGES, stages_worth_trying
from plait.strategy.site import Site
from plait.strategy.spilled import Tiers, spill_intervals
from plait.units import format_bytes

Setting = Literal["accumulate", "memory", "devices", "batch"]
_MOST_DEVICES = 1024
_FINE = 256
"""Memory is found to one part in so many."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing to change, and to what."""

    setting: Setting
    value: int
    """Micro-batches, bytes of each device, devices, or rows."""
    now: int
    strategy: StrategyName
    """What it lets be had."""

    @property
    def factor(self) -> float:
        """How large a change it is."""
        return max(self.value / self.now, self.now / self.value)

    @property
    def text(self) -> str:
        """In words."""
        if self.setting == "memory":
            said = f"{format_bytes(self.value)} of memory a device instead of {format_bytes(self.now)}"
        elif self.setting == "accumulate":
            said = f"{self.value} micro-batches a step instead of {self.now} (accumulate={self.value})"
        else:
            what = "devices" if self.setting == "devices" else "rows a step"
            said = f"{self.value} {what} instead of {self.now}"
        return f"{said}, with {self.strategy}"

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        names = ("setting", "value", "now", "strategy", "factor", "text")
        return {name: getattr(self, name) for name in names}


def changes(demand: Demand, site: Site, strategies: Sequence[StrategyName]) -> tuple[Change, ...]:
    """What would let a job fit, the smallest first; micro-batches before all: they change nothing else."""
    found = [change for strategy in strategies for change in _of(demand, site, strategy)]
    least: dict[Setting, Change] = {}
    for change in sorted(found, key=lambda each: each.factor):
        least.setdefault(change.setting, change)
    return tuple(sorted(least.values(), key=lambda each: (each.setting != "accumulate", each.factor)))


def fits(demand: Demand, site: Site, strategy: StrategyName) -> bool:
    """Whether a strategy's memory suffices, and its disk."""
    try:
        return _CHECKS[strategy](demand, site)
    except UsageError:
        return False


def _data(demand: Demand, site: Site) -> bool:
    counts = candidates(len(demand.profile.blocks), len(site), demand.batch)
    return any(data_bytes(demand, count) <= min(site.budgets[:count]) for count in counts)


def _burst(demand: Demand, site: Site) -> bool:
    width = min(len(site), demand.batch)
    if width < 2:
        return False
    names = [block.name for block in demand.profile.blocks]
    widest = BurstPlan.of(names, [width] * len(names), batch=demand.batch)
    held = burst_bytes(widest, demand.profile)
    return all(used <= budget for used, budget in zip(held, site.budgets, strict=False))


def _pipeline(demand: Demand, site: Site) -> bool:
    most = min(len(site), len(demand.profile.blocks), demand.batch, MOST_STAGES)
    for stages in stages_worth_trying(most):
        for count in {min(factor * stages, demand.batch) for factor in (8, 4, 2, 1)}:
            try:
                cut_to_fit(
                    demand.profile,
                    stages,
                    rows=-(-demand.batch // count),
                    micro_batches=count,
                    limits=site.budgets[:stages],
                )
            except UsageError:
                continue
            return True
    return False


def _spill(demand: Demand, site: Site) -> bool:
    tiers = Tiers.of(site.cluster, site.names[0], site.budgets[0], counted_bytes=site.process_bytes)
    of = spill_intervals(demand)
    least = smallest(of)
    if tiers.arena_bytes is None:
        enough = bool(tiers.machines(least))
    else:
        enough = least.private_bytes <= tiers.memory_bytes and least.arena_bytes <= tiers.arena_bytes
    if not enough:
        return False
    # What a plan stores depends on what it spills: at most what all blocks save and pass on to others.
    stored = 2 * (of.weights[0, -1] + of.moments[0, -1]) + (of.gradients[0, -1] if of.clips else 0)
    most = stored + of.spilled.diagonal(1).sum() + of.boundary.diagonal(1).sum()
    return bool(most <= tiers.disk.capacity_bytes)


_CHECKS: dict[StrategyName, Callable[[Demand, Site], bool]] = {
    "data": _data,
    "pipeline": _pipeline,
    "burst": _burst,
    "spill": _spill,
}


def _of(demand: Demand, site: Site, strategy: StrategyName) -> Iterator[Change]:
    """The least change of each setting that lets a strategy fit; none where something else is in its way."""
    if fits(demand, site, strategy):
        return

    def change(setting: Setting, value: int, now: int) -> Change:
        return Change(setting=setting, value=value, now=now, strategy=strategy)

    now = min(site.budgets) + site.process_bytes
    memory = _least(
        lambda size: fits(replace(demand, memory_bytes=None), _with_memory(site, size), strategy),
        now,
        1 << 50,
        fine=_FINE,
    )
    if memory is not None:
        yield change("memory", memory, now)
    if strategy in ("data", "spill"):
        most = demand.batch
        parts = _least(lambda n: fits(replace(demand, accumulate=n), site, strategy), demand.accumulate, most)
        if parts is not None:
            yield change("accumulate", parts, demand.accumulate)
    if strategy != "spill":
        count = _least(lambda n: fits(demand, _with_devices(site, n), strategy), len(site), _MOST_DEVICES)
        if count is not None:
            yield change("devices", count, len(site))
    fewer = _least(
        lambda cut: fits(_with_rows(demand, demand.batch - cut), site, strategy), 0, demand.batch - 1
    )
    if fewer is not None:
        yield change("batch", demand.batch - fewer, demand.batch)


def _least(holds: Callable[[int], bool], known: int, most: int, *, fine: int = 0) -> int | None:
    """The least number above ``known`` for which something holds, which then holds for all beyond it.

    Found by doubling the distance and then halving it; with ``fine``, to one part in so many.
    """
    low, distance = known, max(1, known)
    while True:
        high = min(known + distance, most)
        if high <= low:
            return None
        if holds(high):
            break
        low, distance = high, 2 * distance
    while high - low > max(1, high // fine if fine else 1):
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _with_rows(demand: Demand, rows: int) -> Demand:
    return replace(demand, batch=rows, accumulate=min(demand.accumulate, rows))


def _with_memory(site: Site, size: int) -> Site:
    devices = tuple(
        replace(device, memory_bytes=max(device.memory_bytes, size)) for device in site.cluster.devices
    )
    return replace(site, cluster=replace(site.cluster, devices=devices), memory_bytes=size)


def _with_devices(site: Site, count: int) -> Site:
    """So many devices like the smallest; how they are joined does not matter for what they hold."""
    memory = min(site.budgets) + site.process_bytes
    cluster = Cluster.uniform(hosts=count, memory=memory, bandwidth="1gbit")
    return replace(site, cluster=cluster, memory_bytes=None)
