"""Two timelines side by side, in numbers."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plait.timeline.span import Span, busy_ms, by_track, extent, in_order, natural


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One quantity in both timelines."""

    name: str
    this_ms: float
    other_ms: float
    this_count: int
    """How many spans it is made of."""
    other_count: int

    @property
    def difference_ms(self) -> float:
        """This one's time less the other's."""
        return self.this_ms - self.other_ms

    @property
    def relative_error(self) -> float:
        """The difference as a share of the other's time: 0.1 where this one is a tenth longer."""
        if self.this_ms == self.other_ms:
            return 0.0
        return self.difference_ms / self.other_ms if self.other_ms else math.inf

    def to_json(self) -> dict[str, Any]:
        """As plain data; an infinite relative error (the other has none of it) is null."""
        error = self.relative_error if math.isfinite(self.relative_error) else None
        return {**asdict(self), "difference_ms": self.difference_ms, "relative_error": error}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How one timeline differs from another; the other is what this one is judged against."""

    makespan: Difference
    """From first start to last end."""
    tracks: tuple[Difference, ...]
    """Busy time of each track, overlaps counted once."""
    names: tuple[Difference, ...]
    """Time of all spans of a name, added up over tracks."""
    only_here: tuple[Span, ...]
    """Spans that the other timeline lacks, by count of (track, name); the last ones are meant."""
    only_there: tuple[Span, ...]
    """Spans that this timeline lacks."""
    matched: int
    """How many spans are in both: the n-th of a name on a track is matched with the n-th."""
    start_error_ms: float
    """Mean distance between the starts of matched spans, both timelines starting at zero."""

    @property
    def relative_error(self) -> float:
        """The relative error of the makespan."""
        return self.makespan.relative_error

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "makespan": self.makespan.to_json(),
            "tracks": [track.to_json() for track in self.tracks],
            "names": [name.to_json() for name in self.names],
            "only_here": [asdict(span) for span in self.only_here],
            "only_there": [asdict(span) for span in self.only_there],
            "matched": self.matched,
            "start_error_ms": self.start_error_ms,
        }


def compare(these: Sequence[Span], others: Sequence[Span]) -> Comparison:
    """Compare two sets of spans, each in order of start."""
    start, end = extent(these)
    other_start, other_end = extent(others)
    queues: defaultdict[tuple[str, str], tuple[list[Span], list[Span]]] = defaultdict(lambda: ([], []))
    for side, spans in enumerate((these, others)):
        for span in spans:
            queues[span.track, span.name][side].append(span)
    distances = [
        abs((mine.start_ms - start) - (theirs.start_ms - other_start))
        for here, there in queues.values()
        for mine, theirs in zip(here, there, strict=False)
    ]
    return Comparison(
        makespan=Difference(
            name="makespan",
            this_ms=end - start,
            other_ms=other_end - other_start,
            this_count=len(these),
            other_count=len(others),
        ),
        tracks=_tracks(these, others),
        names=_names(these, others),
        only_here=in_order(span for here, there in queues.values() for span in here[len(there) :]),
        only_there=in_order(span for here, there in queues.values() for span in there[len(here) :]),
        matched=len(distances),
        start_error_ms=math.fsum(distances) / len(distances) if distances else 0.0,
    )


def _tracks(these: Sequence[Span], others: Sequence[Span]) -> tuple[Difference, ...]:
    here, there = by_track(these), by_track(others)
    return tuple(
        Difference(
            name=track,
            this_ms=busy_ms(here.get(track, ())),
            other_ms=busy_ms(there.get(track, ())),
            this_count=len(here.get(track, ())),
            other_count=len(there.get(track, ())),
        )
        for track in sorted({*here, *there}, key=natural)
    )


def _names(these: Sequence[Span], others: Sequence[Span]) -> tuple[Difference, ...]:
    counts = [Counter(span.name for span in spans) for spans in (these, others)]
    sums: list[defaultdict[str, list[float]]] = [defaultdict(list), defaultdict(list)]
    for side, spans in enumerate((these, others)):
        for span in spans:
            sums[side][span.name].append(span.duration_ms)
    return tuple(
        Difference(
            name=name,
            this_ms=math.fsum(sums[0][name]),
            other_ms=math.fsum(sums[1][name]),
            this_count=counts[0][name],
            other_count=counts[1][name],
        )
        for name in sorted({*counts[0], *counts[1]}, key=natural)
    )
