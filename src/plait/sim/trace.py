"""A figure that changes over time: the speed of a device, the share of a link that others leave.

    Trace.of([(0, 1.0), (500, 0.25), (800, 1.0)], repeat_ms=1000)

       1.0 |---------.     .---:---------.     .---
      0.25 |         `-----'   :         `-----'
           0        500   800 1000

It holds a value from one moment to the next. Values may be 0 for a while, not for ever.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from plait.errors import UsageError
from plait.sim.cards import cards

if TYPE_CHECKING:
    from plait.cluster import Cluster


@dataclass(frozen=True)
class Trace:
    """Values that hold from their moments on; with ``repeat_ms``, all starts over at that moment."""

    times_ms: tuple[float, ...]
    values: tuple[float, ...]
    repeat_ms: float | None = None

    def __post_init__(self) -> None:
        times, values = self.times_ms, self.values
        if not times or len(times) != len(values) or times[0] != 0:
            what = f"a trace of {len(times)} times and {len(values)} values"
            what += f" that begins at {times[0]} ms" if times else ""
            raise UsageError(what, setting="trace", works="[(0, 1.0), (500, 0.25)]")
        if not all(0 <= before < after < math.inf for before, after in pairwise(times)):
            raise UsageError(
                f"the times of a trace are {list(times)} ms",
                setting="trace",
                works="0 first, then later and later",
            )
        if not all(0 <= value < math.inf for value in values):
            raise UsageError(f"the values of a trace are {list(values)}", setting="trace", works="0 or more")
        if self.repeat_ms is not None and not times[-1] < self.repeat_ms < math.inf:
            raise UsageError(
                f"a trace that repeats after {self.repeat_ms} ms and changes at {times[-1]} ms",
                setting="repeat_ms",
                works=f"more than {times[-1]}",
            )
        if not (max(values) if self.repeat_ms is not None else values[-1]) > 0:
            raise UsageError(
                "a trace that is 0 for ever: nothing would ever end",
                setting="trace",
                works="a last value above 0",
            )

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]], *, repeat_ms: float | None = None) -> Trace:
        """From moments (ms, the first is 0) and the values that hold from then on."""
        kept = list(points)
        return cls(tuple(float(at) for at, _ in kept), tuple(float(value) for _, value in kept), repeat_ms)

    @classmethod
    def constant(cls, value: float) -> Trace:
        """One value for ever."""
        return cls((0.0,), (float(value),))

    def scaled(self, factor: float) -> Trace:
        """Every value times ``factor``."""
        return Trace(self.times_ms, tuple(value * factor for value in self.values), self.repeat_ms)

    def at(self, time_ms: float) -> float:
        """The value at a time."""
        return self.values[self._place(time_ms)[1]]

    def next_change(self, time_ms: float) -> float:
        """When the next value comes after that time; infinite where none does."""
        return self._begin(*self._after(*self._place(time_ms)))

    def area(self, start_ms: float, end_ms: float) -> float:
        """Value times milliseconds, from a time to another: work done at that speed."""
        place, at_ms, found = self._place(start_ms), start_ms, []
        while at_ms < end_ms:
            if self.repeat_ms is not None and end_ms - at_ms > self.repeat_ms:
                rounds = int((end_ms - at_ms) // self.repeat_ms)
                found.append(rounds * self._round)
                at_ms, place = at_ms + rounds * self.repeat_ms, (place[0] + rounds, place[1])
            following = self._after(*place)
            until_ms = min(end_ms, self._begin(*following))
            found.append(self.values[place[1]] * (until_ms - at_ms))
            at_ms, place = until_ms, following
        return math.fsum(found)

    def reaches(self, start_ms: float, area: float) -> float:
        """The time at which the area from ``start_ms`` on is so large: when work of that size is done."""
        place, at_ms, left = self._place(start_ms), start_ms, area
        # What rounding leaves must not wait for the end of a time at which the value is 0.
        while left > 1e-12 * area:
            if self.repeat_ms is not None and left > self._round:
                # The last one is gone through: where its value is 0 at last, the end comes before that.
                rounds = math.ceil(left / self._round - 1e-9) - 1
                left -= rounds * self._round
                at_ms, place = at_ms + rounds * self.repeat_ms, (place[0] + rounds, place[1])
            following = self._after(*place)
            value, until_ms = self.values[place[1]], self._begin(*following)
            if value > 0 and at_ms + left / value <= until_ms:
                return at_ms + left / value
            left -= value * (until_ms - at_ms)
            at_ms, place = until_ms, following
        return at_ms

    @cached_property
    def _round(self) -> float:
        """The area of one repetition."""
        edges = [*self.times_ms, self.repeat_ms or self.times_ms[-1]]
        return math.fsum(v * (b - a) for v, (a, b) in zip(self.values, pairwise(edges), strict=True))

    def _place(self, time_ms: float) -> tuple[int, int]:
        """Which repetition a time is in, and which value of it; as ``_begin`` rounds, so that both agree."""
        turn = 0 if self.repeat_ms is None else int(time_ms // self.repeat_ms)
        place = (turn, max(0, bisect_right(self.times_ms, time_ms - self._begin(turn, 0)) - 1))
        while self._begin(*place) > time_ms and place > (0, 0):
            place = (place[0], place[1] - 1) if place[1] else (place[0] - 1, len(self.values) - 1)
        while self._begin(*self._after(*place)) <= time_ms:
            place = self._after(*place)
        return place

    def _after(self, turn: int, place: int) -> tuple[int, int]:
        if self.repeat_ms is not None and place + 1 == len(self.values):
            return turn + 1, 0
        return turn, place + 1

    def _begin(self, turn: int, place: int) -> float:
        """When a value begins to hold; infinite for the one after the last."""
        if self.repeat_ms is None:
            return self.times_ms[place] if place < len(self.times_ms) else math.inf
        return turn * self.repeat_ms + self.times_ms[place]


class RateStep(Protocol):
    """From one moment on, one host's card (or all) has another rate."""

    @property
    def seconds(self) -> float:
        """Since the start."""

    @property
    def rate_bytes_per_second(self) -> float | None:
        """None is its own rate."""

    @property
    def host(self) -> int | None:
        """Its number; None is all hosts."""


class RateTrace(Protocol):
    """What :class:`plait.lab.trace.Trace` reads from a file."""

    @property
    def steps(self) -> Sequence[RateStep]:
        """In order of time."""

    @property
    def repeat_seconds(self) -> float | None:
        """When it starts over, if it does."""


def host_traces(rates: RateTrace, cluster: Cluster) -> dict[str, Trace]:
    """The traces of a cluster's hosts (as ``Network`` takes them) from a trace as the lab plays it."""
    repeat_ms = None if rates.repeat_seconds is None else 1e3 * rates.repeat_seconds
    points: list[dict[float, float]] = [{0.0: 1.0} for _ in cluster.hosts]
    own = list(cards(cluster).leaving.values())
    for step in rates.steps:
        if step.host is not None and step.host >= len(points):
            raise UsageError(
                f"the trace changes host {step.host} at {step.seconds} s, but there are {len(points)} hosts",
                setting="trace",
                works=f"hosts 0 to {len(points) - 1}",
            )
        rate = step.rate_bytes_per_second
        for place in range(len(points)) if step.host is None else [step.host]:
            # A host alone has no network that could become slower.
            slower = rate is not None and own[place] < math.inf
            points[place][1e3 * step.seconds] = min(1.0, (rate or 0.0) / own[place]) if slower else 1.0
    return {
        host.name: Trace.of(its.items(), repeat_ms=repeat_ms)
        for host, its in zip(cluster.hosts, points, strict=True)
        if len(set(its.values())) > 1 or its[0.0] != 1.0
    }
