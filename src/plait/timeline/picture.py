"""Timelines as a picture: SVG, and a page around it with zoom. Neither loads anything from anywhere.

On a page the wheel zooms, dragging moves, dragging with shift zooms into what was marked, a double click
shows all, and the pointer tells what it is over; keys and buttons do the same. Several timelines stand above
each other on one time axis, each beginning at zero: the predicted above the measured, and below each how many
of its tracks are busy. Pictures are dark where whoever looks at them prefers that.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, ClassVar

from plait.errors import UsageError
from plait.page import text
from plait.timeline import palette
from plait.timeline.panel import GUTTER, Panel
from plait.timeline.span import Sample, Span, busy_ms, by_track, extent
from plait.timeline.utilisation import IDLE
from plait.units import format_seconds

if TYPE_CHECKING:
    from plait.timeline.timeline import Timeline

HOW_TO = (
    "The wheel zooms, dragging moves, dragging with shift zooms into a part, a double click shows all; point "
    "at a span to learn what it is. By keyboard: + and - zoom, left and right move, n and p go along the "
    "spans, up and down to other tracks, Home shows all."
)
"""What a reader of a page can do, in words."""

WIDTH, NARROW = 1200, 960
"""Of a picture on a page, and of one by itself."""
_HEAD, _MARGIN = 26, 20
_NARROWEST = 400
_MOST = 20_000
"""Shorter spans beyond so many are not drawn: a browser would be slow with them."""
_NAMES = 8
"""With more names than that, all of a kind (``F12``: ``F``; ``sync conv3``: ``sync``) share a colour."""
MARKS = "marks"
"""What has no length shares a colour: it is told apart by where it is, and what the pointer tells of it."""

_STYLE = """
.timeline text{font:12px system-ui,sans-serif;fill:#222}.timeline .title{font-weight:600}
.timeline .small{font-size:11px;fill:#555}.timeline .tick{stroke:#ddd}.timeline .back{fill:#fff}
.timeline .name{font-size:10px;pointer-events:none}
.timeline .span{stroke:#0005;stroke-width:.5;vector-effect:non-scaling-stroke}
.timeline .busy{fill:#3572;stroke:#357;vector-effect:non-scaling-stroke}
.timeline .count{fill:none;stroke:#357;vector-effect:non-scaling-stroke}
.timeline .mark{stroke:currentColor;stroke-width:2;vector-effect:non-scaling-stroke}
@media(prefers-color-scheme:dark){.timeline text{fill:#eee}.timeline .small{fill:#aaa}
.timeline .tick{stroke:#333a44}.timeline .back{fill:#16191f}.timeline .span{stroke:#fff5}
.timeline .busy{fill:#8bf3;stroke:#8bf}.timeline .count{stroke:#8bf}}
""".strip()
_PAGE_STYLE = """
.timeline .plot{cursor:grab;touch-action:pan-y;outline:none}
.timeline .plot:focus-visible .ground{stroke:#38c;stroke-width:2}
.timeline .cursor{stroke:#c33;pointer-events:none}.timeline .marked{fill:#c332;pointer-events:none}
.timeline .span:hover{stroke:#000;stroke-width:1.5}
.timeline .span.chosen,.timeline .mark.chosen{stroke:#c33;stroke-width:2.5}
.zoom{margin:.8em 0 -.6em}.zoom button{font:13px system-ui,sans-serif;min-width:2.2em;margin-right:.3em}
.tip{position:fixed;z-index:1;display:none;max-width:40em;padding:.2em .6em;background:#222;color:#fff;
border-radius:4px;font:13px system-ui,sans-serif;pointer-events:none;white-space:pre-line}
@media(prefers-color-scheme:dark){.timeline .span:hover{stroke:#fff}.tip{background:#eee;color:#111}
.timeline .cursor,.timeline .span.chosen,.timeline .mark.chosen{stroke:#f77}.timeline .marked{fill:#f772}}
""".strip()


@dataclass(frozen=True, kw_only=True)
class Gantt:
    """Timelines above each other on one axis, by title; a :class:`plait.page.Section`."""

    timelines: Mapping[str, Timeline]
    counted: Collection[str] | None = None
    """The tracks whose utilisation is drawn; None for all."""
    first: Sequence[str] = ()
    """Names that have the first colours, one each and in this order, whatever else is drawn."""
    compared: bool = True
    """Whether of two timelines it is told how much longer one is."""
    width: int = WIDTH
    """Letters keep their size."""
    style: ClassVar[str] = _PAGE_STYLE

    def __post_init__(self) -> None:
        if not self.timelines:
            works = '{"predicted": timeline}'
            raise UsageError("there is no timeline to draw", setting="timelines", works=works)
        if self.width < _NARROWEST:
            what = f"a picture of {self.width} is too narrow"
            raise UsageError(what, setting="width", works=f"{_NARROWEST} or more")

    @property
    def html(self) -> str:
        """The picture."""
        return self.svg()

    @property
    def script(self) -> str:
        """What lets a reader zoom, move and ask."""
        return files("plait.timeline").joinpath("picture.js").read_text(encoding="utf-8").strip()

    def svg(self) -> str:
        """The picture: tracks as rows, time from left to right, a colour a name, counters below."""
        shown = {title: _Shown.of(timeline) for title, timeline in self.timelines.items()}
        return _drawn(self, shown)


def ticks(total_ms: float) -> list[tuple[float, str]]:
    """Round times from 0 on, eight at most or so, each with what is written beside it."""
    if not total_ms:
        return []
    rough = total_ms / 8
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    times = [i * step for i in range(int(total_ms / step) + 1)]
    return [(ms, format_seconds(ms / 1e3) if ms else "0") for ms in times]


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """What is read of a timeline, once."""

    spans: tuple[Span, ...]
    samples: tuple[Sample, ...]
    dropped: int
    start_ms: float
    end_ms: float

    @classmethod
    def of(cls, timeline: Timeline) -> _Shown:
        spans, samples = timeline.spans, timeline.samples
        times = [*extent(spans)] if spans else []
        times += [sample.at_ms for sample in samples]
        begin, end = min(times, default=0.0), max(times, default=0.0)
        return cls(spans=spans, samples=samples, dropped=timeline.dropped, start_ms=begin, end_ms=end)

    @property
    def total_ms(self) -> float:
        return self.end_ms - self.start_ms


def _drawn(asked: Gantt, shown: Mapping[str, _Shown]) -> str:
    counted, width = asked.counted, asked.width
    plot = width - GUTTER - _MARGIN
    total_ms = max(one.total_ms for one in shown.values())
    every = [span for one in shown.values() for span in one.spans]
    kinds = _kinds(every, asked.first)
    places = _places(set(kinds.values()), asked.first)
    colours = {name: f"f{places[kind]}" for name, kind in kinds.items()}
    longest = {id(span) for span in sorted(every, key=lambda span: -span.duration_ms)[:_MOST]}
    panels: list[Panel] = []
    y = float(_HEAD)
    for title, one in shown.items():
        scale = plot / total_ms if total_ms else 1.0
        panel = Panel(y=y, start_ms=one.start_ms, end_ms=one.end_ms, scale=scale)
        tracks = [track for track in by_track(one.spans) if counted is None or track in counted]
        if title:
            panel.title(_headline(title, shown, tracks, asked.compared))
        rows = by_track(span for span in one.spans if id(span) in longest)
        for track in sorted(rows, key=lambda track: track not in tracks):  # what counts comes first
            panel.track(track, rows[track], colours)
        if tracks and one.total_ms:
            panel.busy(one.spans, tracks)
        panel.counters(one.samples)
        panels.append(panel)
        y = panel.y + 6
    legend, height = _legend(every, kinds, places, y + 14, width)
    if len(longest) < len(every):
        height += 20
        said = f"{len(every) - len(longest)} shorter spans are not drawn"
        legend.append(f'<text class="small" x="{GUTTER}" y="{height - 6:g}">{said}</text>')
    # Styles hold on a whole page, where another picture may give the same class another colour.
    scope = f"t{zlib.crc32(repr(places).encode())}"
    titles = text(", ".join(title for title in shown if title))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="timeline {scope}" role="group" '
        f'aria-label="timeline{": " * bool(titles)}{titles}" '
        f'width="{width}" height="{height:g}" viewBox="0 0 {width} {height:g}">',
        f"<style>{_STYLE}{palette.rules(places, scope)}</style>{palette.stripes(places, scope)}",
        f'<rect class="back" width="{width}" height="{height:g}" fill="#fff"/>',
        f'<g class="axis" data-foot="{y:g}">',
        *_axis(total_ms, y, plot),
        "</g>",
        *(label for panel in panels for label in panel.labels),
        f'<svg class="plot" x="{GUTTER}" y="0" width="{plot}" height="{y:g}" data-ms="{total_ms!r}">',
        f'<rect class="ground" width="{plot}" height="{y:g}" fill="#fff" fill-opacity="0"/>',
        '<g class="scaled">',
        *(shape for panel in panels for shape in panel.shapes),
        '</g><g class="names">',
        *(name for panel in panels for name in panel.names),
        "</g></svg>",
        *legend,
        "</svg>",
    ]
    return "\n".join(lines)


def _headline(title: str, shown: Mapping[str, _Shown], tracks: Sequence[str], compared: bool) -> str:
    """The title, the length, how far it is from the timeline below it, and how busy the tracks were."""
    one = shown[title]
    said = [f"{title}: {format_seconds(one.total_ms / 1e3)}"]
    first, last = next(iter(shown)), list(shown)[-1]
    # Of more than two, as of a run that was stopped and gone on with, none is the whole to compare with.
    if compared and len(shown) == 2 and title == first and shown[last].total_ms:
        said.append(_compared(one.total_ms / shown[last].total_ms - 1, last))
    if tracks and one.total_ms:
        found = by_track(span for span in one.spans if span.name != IDLE)
        mean = sum(busy_ms(found.get(track, [])) for track in tracks) / len(tracks) / one.total_ms
        said.append(f"{mean:.0%} busy")
    if one.dropped:
        said.append(f"{one.dropped} spans were not kept")
    return ", ".join(said)


def _compared(more: float, other: str) -> str:
    """How much longer something is than another, in words."""
    share = f"{abs(more):.1%}"
    if share == "0.0%":
        return f"as long as {other}"
    return f"{share} {'longer' if more > 0 else 'shorter'} than {other}"


def _kinds(spans: Iterable[Span], first: Collection[str]) -> dict[str, str]:
    """What shares a colour: each name by itself, or where there are many, their first words; all marks."""
    lasting: dict[str, bool] = {}
    for span in spans:
        lasting[span.name] = lasting.get(span.name, False) or span.duration_ms > 0
    many = sum(lasting.values()) > _NAMES
    found = {name: kind_of(name) if many else name for name in lasting}
    # A kind must not be taken for a name that has a colour to itself, as "gpt" of "gpt-2 saved" for a job.
    found = {name: name if kind in first else kind for name, kind in found.items()}
    return {
        name: name if name in first or name == IDLE else kind if lasting[name] else MARKS
        for name, kind in found.items()
    }


def _places(kinds: Collection[str], first: Sequence[str]) -> dict[str, int]:
    """By kind, which colour it has: those named first, then the others by name, then marks."""
    ahead = list(dict.fromkeys(first))  # also where they are not drawn, so that a colour is always one's own
    rest = sorted(set(kinds) - set(ahead), key=lambda kind: (kind in (MARKS, IDLE), kind))
    return {kind: place for place, kind in enumerate([*ahead, *rest]) if kind in kinds}


def kind_of(name: str) -> str:
    """The first word of a span's name, without its number: ``F`` of ``F12``, ``sync`` of ``sync conv3``."""
    match = re.match(r"[^\W\d_]+", name)
    return name if match is None else match[0]


def _axis(total_ms: float, foot: float, plot: int) -> list[str]:
    parts = []
    for ms, label in ticks(total_ms):
        x = GUTTER + ms / total_ms * plot
        parts.append(
            f'<line class="tick" x1="{x:.2f}" x2="{x:.2f}" y1="{_HEAD - 6}" y2="{foot:g}"/>'
            f'<text class="small time" x="{x:.2f}" y="14" text-anchor="middle">{label}</text>'
        )
    return parts


def _legend(
    spans: Sequence[Span], kinds: Mapping[str, str], places: Mapping[str, int], y: float, most: int
) -> tuple[list[str], float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        sums[kinds[span.name]] += span.duration_ms
    parts = []
    x = float(GUTTER)
    for kind, place in places.items():
        said = f"{kind} {format_seconds(sums[kind] / 1e3)}" if sums[kind] else kind
        if kind == MARKS:
            said = f"{kind}: {', '.join(sorted(name for name, its in kinds.items() if its == MARKS))}"
        width = 7 * len(said) + 34
        if x + width > most and x > GUTTER:
            x, y = float(GUTTER), y + 20
        parts.append(
            f'<rect class="f{place}" x="{x:.0f}" y="{y - 10:.0f}" width="12" height="12"/>'
            f'<text x="{x + 17:.0f}" y="{y:.0f}">{text(said)}</text>'
        )
        x += width
    return parts, y + 12
