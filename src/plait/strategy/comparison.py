"""All ways to train one job on one cluster, side by side: the fastest that can be had, and why.

    from plait.strategy import compare
    print(compare(profile, cluster, batch=32).why)

A profile and a cluster are all it takes: no model, no device, no torch. What nobody measured is said in
``remarks``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from plait.cluster import Cluster
from plait.errors import UsageError
from plait.profile import Profile
from plait.strategy.bursted import bursted
from plait.strategy.change import Change, changes
from plait.strategy.codecs import Codecs
from plait.strategy.data import automatic, compressed, plain
from plait.strategy.demand import Demand
from plait.strategy.figure import figure, milliseconds, readable
from plait.strategy.option import LEAST_GAIN, WORTH_DEVICES, Option, StrategyName
from plait.strategy.pipelined import pipelined
from plait.strategy.site import Site
from plait.strategy.spilled import spilled
from plait.units import format_bytes

FORMAT = "plait.comparison/1"
STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The options of a job, and which one to take."""

    demand: Demand
    options: tuple[Option, ...]
    chosen: Option | None
    """The fastest that can be had, or one that is hardly slower and needs less; None where none can."""
    why: str
    """One sentence, with the numbers."""
    changes: tuple[Change, ...] = ()
    """Where no option can be had: what would let one, the smallest change first."""
    remarks: tuple[str, ...] = ()

    def option(self, name: str) -> Option:
        """The option of that name."""
        for option in self.options:
            if option.name == name:
                return option
        known = ", ".join(repr(option.name) for option in self.options)
        raise UsageError(f"there is no option {name!r}", setting="option", works=known)

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain data."""
        return {
            "format": FORMAT,
            "job": dict(self.demand.to_json()),
            "chosen": None if self.chosen is None else self.chosen.name,
            "why": self.why,
            "options": [option.to_json() for option in self.options],
            "changes": [change.to_json() for change in self.changes],
            "remarks": list(self.remarks),
        }


def compare(
    profile: Profile,
    cluster: Cluster,
    *,
    batch: int,
    steps: int = 1,
    accumulate: int = 1,
    name: str | None = None,
    memory: int | None = None,
    optimizer: str | None = None,
    strategies: Sequence[StrategyName] = STRATEGIES,
    codecs: Codecs | None = None,
    background: Demand | None = None,
    process_bytes: int = 0,
    directory: str | Path | None = None,
) -> Comparison:
    """Compare the strategies for a model that was profiled.

    Args:
        batch: Rows of a step over all devices.
        memory: Bytes that a device may hold, where that is less than it has.
        optimizer: ``"sgd"``, ``"momentum"`` or ``"adam"``: whose state to count in place of the profile's.
        strategies: Those to look at.
        codecs: How fast the devices pack gradients; None measures this machine's processor, once, where the
            cluster's devices are CPUs, and looks at no compressed option where they are not.
        background: What would run on devices that are idle; None is another job like this one.
        process_bytes: What a worker's process holds by itself, which comes off every device's memory.
        directory: Where what was measured is kept; None is a folder in the user's cache.
    """
    demand = Demand(
        name=name or profile.model or "job",
        profile=profile,
        batch=batch,
        steps=steps,
        accumulate=accumulate,
        memory_bytes=memory,
    )
    return compare_demand(
        demand.assuming(optimizer),
        cluster,
        strategies=strategies,
        codecs=codecs,
        background=background,
        process_bytes=process_bytes,
        directory=directory,
    )


def compare_demand(
    demand: Demand,
    cluster: Cluster,
    *,
    strategies: Sequence[StrategyName] = STRATEGIES,
    codecs: Codecs | None = None,
    background: Demand | None = None,
    process_bytes: int = 0,
    directory: str | Path | None = None,
) -> Comparison:
    """The same for a job as planning sees it; one that asks for a strategy gets no other."""
    check_cluster(cluster)
    for strategy in strategies:
        if strategy not in STRATEGIES:
            raise UsageError(
                f"there is no strategy {strategy!r}", setting="strategies", works=", ".join(STRATEGIES)
            )
    site = Site(cluster=cluster, memory_bytes=demand.memory_bytes, process_bytes=process_bytes)
    options = options_of(
        demand, site, strategies=wanted(demand, strategies), codecs=codecs, directory=directory
    )
    return concluded(demand, site, options, background=background)


def check_cluster(cluster: object) -> None:
    """Refuse what is none, such as the name of a file."""
    if not isinstance(cluster, Cluster):
        works = f"Cluster.load({str(cluster)!r})" if isinstance(cluster, str | Path) else "Cluster.detect()"
        raise UsageError(f"{cluster!r} is no cluster", setting="cluster", works=works)


def wanted(demand: Demand, strategies: Sequence[StrategyName]) -> tuple[StrategyName, ...]:
    """The strategies to look at for a job."""
    return tuple(strategies) if demand.strategy == "auto" else (demand.strategy,)


def concluded(
    demand: Demand,
    site: Site,
    options: Sequence[Option],
    *,
    background: Demand | None = None,
    jobs: int = 1,
) -> Comparison:
    """The comparison of options, with background work beside each: by default another job like this one.

    ``jobs`` are so many background jobs that are alike.
    """
    beside = demand if background is None else background
    options = tuple(with_background(option, beside, site, jobs=jobs) for option in options)
    possible = [option for option in options if option.feasible]
    chosen = Option.preferred(possible) if possible else None
    found: tuple[Change, ...] = ()
    if chosen is None:
        found = changes(demand, site, list(dict.fromkeys(option.strategy for option in options)))
    return Comparison(
        demand=demand,
        options=options,
        chosen=chosen,
        why=_refusal(demand, options, found) if chosen is None else _reason(demand, chosen, options),
        changes=found,
        remarks=(*demand.remarks, *site.elsewhere(demand.profile)),
    )


def options_of(
    demand: Demand,
    site: Site,
    *,
    strategies: Sequence[StrategyName],
    codecs: Codecs | None = None,
    directory: str | Path | None = None,
    exactly: bool = False,
    at_once: int = 1,
) -> tuple[Option, ...]:
    """Every option of some strategies; one that cannot be had says why.

    Each takes as many of the devices as pay; with ``exactly``, data parallelism and pipelines take all.
    ``at_once`` jobs share the disk where they spill. Codecs that are not given are kept in ``directory``.
    """
    packed = partial(packing, site, codecs, directory)
    makers: list[tuple[StrategyName, str, Callable[[], Option]]] = [
        ("data", "data, fp32", lambda: plain(demand, site, exactly=exactly)),
        ("data", "data, 4 bits", lambda: compressed(demand, site, packed(), exactly=exactly)),
        ("data", "data, auto", lambda: automatic(demand, site, packed(), exactly=exactly)),
        ("pipeline", "pipeline", lambda: pipelined(demand, site, exactly=exactly)),
        ("burst", "burst", lambda: bursted(demand, site)),
        ("burst", "burst, 4 bits", lambda: bursted(demand, site, packed())),
        ("spill", "spill", lambda: spilled(demand, site, at_once=at_once)),
    ]
    found = []
    for strategy, name, make in makers:
        if strategy not in strategies:
            continue
        try:
            found.append(make())
        except UsageError as error:
            refused = Option(
                strategy=strategy,
                name=name,
                batch=demand.batch,
                why_not=error.what,
                works=readable(error.works),
            )
            found.append(refused)
    return tuple(found)


def packing(site: Site, codecs: Codecs | None, directory: str | Path | None = None) -> Codecs:
    """How fast gradients are packed there: as given, or as measured here once and kept in a directory."""
    if codecs is not None:
        return codecs
    if not site.on_cpu:
        raise UsageError(
            "how fast a GPU of this cluster packs gradients is not known",
            setting="codecs",
            works="from Python, plait.strategy.compare(codecs=Codecs(speeds={4: Speed(...)}, "
            "shares_device=False))",
        )
    return Codecs.kept(directory)


def with_background(option: Option, other: Demand, site: Site, *, jobs: int = 1) -> Option:
    """With what so many other jobs get through on idle time.

    Each stays on one device: its steps depend on each other, so idle time elsewhere is of no use to it.
    """
    if option.step_ms is None or not other.alone_ms:
        return option
    rates = []
    for place, (device, idle_ms) in enumerate(option.idle_ms.items()):
        if other.alone_bytes <= room_beside(other, site, place, option.memory_bytes.get(device)):
            share = idle_ms / option.step_ms
            rates.append(share * site.speeds[place] * 1e3 * other.batch / other.alone_ms)
    return replace(option, background_samples_per_s=sum(sorted(rates, reverse=True)[:jobs]))


def room_beside(other: Demand, site: Site, place: int, held_bytes: int | None = None) -> int:
    """The bytes that a background job may hold on a device, beside a job that holds some there.

    Each of the two has a process of its own; the limit of the one in front is not the other's.
    """
    left = site.cluster.devices[place].memory_bytes - site.process_bytes
    if held_bytes is not None:
        left -= held_bytes + site.process_bytes
    return left if other.memory_bytes is None else min(left, other.memory_bytes - site.process_bytes)


# --- why ----------------------------------------------------------------------------------------------


def _reason(demand: Demand, chosen: Option, options: Sequence[Option]) -> str:
    """One sentence: what it takes, and what the next best strategy takes and why that is more."""
    step_ms = chosen.step_ms or 0.0
    count = f"{chosen.devices} device{'s' * (chosen.devices > 1)}"
    head = (
        f"{chosen.name} on {count} takes {milliseconds(step_ms)} a step of {demand.batch} rows "
        f"({figure(chosen.samples_per_s)} samples/s)"
    )
    others = [option for option in options if option.feasible and option.name != chosen.name]
    if not others:
        refused = [option for option in options if not option.feasible]
        return head + (f", and is the only way that fits of {len(options)}" if refused else "")
    kin = [option for option in others if option.strategy != chosen.strategy] or others
    second = min(kin, key=lambda option: option.weighed_ms)
    less = [option for option in others if (option.step_ms or 0.0) < step_ms]
    if less:  # compressed, on more devices, or by other means, for next to nothing
        near = min(less, key=lambda option: option.step_ms or 0.0)
        only = f"compressed gradients are preferred from {LEAST_GAIN:g} times as fast on"
        if near.weighed_ms < chosen.weighed_ms:
            what = "more devices" if near.devices > chosen.devices else "other ways than data parallelism"
            only = f"{what} are preferred from {WORTH_DEVICES:g} times as fast on"
        return f"{head}; {near.name} would take {milliseconds(near.step_ms or 0.0)}, but {only}"
    factor = (second.step_ms or 0.0) / step_ms if step_ms else 1.0
    part, part_ms = max(
        ((part, ms - chosen.parts_ms.get(part, 0.0)) for part, ms in second.parts_ms.items()),
        key=lambda entry: entry[1],
        default=("", 0.0),
    )
    times = "" if factor < _NOTED else f"{factor:.3g} times "
    said = f", {times}as fast as {second.name} ({milliseconds(second.step_ms or 0.0)}"
    if part and part_ms > (_NOTED - 1) * step_ms:
        said += f", {milliseconds(part_ms)} more of it {_PARTS[part]}"
    return f"{head}{said})"


_NOTED = 1.005
"""A factor below this is none: it would be said to be 1."""
_PARTS = {
    "compute": "computing",
    "codec": "for packing",
    "wire": "waiting for gradients on the wire",
    "waiting": "waiting for others",
    "moving": "moving rows",
    "optimizer": "in the optimizer",
}


def _refusal(demand: Demand, options: Sequence[Option], found: Sequence[Change]) -> str:
    weights = sum(block.parameter_bytes for block in demand.profile.blocks)
    head = (
        f"none of {len(options)} ways fits {demand.name!r} with {format_bytes(weights)} of weights and "
        f"{demand.batch} rows"
    )
    return f"{head}; the smallest change that makes it fit is {found[0].text}" if found else head
