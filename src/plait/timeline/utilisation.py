"""How many tracks are busy over time: a line of steps, made coarser where there are too many to draw."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import pairwise

from plait.timeline.span import Span, by_track, covered

IDLE = "idle"
"""A span of this name says that its track was not busy."""


def busy_tracks(
    spans: Sequence[Span], end_ms: float, tracks: Collection[str] | None = None
) -> list[tuple[float, int]]:
    """From when on how many of the tracks (all, where none are named) are busy, until the end."""
    changes: defaultdict[float, int] = defaultdict(int)
    for track, its_spans in by_track(span for span in spans if span.name != IDLE).items():
        if tracks is None or track in tracks:
            for start, end in covered(its_spans):
                changes[start] += 1
                changes[end] -= 1
    found: list[tuple[float, int]] = []
    busy = 0
    for at_ms in sorted(changes):
        busy += changes[at_ms]
        if not found or found[-1][1] != busy:
            found.append((at_ms, busy))
    return [step for step in found if step[0] < end_ms or step[1]]


def coarser(
    steps: Sequence[tuple[float, float]], start_ms: float, end_ms: float, most: int
) -> list[tuple[float, float]]:
    """The same line in at most so many steps; where there are more, means over equal parts of the time."""
    if len(steps) <= most or end_ms <= start_ms:
        return list(steps)
    part_ms = (end_ms - start_ms) / most
    areas = [0.0] * most
    for (left, value), (right, _) in pairwise([*steps, (end_ms, 0.0)]):
        first = min(int((left - start_ms) / part_ms), most - 1)
        last = min(int((right - start_ms) / part_ms), most - 1)
        for place in range(first, last + 1):
            begin = start_ms + place * part_ms
            areas[place] += value * max(0.0, min(right, begin + part_ms) - max(left, begin))
    return [(start_ms + place * part_ms, area / part_ms) for place, area in enumerate(areas)]
