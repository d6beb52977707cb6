"""The ways to run a workload, each with its placements: see :mod:`plait.strategy.workload`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from plait.errors import UsageError
from plait.strategy.alternated import Alternated, alternated
from plait.strategy.comparison import room_beside
from plait.strategy.data import plain
from plait.strategy.demand import Demand
from plait.strategy.holes import Filled, Hole, Work, done_ms, filled, gapless
from plait.strategy.option import Option
from plait.strategy.schedule import Run, in_order, in_waves, lower_bound_ms, shortest, upper_bound_rate
from plait.strategy.site import Site
from plait.strategy.table import Table
from plait.strategy.workload import Placement, Way

_TOGETHER = "side by side"


class Ways:
    """Makes the ways for jobs that each fit somehow."""

    def __init__(self, table: Table, foreground: Sequence[Demand], background: Sequence[Demand]) -> None:
        self.table, self.foreground, self.background = table, foreground, background
        self.names = [device.name for device in table.cluster.devices]
        self.spilling = [demand for demand in foreground if only_spills(table, demand)]
        self.remarks: list[str] = []

    def every(self) -> list[Way]:
        """All of them; where background jobs are, each with these in what it leaves."""
        found: dict[str, Way] = {}
        for given, placements in self._all() if self.foreground else ():
            name = _said(given, placements)
            if name not in found:  # what comes first is the best of its name
                found[name] = self._finished(name, placements)
        return list(found.values())

    def bound_ms(self) -> float:
        """No way ends sooner. A job that takes turns with others may compute while their shards are read."""
        times = []
        for demand in self.foreground:
            its = dict(self.table.times(demand))
            first = self.table.options(demand).get(1)
            if first is not None and first.strategy == "spill":
                its[1] = demand.steps * first.parts_ms["compute"]
            times.append(its)
        return lower_bound_ms(times, len(self.names))

    def bound_rate(self) -> float:
        """No assignment gets through more: foreground jobs without any loss, background ones beside them."""
        rates = []
        for demand in self.foreground:
            its = dict(self.table.rates(demand))
            first = self.table.options(demand).get(1)
            if first is not None and first.strategy == "spill" and first.parts_ms["compute"]:
                its[1] = 1e3 * demand.batch / first.parts_ms["compute"]
            rates.append(its)
        beside = sum(1e3 * demand.batch / demand.alone_ms for demand in self.background if demand.alone_ms)
        return upper_bound_rate(rates, len(self.names)) + beside

    def _all(self) -> Iterator[tuple[str, list[Placement]]]:
        devices = len(self.names)
        jobs = self.foreground
        times = [self.table.times(demand) for demand in jobs]
        yield _TOGETHER, self._placed(shortest(times, devices), self.table.options)
        if len(jobs) > 1:
            widths = [min(its, key=lambda k: (its[k], k)) for its in times]
            runs, now_ms = [], 0.0
            for job, width in enumerate(widths):
                (run,) = in_order([times[job]], [width], [0], devices)
                runs.append(Run(job, run.devices, now_ms, now_ms + run.end_ms))
                now_ms += run.end_ms
            yield "one after another", self._placed(runs, self.table.options)
        rates = [self.table.rates(demand) for demand in jobs]
        runs = in_waves(times, rates, devices)
        yield f"{_TOGETHER}, by rate", self._placed(runs, self.table.options)
        if self.background:
            roomy = [self.table.roomy(demand) for demand in jobs]
            times = [
                {k: demand.steps * (option.step_ms or 0.0) for k, option in its.items()}
                for demand, its in zip(jobs, roomy, strict=True)
            ]
            rates = [{k: option.total_samples_per_s for k, option in its.items()} for its in roomy]
            runs = in_waves(times, rates, devices)
            yield f"{_TOGETHER}, with room for background work", self._placed(runs, self.table.roomy)
        if len(jobs) > 1:
            yield from self._alternating()

    def _placed(self, runs: Sequence[Run], options: Callable[[Demand], dict[int, Option]]) -> list[Placement]:
        found = []
        for run in runs:
            demand = self.foreground[run.job]
            found.append(
                Placement(
                    job=demand.name,
                    how="foreground",
                    option=options(demand)[len(run.devices)],
                    devices=tuple(self.names[device] for device in run.devices),
                    start_ms=run.start_ms,
                    end_ms=run.end_ms,
                )
            )
        return found

    # --- alternated -----------------------------------------------------------------------------------

    def _alternating(self) -> Iterator[tuple[str, list[Placement]]]:
        host = self._largest_host()
        every = self._alternated(self.foreground, host)
        if every is not None:
            yield "alternated", self._turns(self.foreground, every)
        others = [demand for demand in self.foreground if demand not in self.spilling]
        if not self.spilling or not others:
            return
        for count in range(1, len(host) + 1):
            rest = [device for device in range(len(self.names)) if device not in host[:count]]
            turns = self._alternated(self.spilling, host[:count]) if rest else None
            times = [self.table.times(demand) for demand in others]
            if turns is None or any(min(its) > len(rest) for its in times):
                continue
            runs = [
                run._replace(
                    job=self.foreground.index(others[run.job]),
                    devices=tuple(rest[device] for device in run.devices),
                )
                for run in shortest(times, len(rest))
            ]
            placements = self._placed(runs, self.table.options)
            name = f"alternated on {count}, {_TOGETHER} on {len(rest)}"
            yield name, [*self._turns(self.spilling, turns), *placements]

    def _largest_host(self) -> list[int]:
        hosts: dict[str, list[int]] = {}
        for place, device in enumerate(self.table.cluster.devices):
            hosts.setdefault(device.host, []).append(place)
        return max(hosts.values(), key=len)

    def _alternated(self, demands: Sequence[Demand], devices: Sequence[int]) -> Alternated | None:
        if any(demand.strategy not in ("auto", "spill") for demand in demands):
            return None
        limits = [demand.memory_bytes for demand in demands if demand.memory_bytes is not None]
        site = replace(self.table.site(demands[0]), memory_bytes=min(limits, default=None))
        try:
            found = alternated(demands, site, devices)
        except UsageError as error:  # what lies below the devices is not known
            said = f"jobs were not alternated: {error.what}"
            self.remarks += [] if said in self.remarks else [said]
            return None
        if found is not None and found.played_share < 1:
            said = f"of alternated jobs {100 * found.played_share:.2g}% of the steps were played"
            self.remarks += [] if said in self.remarks else [said]
        return found

    def _turns(self, demands: Sequence[Demand], turns: Alternated) -> list[Placement]:
        devices = tuple(self.names[device] for device in turns.devices)
        return [
            Placement(
                job=demand.name, how="alternated", option=option, devices=devices, start_ms=0.0, end_ms=end_ms
            )
            for demand, option, end_ms in zip(demands, turns.options, turns.ends_ms, strict=True)
        ]

    # --- background, and the figures of a way ---------------------------------------------------------

    def _finished(self, name: str, placements: list[Placement]) -> Way:
        makespan_ms = max(placement.end_ms for placement in placements)
        rate = sum(self._rate(placement, placements) for placement in placements if placement.start_ms == 0)
        holes = self._holes(placements)
        demands = {demand.name: demand for demand in self.background}
        works = [
            Work(name=demand.name, work_ms=demand.steps * demand.alone_ms, memory_bytes=demand.alone_bytes)
            for demand in self.background
            if demand.alone_bytes <= room(demand, self.table)
        ]
        for one in filled(holes, works):
            demand = demands[one.name]
            placements.append(self._beside(demand, one, holes, makespan_ms))
            now = next(hole for hole in holes[one.device] if hole.end_ms > one.start_ms)
            if one.start_ms == 0 and demand.alone_ms:
                rate += now.share * 1e3 * demand.batch / demand.alone_ms
        return Way(name=name, placements=tuple(placements), makespan_ms=makespan_ms, samples_per_s=rate)

    def _beside(
        self, demand: Demand, one: Filled, holes: Sequence[Sequence[Hole]], makespan_ms: float
    ) -> Placement:
        done = done_ms(holes[one.device], one, demand.alone_bytes, makespan_ms)
        return Placement(
            job=demand.name,
            how="background",
            option=plain(demand, self.table.site(demand, 1)),
            devices=(self.names[one.device],),
            start_ms=one.start_ms,
            end_ms=one.end_ms,
            done=min(1.0, done / (demand.steps * demand.alone_ms)) if demand.alone_ms else 1.0,
        )

    def _rate(self, placement: Placement, placements: Sequence[Placement]) -> float:
        if placement.how != "alternated":
            return placement.option.samples_per_s
        # They take turns: each gets through its rows while all of them run.
        demand = next(demand for demand in self.foreground if demand.name == placement.job)
        ends = [other.end_ms for other in placements if other.how == "alternated"]
        return 1e3 * demand.steps * demand.batch / max(ends) if max(ends) else 0.0

    def _holes(self, placements: Sequence[Placement]) -> list[list[Hole]]:
        """What is left on each device: a background job has a process of its own beside the other's."""
        process_bytes = self.table.process_bytes
        full = [device.memory_bytes - process_bytes for device in self.table.cluster.devices]
        found: list[list[Hole]] = [[] for _ in self.names]
        turns: dict[int, float] = {}
        for placement in placements:
            its = placement.option
            for order, device in enumerate(placement.devices):
                place = self.names.index(device)
                if placement.how == "alternated":
                    turns[place] = max(turns.get(place, 0.0), placement.end_ms)
                    continue
                name = list(its.idle_ms)[order]
                share = its.idle_ms[name] / its.step_ms if its.step_ms else 0.0
                found[place].append(
                    Hole(
                        start_ms=placement.start_ms,
                        end_ms=placement.end_ms,
                        share=share,
                        memory_bytes=full[place] - its.memory_bytes.get(name, 0) - process_bytes,
                    )
                )
        for place, end_ms in turns.items():
            found[place].append(Hole(start_ms=0.0, end_ms=end_ms, share=0.0, memory_bytes=0.0))
        return [gapless(its, memory) for its, memory in zip(found, full, strict=True)]


def _said(name: str, placements: Sequence[Placement]) -> str:
    """The name of a way, with "side by side" where jobs do run at the same time."""
    together = any(
        one.start_ms < other.end_ms and other.start_ms < one.end_ms
        for one, other in combinations(placements, 2)
    )
    if together or not name.startswith(_TOGETHER):
        return name
    return ("alone" if len(placements) == 1 else "one after another") + name.removeprefix(_TOGETHER)


def room(demand: Demand, table: Table) -> int:
    """The bytes that a background job may hold on a device that it has to itself, at most."""
    site = Site(cluster=table.cluster, process_bytes=table.process_bytes)
    return max(room_beside(demand, site, place) for place in range(len(site)))


def only_spills(table: Table, demand: Demand) -> bool:
    """Whether a job fits in no other way."""
    return {option.strategy for option in table.options(demand).values()} == {"spill"}
