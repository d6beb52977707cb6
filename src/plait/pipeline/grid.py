"""The familiar picture of a pipeline: a row a stage, forwards blue, backwards green, numbered by micro-batch.

Several timelines are drawn one above the other on one scale, such as what was predicted above what was
measured. Spans ``F3`` and ``B3`` on tracks ``stage0``, ``stage1`` are drawn, as predictions and schedules
have them; a span of no length on any track, such as a tuner's decision, is a line through its panel. The
picture loads nothing from anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from pathlib import Path

from plait.destination import write_text
from plait.errors import UsageError
from plait.timeline import Span, Timeline
from plait.timeline.picture import ticks
from plait.units import format_seconds

_WIDTH, _GUTTER, _PLOT, _ROW, _HEAD = 1200, 80, 1100, 22, 24
_STAGE = re.compile(r"stage(\d+)")
_ACTION = re.compile(r"([FB])(\d+)")
_HUES = {"F": 212, "B": 140}
_STYLE = """
text{font:12px system-ui,sans-serif;fill:#222}.n{font-size:10px;text-anchor:middle;pointer-events:none}
.small{font-size:11px;fill:#555}.title{font-weight:600}.tick{stroke:#ddd}.mark{stroke:#c33;stroke-width:1.5}
.idle{fill:#f3f3f3}.cell{stroke:#0004;stroke-width:.5}
""".strip()


def svg(panels: Mapping[str, Timeline]) -> str:
    """The picture: each timeline under its title, all beginning at the left."""
    if not panels:
        raise UsageError("there is no timeline to draw", setting="panels", works='{"predicted": timeline}')
    found = {title: _actions(title, timeline) for title, timeline in panels.items()}
    total_ms = max(max(span.end_ms for row in rows for span in row) for rows in found.values())
    scale = _PLOT / total_ms if total_ms else 1.0
    parts: list[str] = []
    y = 0
    for title, rows in found.items():
        parts += _panel(title, rows, _marks(panels[title]), y, scale)
        y += _HEAD + _ROW * len(rows) + 14
    ticks = _axis(total_ms, y)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y + 20}" '
            f'viewBox="0 0 {_WIDTH} {y + 20}"><style>{_STYLE}</style>',
            f'<rect width="{_WIDTH}" height="{y + 20}" fill="#fff"/>',
            *ticks,
            *parts,
            "</svg>",
        ]
    )


def save(path: str | Path, panels: Mapping[str, Timeline]) -> None:
    """Write the picture as ``.svg``, or as a page around it, ``.html``."""
    ending = Path(path).suffix
    if ending not in (".svg", ".html"):
        works = "a name that ends in .svg or .html"
        raise UsageError(f"no picture has names that end in {ending!r}", setting="path", works=works)
    text = svg(panels) + "\n"
    if ending == ".html":
        head = '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>pipeline</title>'
        safe = (
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        )
        text = f"{head}{safe}</head><body>{text}</body></html>\n"
    write_text(Path(path), text, setting="path")


def of_step(timeline: Timeline, step: int) -> Timeline:
    """The spans of one step, of a run that noted it with them (``step`` in their info)."""
    spans = [span for span in timeline.spans if span.info.get("step") == step]
    if not spans:
        steps = sorted({str(span.info["step"]) for span in timeline.spans if "step" in span.info})
        works = f"one of {', '.join(steps)}" if steps else "a timeline whose spans have a step"
        raise UsageError(f"no span is of step {step}", setting="step", works=works)
    return Timeline.of(spans)


def _actions(title: str, timeline: Timeline) -> list[list[Span]]:
    """The forwards and backwards of each stage, in time from the first of all."""
    rows: dict[int, list[Span]] = {}
    for span in timeline.spans:
        stage = _STAGE.fullmatch(span.track)
        if stage and _ACTION.fullmatch(span.name) and span.duration_ms > 0:
            rows.setdefault(int(stage[1]), []).append(span)
    if not rows:
        raise UsageError(
            f"the timeline {title!r} has no span such as F0 on a track such as stage0",
            setting="panels",
            works="the timeline of a prediction or of a schedule",
        )
    start_ms = min(span.start_ms for row in rows.values() for span in row)
    return [[span.moved(-start_ms) for span in rows.get(stage, [])] for stage in range(max(rows) + 1)]


def _marks(timeline: Timeline) -> list[Span]:
    start_ms = timeline.start_ms
    return [span.moved(-start_ms) for span in timeline.spans if span.duration_ms == 0]


def _panel(title: str, rows: list[list[Span]], marks: list[Span], y: int, scale: float) -> list[str]:
    end_ms = max(span.end_ms for row in rows for span in row)
    busy_ms = sum(span.duration_ms for row in rows for span in row)
    idle = 1 - busy_ms / (end_ms * len(rows))
    told = f"{title}: {format_seconds(end_ms / 1e3)}, {idle:.0%} idle"
    parts = [f'<text class="title" x="{_GUTTER}" y="{y + 16}">{escape(told)}</text>']
    for stage, row in enumerate(rows):
        top = y + _HEAD + stage * _ROW
        parts.append(f'<text x="{_GUTTER - 8}" y="{top + 15}" text-anchor="end">stage {stage}</text>')
        parts.append(
            f'<rect class="idle" x="{_GUTTER}" y="{top}" width="{end_ms * scale:.2f}" height="{_ROW - 2}"/>'
        )
        parts += [_cell(span, top, scale) for span in row]
    for mark in marks:
        x, top, foot = _GUTTER + mark.start_ms * scale, y + _HEAD, y + _HEAD + _ROW * len(rows)
        line = f'<line class="mark" x1="{x:.2f}" x2="{x:.2f}" y1="{top}" y2="{foot}">'
        said = ", ".join([mark.name, *(f"{key}={value}" for key, value in mark.info.items())])
        parts.append(f"{line}<title>{escape(said)}</title></line>")
    return parts


def _cell(span: Span, top: int, scale: float) -> str:
    kind, number = span.name[0], span.name[1:]
    x, width = _GUTTER + span.start_ms * scale, span.duration_ms * scale
    # Neighbours differ a little, so that a long row can be counted.
    light = 62 + 9 * (int(number) % 2)
    title = (
        f"{span.name}: {format_seconds(span.duration_ms / 1e3)} from {format_seconds(span.start_ms / 1e3)}"
    )
    shape = (
        f'<rect class="cell" x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_ROW - 2}" '
        f'fill="hsl({_HUES[kind]} 65% {light}%)"><title>{title}</title></rect>'
    )
    if width < 7 * len(number):
        return shape
    return f'{shape}<text class="n" x="{x + width / 2:.2f}" y="{top + 14}">{number}</text>'


def _axis(total_ms: float, foot: int) -> list[str]:
    parts = []
    for ms, label in ticks(total_ms):
        x = _GUTTER + ms / total_ms * _PLOT
        parts.append(
            f'<line class="tick" x1="{x:.2f}" x2="{x:.2f}" y1="{_HEAD}" y2="{foot}"/>'
            f'<text class="small" x="{x:.2f}" y="{foot + 14}" text-anchor="middle">{label}</text>'
        )
    return parts
