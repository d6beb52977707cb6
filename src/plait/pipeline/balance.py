"""Where to cut a chain into stages: by time, bytes on the wire and memory, for unequal devices and links.

In the steady state a pipeline delivers a micro-batch as often as its slowest part can take one: a stage that
computes, or a host's card that carries, one way, the activations sent on and the gradients sent back, and the
other way those that come. The best cut makes the slowest part as fast as it can be:

1. Find the smallest period over all cuts whose stages fit their memory, by dynamic programming over (blocks,
   stages): a stage's period follows from where it begins and ends, nothing else.
2. Of the cuts within 1% of that period, take the one that sends the fewest bytes, by a second pass.

Both passes are exact (tests compare with all cuts that there are) and take O(S B^2) for B blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from plait.cluster import Cluster
from plait.errors import UsageError
from plait.pipeline.candidate import Candidate
from plait.pipeline.events import Load
from plait.pipeline.memory import StageMemory, stage_bytes
from plait.pipeline.network import Network
from plait.pipeline.orders import one_f_one_b
from plait.pipeline.placement import Size, unless_given
from plait.profile import BlockProfile, Profile
from plait.units import format_bytes, parse_bytes, parse_whole

_NEAR = 1.01
"""Periods within this factor count as equal; fewer bytes then matter more."""


@dataclass(frozen=True, kw_only=True)
class Balance:
    """A chain cut into stages, and what each of them is."""

    cuts: tuple[int, ...]
    """The blocks that begin a stage, the first block left out."""
    loads: tuple[Load, ...]
    """What each stage does for one micro-batch."""
    memories: tuple[StageMemory, ...]
    period_ms: float
    """How often the slowest part can take a micro-batch."""

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.loads)


def balance(
    profile: Profile,
    n: int,
    *,
    rows: int = 1,
    micro_batches: int | None = None,
    speeds: Sequence[float] | None = None,
    memory_bytes: Size | Sequence[Size] | None = None,
    network: Network | None = None,
    cluster: Cluster | None = None,
) -> Balance:
    """Cut a profiled chain into ``n`` stages for micro-batches of ``rows``.

    ``speeds`` are the devices', stage by stage, in multiples of the profiled one's; ``memory_bytes`` what
    each may hold, with 1F1B over ``micro_batches`` (by default 4n); ``network`` what lies between them. What
    is not given of these three is that of the first n devices of a ``cluster``, if there is one. Weights that
    later stages use too (``tied``) count where they are used first.
    """
    n, rows = parse_whole(n, setting="n"), parse_whole(rows, setting="rows")
    if n > len(profile.blocks):
        what = f"{len(profile.blocks)} blocks cannot make {n} stages"
        raise UsageError(what, setting="n", works=f"1 to {len(profile.blocks)}")
    speeds, memory_bytes, network = unless_given(
        cluster, n, speeds=speeds, memory_bytes=memory_bytes, network=network
    )
    count = parse_whole(4 * n if micro_batches is None else micro_batches, setting="micro_batches")
    parts = _Parts(
        profile,
        rows=rows,
        candidate=Candidate(order=one_f_one_b(n, count), global_batch=rows * count),
        speeds=each_speed(speeds, n),
        limits=each_limit(memory_bytes, n),
        network=Network.uniform(n) if network is None else network,
    )
    if parts.network.stages != n:
        what = f"a network of {parts.network.stages} stages for {n}"
        raise UsageError(what, setting="network", works=f"{n - 1} links")
    shortest = _best(parts, cost=parts.period_ms, add=max)
    if shortest is None:
        raise _too_large(parts)
    limit_ms = _NEAR * max(parts.period_ms(stage, *ends) for stage, ends in enumerate(pairwise(shortest)))

    def sent(stage: int, begin: int, end: int) -> float:
        return parts.wire_bytes[end] if parts.period_ms(stage, begin, end) <= limit_ms else math.inf

    ends = _best(parts, cost=sent, add=lambda one, other: one + other)
    assert ends is not None, "the cut with the shortest period is one of them"
    ranges = list(enumerate(pairwise(ends)))
    return Balance(
        cuts=tuple(ends[1:-1]),
        loads=tuple(parts.load(stage, *between) for stage, between in ranges),
        memories=tuple(parts.memory(*between) for _, between in ranges),
        period_ms=max(parts.period_ms(stage, *between) for stage, between in ranges),
    )


def wire_bytes_per_row(blocks: Sequence[BlockProfile]) -> tuple[int, ...]:
    """By place of a cut, what crosses it for one row: all that blocks after it read from blocks before it.

    Place i is before block i; nothing crosses the first and the last.
    """
    places = {block.name: place for place, block in enumerate(blocks)}
    last_read = list(range(1, len(blocks) + 1))  # if nobody says otherwise, the next block reads
    for place, block in enumerate(blocks):
        for name in block.inputs or ():
            last_read[places[name]] = max(last_read[places[name]], place)
    found = [0] * (len(blocks) + 1)
    for place, block in enumerate(blocks):
        for cut in range(place + 1, min(last_read[place], len(blocks) - 1) + 1):
            found[cut] += block.output_bytes_per_sample
    return tuple(found)


class _Parts:
    """Every piece of the chain as a stage."""

    def __init__(
        self,
        profile: Profile,
        *,
        rows: int,
        candidate: Candidate,
        speeds: Sequence[float],
        limits: Sequence[float],
        network: Network,
    ) -> None:
        self.blocks, self.rows, self.candidate = profile.blocks, rows, candidate
        self.speeds, self.limits, self.network = speeds, limits, network
        self.stages = candidate.order.stages
        self.wire_bytes = [rows * size for size in wire_bytes_per_row(profile.blocks)]
        self._forward_ms = _sums(block.forward_ms(rows) for block in self.blocks)
        self._backward_ms = _sums(block.backward_ms(rows) for block in self.blocks)
        self._saved = _sums(block.saved_bytes_per_sample for block in self.blocks)
        # Weights and their gradients, and what the optimizer keeps of them.
        self._static = _sums(2 * block.parameter_bytes + block.optimizer_bytes for block in self.blocks)

    def load(self, stage: int, begin: int, end: int) -> Load:
        """What a stage does that runs blocks from ``begin`` up to ``end``."""
        speed = self.speeds[stage]
        return Load(
            forward_ms=(self._forward_ms[end] - self._forward_ms[begin]) / speed,
            backward_ms=(self._backward_ms[end] - self._backward_ms[begin]) / speed,
            output_bytes=self.wire_bytes[end],
            gradient_bytes=self.wire_bytes[begin],
        )

    def memory(self, begin: int, end: int) -> StageMemory:
        """The sizes of a stage."""
        its = self.blocks[begin:end]
        return StageMemory(
            static_bytes=round(self._static[end] - self._static[begin]),
            saved_bytes_per_row=self._saved[end] - self._saved[begin],
            input_bytes_per_row=self.wire_bytes[begin] / self.rows,
            output_bytes_per_row=self.wire_bytes[end] / self.rows,
            transient_bytes=max(block.transient(self.rows) for block in its),
        )

    def held_bytes(self, stage: int, begin: int, end: int) -> int:
        """The most that a stage holds."""
        return stage_bytes(self.candidate, stage, self.memory(begin, end))

    def fits(self, stage: int, begin: int, end: int) -> bool:
        """Whether a stage stays within its device's memory."""
        return self.limits[stage] == math.inf or self.held_bytes(stage, begin, end) <= self.limits[stage]

    def period_ms(self, stage: int, begin: int, end: int) -> float:
        """How often a stage can take a micro-batch: the slowest of computing, sending and receiving."""
        load = self.load(stage, begin, end)
        periods = [load.forward_ms + load.backward_ms]
        left, right = (
            2 * (stage - 1),
            2 * stage,
        )  # the links on both sides: here the wires on, then those back
        for wires in (((left + 1, begin), (right, end)), ((left, begin), (right + 1, end))):
            # What leaves the stage, then what comes to it; the same bytes cross a cut both ways.
            used = [
                (self.wire_bytes[cut], self.network.wires[wire].bytes_per_s)
                for wire, cut in wires
                if 0 <= wire < len(self.network.wires)
            ]
            periods += [1e3 * size / rate for size, rate in used]
            if used:  # one card carries both, as fast as the faster of the two
                periods.append(1e3 * sum(size for size, _ in used) / max(rate for _, rate in used))
        return max(periods)


Cost = Callable[[int, int, int], float]
"""Of a stage that runs blocks from one place up to another."""


def _best(
    parts: _Parts, *, cost: Cost, add: Callable[[float, float], float], fits: bool = True
) -> list[int] | None:
    """Where stages begin and end so that their costs add up to the least; None where no cut fits."""
    blocks, stages = len(parts.blocks), parts.stages
    value, came = {0: 0.0}, [dict[int, int]() for _ in range(stages)]
    for stage in range(stages):
        following: dict[int, float] = {}
        left = stages - 1 - stage
        for begin, before in value.items():
            for end in range(begin + 1, blocks - left + 1) if left else [blocks]:
                if fits and not parts.fits(stage, begin, end):
                    continue
                total = add(before, cost(stage, begin, end))
                if total < following.get(end, math.inf):
                    following[end], came[stage][end] = total, begin
        value = following
    if blocks not in value:
        return None
    ends = [blocks]
    for stage in reversed(range(stages)):
        ends.append(came[stage][ends[-1]])
    return ends[::-1]


def _too_large(parts: _Parts) -> UsageError:
    """The error of memory that no cut fits: the least, the same for each device, that would do."""
    ends = _best(parts, cost=parts.held_bytes, add=max, fits=False)
    assert ends is not None, "without limits there is a cut"
    least = max(parts.held_bytes(stage, *between) for stage, between in enumerate(pairwise(ends)))
    return UsageError(
        f"no cut of {len(parts.blocks)} blocks into {parts.stages} stages fits the memory of the devices; "
        f"the cut that needs least has a stage of {format_bytes(least)}",
        setting="memory_bytes",
        works=f"{least}, or more stages",
    )


def each_speed(given: float | Sequence[float] | None, n: int) -> tuple[float, ...]:
    """The speed of each stage's device; 1 where nothing is said."""
    speeds = _each("speeds", 1.0 if given is None else given, n)
    if not all(isinstance(speed, (int, float)) and 0 < speed < math.inf for speed in speeds):
        works = f"{n} numbers above zero"
        raise UsageError(f"speeds is {given!r} for {n} stages", setting="speeds", works=works)
    return speeds


def each_limit(given: Size | Sequence[Size] | None, n: int) -> tuple[float, ...]:
    """The bytes that each stage may hold; infinite where nothing is said."""
    limits = _each("memory_bytes", math.inf if given is None else given, n)
    limits = tuple(
        parse_bytes(each, setting="memory_bytes") if isinstance(each, str) else each for each in limits
    )
    if not all(isinstance(limit, (int, float)) and limit > 0 for limit in limits):
        what = f"memory_bytes is {given!r} for {n} stages"
        raise UsageError(what, setting="memory_bytes", works='sizes above zero: "4GiB"')
    return limits


def _each(name: str, given: Any, n: int) -> tuple[Any, ...]:
    several = isinstance(given, Sequence) and not isinstance(given, str)
    values = tuple(given) if several else (given,) * n
    if len(values) != n:
        raise UsageError(f"{name} is {given!r} for {n} stages", setting=name, works=f"one, or {n} of them")
    return values


def _sums(values: Iterable[float]) -> list[float]:
    """0, the first, the first two together, ..."""
    return [0.0, *accumulate(values)]
