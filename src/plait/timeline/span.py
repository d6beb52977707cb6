"""A span, a sample, and what can be said of a set of spans: pure functions, times in milliseconds."""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from plait.errors import UsageError

Scalar = str | int | float | bool | None
"""What a span may carry beside its times."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time on a track; one that begins and ends at the same moment is a mark."""

    track: str
    name: str
    start_ms: float
    end_ms: float
    info: Mapping[str, Scalar] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start_ms) and math.isfinite(self.end_ms)):
            raise UsageError(
                f"span {self.name!r} on {self.track!r} is from {self.start_ms} to {self.end_ms} ms",
                setting="start_ms, end_ms",
                works="finite numbers",
            )
        if self.end_ms < self.start_ms:
            raise UsageError(
                f"span {self.name!r} on {self.track!r} ends at {self.end_ms} ms, "
                f"before its start at {self.start_ms} ms",
                setting="end_ms",
                works=f"{self.start_ms} or later",
            )

    @property
    def duration_ms(self) -> float:
        """How long it took."""
        return self.end_ms - self.start_ms

    def moved(self, by_ms: float, *, to_track: str | None = None) -> Span:
        """The same span, later by so much, and on another track if one is given."""
        track = self.track if to_track is None else to_track
        return Span(track, self.name, self.start_ms + by_ms, self.end_ms + by_ms, self.info)


@dataclass(frozen=True, slots=True)
class Sample:
    """The value of a counter at one moment: bytes held, a rate, a queue's length."""

    track: str
    name: str
    at_ms: float
    value: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.at_ms) and math.isfinite(self.value)):
            raise UsageError(
                f"sample {self.name!r} on {self.track!r} is {self.value} at {self.at_ms} ms",
                setting="value, at_ms",
                works="finite numbers",
            )

    def moved(self, by_ms: float, *, to_track: str | None = None) -> Sample:
        """The same sample, later by so much, and on another track if one is given."""
        return Sample(self.track if to_track is None else to_track, self.name, self.at_ms + by_ms, self.value)


def in_order(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The spans by start; ties are broken by all the rest, so the order never depends on who came first."""
    return tuple(sorted(spans, key=lambda s: (s.start_ms, s.end_ms, s.track, s.name, str(s.info))))


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key under which ``device2`` comes before ``device10``."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return tuple((0, int(part), "") if part[0] in "0123456789" else (1, 0, part) for part in parts)


def by_track(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """The spans of each track, tracks in natural order."""
    found: dict[str, list[Span]] = {}
    for span in spans:
        found.setdefault(span.track, []).append(span)
    return {track: found[track] for track in sorted(found, key=natural)}


def extent(spans: Iterable[Span]) -> tuple[float, float]:
    """When the first span starts and the last one ends; (0, 0) where there is none."""
    kept = list(spans)
    return min((s.start_ms for s in kept), default=0.0), max((s.end_ms for s in kept), default=0.0)


def covered(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """The times at which at least one span is open: disjoint, in order, overlaps counted once."""
    pieces: list[tuple[float, float]] = []
    for start, end in sorted((s.start_ms, s.end_ms) for s in spans if s.end_ms > s.start_ms):
        if pieces and start <= pieces[-1][1]:
            pieces[-1] = (pieces[-1][0], max(end, pieces[-1][1]))
        else:
            pieces.append((start, end))
    return pieces


def busy_ms(spans: Iterable[Span]) -> float:
    """How long at least one of the spans was open."""
    return math.fsum(end - start for start, end in covered(spans))


def gaps(spans: Iterable[Span], start_ms: float, end_ms: float) -> list[tuple[float, float]]:
    """The times between ``start_ms`` and ``end_ms`` at which no span is open."""
    edges = [start_ms]
    for start, end in covered(spans):
        edges += [start, end]
    edges.append(end_ms)
    return [(left, right) for left, right in zip(edges[::2], edges[1::2], strict=True) if right > left]


def lanes(spans: Iterable[Span]) -> list[list[tuple[Span, int]]]:
    """Share the spans of a track among lanes so that, within a lane, two spans are apart or nested.

    Each span comes with its depth in its lane. Spans that are properly nested, as a call within a
    call, need one lane; those that overlap otherwise, as two transfers in flight, need more.
    """
    found: list[list[tuple[Span, int]]] = []
    open_ends: list[list[float]] = []
    for span in sorted(spans, key=lambda s: (s.start_ms, -s.end_ms)):
        for ends in open_ends:
            while ends and ends[-1] <= span.start_ms:
                ends.pop()
        fits = (i for i, ends in enumerate(open_ends) if not ends or span.end_ms <= ends[-1])
        lane = next(fits, len(found))
        if lane == len(found):
            found.append([])
            open_ends.append([])
        found[lane].append((span, len(open_ends[lane])))
        open_ends[lane].append(span.end_ms)
    return found


def innermost(spans: Sequence[Span]) -> list[tuple[float, float, Span]]:
    """Cut time into pieces and give each to the open span that started last (of these, the first to end)."""
    ordered = sorted(spans, key=lambda s: s.start_ms)
    edges = sorted({edge for s in ordered for edge in (s.start_ms, s.end_ms)})
    waiting: list[tuple[float, float, int]] = []
    pieces: list[tuple[float, float, Span]] = []
    seen = 0
    for left, right in pairwise(edges):
        while seen < len(ordered) and ordered[seen].start_ms <= left:
            heapq.heappush(waiting, (-ordered[seen].start_ms, ordered[seen].end_ms, seen))
            seen += 1
        while waiting and waiting[0][1] <= left:
            heapq.heappop(waiting)
        if waiting:
            pieces.append((left, right, ordered[waiting[0][2]]))
    return pieces
