"""What every job of a workload takes on every number of devices; jobs that are alike are looked at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from plait.cluster import Cluster
from plait.pipeline.search import ladder
from plait.strategy.codecs import Codecs
from plait.strategy.comparison import (
    STRATEGIES,
    Comparison,
    concluded,
    options_of,
    wanted,
    with_background,
)
from plait.strategy.demand import Demand
from plait.strategy.option import Option, StrategyName
from plait.strategy.schedule import Rates, Times
from plait.strategy.site import Site
from plait.strategy.spilled import spilled

Kind = tuple[object, ...]


class Table:
    """Options by job and number of devices: 1, 2, 3, 4, 6, 8, 12 ... and all."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        background: Sequence[Demand] = (),
        strategies: Sequence[StrategyName] = STRATEGIES,
        codecs: Codecs | None = None,
        directory: str | Path | None = None,
        process_bytes: int = 0,
    ) -> None:
        self.cluster = cluster
        self.background, self._behind = (background[0] if background else None), max(1, len(background))
        self.counts = ladder(len(cluster.devices))
        self.process_bytes = process_bytes
        self._strategies, self._codecs, self._directory = strategies, codecs, directory
        self._made: dict[tuple[Kind, int], tuple[Option, ...]] = {}

    def site(self, demand: Demand, count: int | None = None) -> Site:
        """The first devices, as a job may use them."""
        cluster = self.cluster if count is None else self.cluster.take(count)
        return Site(cluster=cluster, memory_bytes=demand.memory_bytes, process_bytes=self.process_bytes)

    def made(self, demand: Demand, count: int) -> tuple[Option, ...]:
        """Every option on exactly so many devices."""
        key = (kind_of(demand), count)
        if key not in self._made:
            names = wanted(demand, self._strategies)
            if count > 1:  # it takes one device, whatever there is
                names = tuple(name for name in names if name != "spill")
            self._made[key] = options_of(
                demand,
                self.site(demand, count),
                strategies=names,
                codecs=self._codecs,
                directory=self._directory,
                exactly=True,
            )
        return self._made[key]

    def crowd(self, demands: Sequence[Demand], at_once: int) -> None:
        """Let jobs that spill share the disk with others, so many at a time."""
        for demand in demands:
            key = (kind_of(demand), 1)
            shared = spilled(demand, self.site(demand, 1), at_once=at_once)
            self._made[key] = tuple(
                shared if option.strategy == "spill" else option for option in self.made(demand, 1)
            )

    def comparison(self, demand: Demand) -> Comparison:
        """The best of every option over all numbers of devices."""
        best: dict[str, Option] = {}
        for count in self.counts:
            for option in self.made(demand, count):
                if _quicker(option, best.get(option.name)):
                    best[option.name] = self._on_all(option)
        return concluded(
            demand,
            self.site(demand),
            list(best.values()),
            background=self.background,
            jobs=self._behind,
        )

    def _on_all(self, option: Option) -> Option:
        """With the devices that it does not use, which are idle."""
        if option.step_ms is None:
            return option
        idle_ms = {device.name: option.step_ms for device in self.cluster.devices} | dict(option.idle_ms)
        return replace(option, idle_ms=idle_ms)

    def options(self, demand: Demand) -> dict[int, Option]:
        """By number of devices the fastest option, where more devices make it faster; empty if none fits."""
        return self._rising(demand, lambda option: -option.weighed_ms)

    def roomy(self, demand: Demand) -> dict[int, Option]:
        """The same, but those that get through most with background work on what they leave idle."""
        return self._rising(demand, lambda option: option.total_samples_per_s)

    def _rising(self, demand: Demand, worth: Callable[[Option], float]) -> dict[int, Option]:
        best: Option | None = None
        found = {}
        for count in self.counts:
            for option in self._beside(demand, count):
                if best is None or worth(option) > worth(best):
                    best = found[count] = option
        return found

    def _beside(self, demand: Demand, count: int) -> list[Option]:
        """What can be had on so many devices, with what background work gets of them."""
        possible = [option for option in self.made(demand, count) if option.feasible]
        if self.background is None:
            return possible
        site = self.site(demand, count)
        return [with_background(option, self.background, site, jobs=self._behind) for option in possible]

    def times(self, demand: Demand) -> Times:
        """By number of devices, how long a job takes."""
        return {k: demand.steps * (option.step_ms or 0.0) for k, option in self.options(demand).items()}

    def rates(self, demand: Demand) -> Rates:
        """By number of devices, the samples a second that a job gets through."""
        return {k: option.samples_per_s for k, option in self.options(demand).items()}


def _quicker(option: Option, known: Option | None) -> bool:
    if known is None or not known.feasible:
        return True
    return option.step_ms is not None and option.step_ms < (known.step_ms or 0.0)


def kind_of(demand: Demand) -> Kind:
    """Jobs of one kind have the same options."""
    names = ("batch", "accumulate", "memory_bytes", "strategy", "clips")
    return (id(demand.profile), *(getattr(demand, name) for name in names))
