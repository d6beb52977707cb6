"""A timeline in characters, for a terminal.

Two stages of a pipeline, three micro-batches each (F forward, B backward)::

    stage0 │FFFFFFFFFFFF........BBBBBBBBBBBB│  75%
    stage1 │....FFFFFFFFFFFFBBBBBBBBBBBB....│  75%
            0                           8 ms
    B backward   F forward   . idle
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from plait.errors import UsageError
from plait.timeline.span import Span, busy_ms, by_track, extent, innermost
from plait.units import format_seconds

_IDLE, _MARK = ".", "!"
_NARROWEST = 40


def draw(spans: Sequence[Span], width: int) -> str:
    """Draw the spans on lines of at most ``width`` characters.

    A character stands for an equal share of the time and shows what filled most of it: the innermost
    span there, or idleness. The share of time that each track was busy stands at the end of its line.
    """
    if width < _NARROWEST:
        raise UsageError(
            f"{width} characters are too few for a drawing", setting="width", works=f"{_NARROWEST} or more"
        )
    if not spans:
        return "no spans"
    start_ms, end_ms = extent(spans)
    tracks = by_track(spans)
    label = min(max(map(len, tracks)), width // 3)
    columns = width - label - len(" ││ 100%")
    letters = _letters(span.name for span in spans if span.duration_ms > 0)
    lines = []
    for track, its_spans in tracks.items():
        busy = busy_ms(its_spans) / (end_ms - start_ms) if end_ms > start_ms else 0.0
        cells = _cells(its_spans, start_ms, end_ms, columns, letters)
        lines.append(f"{track[-label:]:<{label}} │{cells}│ {busy:4.0%}")
    scale = format_seconds((end_ms - start_ms) / 1e3)
    lines.append(" " * (label + 2) + "0" + scale.rjust(columns - 1))
    marks = sorted({span.name for span in spans if span.duration_ms == 0})
    legend = [f"{letter} {name}" for name, letter in letters.items()] + [f"{_IDLE} idle"]
    legend += [f"{_MARK} {', '.join(marks)}"] if marks else []
    return "\n".join(lines + _wrapped(legend, width))


def _cells(
    spans: Sequence[Span], start_ms: float, end_ms: float, columns: int, letters: dict[str, str]
) -> str:
    scale = columns / (end_ms - start_ms) if end_ms > start_ms else math.inf
    if math.isinf(scale):  # nothing took any time, or less than a number can be divided by
        return _MARK + _IDLE * (columns - 1)
    shares: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(columns)]
    for left_ms, right_ms, span in innermost(spans):
        left, right = (left_ms - start_ms) * scale, (right_ms - start_ms) * scale
        for column in range(int(left), min(int(right) + 1, columns)):
            shares[column][letters[span.name]] += min(right, column + 1) - max(left, column)
    cells = []
    for share in shares:
        share[_IDLE] = 1.0 - sum(share.values())
        cells.append(max(share, key=lambda letter: share[letter]))
    for span in spans:
        if span.duration_ms == 0:
            cells[min(int((span.start_ms - start_ms) * scale), columns - 1)] = _MARK
    return "".join(cells)


def _letters(names: Iterable[str]) -> dict[str, str]:
    """A letter for each name: one of its own where one is free, any other where none is."""
    rest = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    given: dict[str, str] = {}
    for name in sorted(set(names)):
        wanted = [c for c in name.upper() + name.lower() + rest if c in rest and c not in given.values()]
        given[name] = wanted[0] if wanted else "#"
    return given


def _wrapped(entries: Iterable[str], width: int) -> list[str]:
    lines = [""]
    for entry in entries:
        if lines[-1] and len(lines[-1]) + 3 + len(entry) > width:
            lines.append("")
        lines[-1] += ("   " if lines[-1] else "") + entry
    return lines
