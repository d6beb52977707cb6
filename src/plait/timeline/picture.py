"""Timelines as a picture: SVG, and a page around it with zoom. Neither loads anything from anywhere.

On a page the wheel zooms, dragging moves, dragging with shift zooms into what was marked, a double click
shows all, and the pointer tells what it is over. Several timelines stand above each other on one time
axis, each beginning at zero: the predicted above the measured.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, ClassVar

from plait.errors import UsageError
from plait.page import text
from plait.timeline.panel import GUTTER, PLOT, Panel
from plait.timeline.span import Sample, Span, busy_ms, by_track, extent
from plait.timeline.utilisation import IDLE
from plait.units import format_seconds

if TYPE_CHECKING:
    from plait.timeline.timeline import Timeline

_WIDTH, _HEAD = 1200, 26
_MOST = 20_000
"""Shorter spans beyond so many are not drawn: a browser would be slow with them."""
_NAMES = 8
"""With more names than that, all of a kind (``F12``: ``F``; ``sync conv3``: ``sync``) share a colour."""

_STYLE = """
.timeline text{font:12px system-ui,sans-serif;fill:#222}.timeline .title{font-weight:600}
.timeline .small{font-size:11px;fill:#555}.timeline .tick{stroke:#ddd}
.timeline .name{font-size:10px;pointer-events:none}
.timeline .span{stroke:#0005;stroke-width:.5;vector-effect:non-scaling-stroke}
.timeline .busy{fill:#3572;stroke:#357;vector-effect:non-scaling-stroke}
.timeline .count{fill:none;stroke:#357;vector-effect:non-scaling-stroke}
.timeline .mark{stroke:currentColor;stroke-width:2;vector-effect:non-scaling-stroke}
""".strip()
_PAGE_STYLE = """
.timeline .plot{cursor:grab;touch-action:pan-y;outline:none}
.timeline .plot:focus-visible .ground{stroke:#357}
.timeline .cursor{stroke:#c33;pointer-events:none}.timeline .marked{fill:#c332;pointer-events:none}
.timeline .span:hover{stroke:#000;stroke-width:1.5}
.tip{position:fixed;z-index:1;display:none;max-width:40em;padding:.2em .6em;background:#222;color:#fff;
border-radius:4px;font:13px system-ui,sans-serif;pointer-events:none;white-space:pre-line}
""".strip()


@dataclass(frozen=True, kw_only=True)
class Gantt:
    """Timelines above each other on one axis, by title; a :class:`plait.page.Section`."""

    timelines: Mapping[str, Timeline]
    counted: Collection[str] | None = None
    """The tracks whose utilisation is drawn; None for all."""
    style: ClassVar[str] = _PAGE_STYLE

    def __post_init__(self) -> None:
        if not self.timelines:
            works = '{"predicted": timeline}'
            raise UsageError("there is no timeline to draw", setting="timelines", works=works)

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
        return _drawn(
            {title: _Shown.of(timeline) for title, timeline in self.timelines.items()}, self.counted
        )


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


def _drawn(shown: Mapping[str, _Shown], counted: Collection[str] | None) -> str:
    total_ms = max(one.total_ms for one in shown.values())
    every = [span for one in shown.values() for span in one.spans]
    kinds = _kinds({span.name for span in every})
    places = {kind: place for place, kind in enumerate(sorted(set(kinds.values())))}
    colours = {name: f"f{places[kind]}" for name, kind in kinds.items()}
    longest = {id(span) for span in sorted(every, key=lambda span: -span.duration_ms)[:_MOST]}
    panels: list[Panel] = []
    y = float(_HEAD)
    for title, one in shown.items():
        scale = PLOT / total_ms if total_ms else 1.0
        panel = Panel(y=y, start_ms=one.start_ms, end_ms=one.end_ms, scale=scale)
        tracks = [track for track in by_track(one.spans) if counted is None or track in counted]
        if title:
            panel.title(_headline(title, shown, tracks))
        if tracks and one.total_ms:
            panel.busy(one.spans, tracks)
        rows = by_track(span for span in one.spans if id(span) in longest)
        for track in sorted(rows, key=lambda track: track not in tracks):  # what counts comes first
            panel.track(track, rows[track], colours)
        panel.counters(one.samples)
        panels.append(panel)
        y = panel.y + 6
    legend, height = _legend(every, kinds, places, y + 14)
    if len(longest) < len(every):
        height += 20
        said = f"{len(every) - len(longest)} shorter spans are not drawn"
        legend.append(f'<text class="small" x="{GUTTER}" y="{height - 6:g}">{said}</text>')
    # Styles hold on a whole page, where another picture may give the same class another colour.
    scope = f"t{zlib.crc32(repr(places).encode())}"
    return "\n".join(_framed(panels, legend, total_ms, y, height, scope, _fills(places, scope)))


def _framed(
    panels: Sequence[Panel],
    legend: list[str],
    total_ms: float,
    foot: float,
    height: float,
    scope: str,
    fills: str,
) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="timeline {scope}" '
        f'width="{_WIDTH}" height="{height:g}" viewBox="0 0 {_WIDTH} {height:g}">',
        f"<style>{_STYLE}{fills}</style>",
        f'<rect width="{_WIDTH}" height="{height:g}" fill="#fff"/>',
        f'<g class="axis" data-foot="{foot:g}">',
        *_axis(total_ms, foot),
        "</g>",
        *(label for panel in panels for label in panel.labels),
        f'<svg class="plot" x="{GUTTER}" y="0" width="{PLOT}" height="{foot:g}" data-ms="{total_ms!r}">',
        f'<rect class="ground" width="{PLOT}" height="{foot:g}" fill="#fff" fill-opacity="0"/>',
        '<g class="scaled">',
        *(shape for panel in panels for shape in panel.shapes),
        '</g><g class="names">',
        *(name for panel in panels for name in panel.names),
        "</g></svg>",
        *legend,
        "</svg>",
    ]


def _headline(title: str, shown: Mapping[str, _Shown], tracks: Sequence[str]) -> str:
    """The title, the length, how far it is from the timeline below it, and how busy the tracks were."""
    one = shown[title]
    said = [f"{title}: {format_seconds(one.total_ms / 1e3)}"]
    others = list(shown.items())
    below = others[others.index((title, one)) + 1 :]
    if below and below[0][1].total_ms:
        said.append(f"{one.total_ms / below[0][1].total_ms - 1:+.1%} of {below[0][0]}")
    if tracks and one.total_ms:
        found = by_track(span for span in one.spans if span.name != IDLE)
        mean = sum(busy_ms(found.get(track, [])) for track in tracks) / len(tracks) / one.total_ms
        said.append(f"{mean:.0%} busy")
    if one.dropped:
        said.append(f"{one.dropped} spans were not kept")
    return ", ".join(said)


def _kinds(names: Collection[str]) -> dict[str, str]:
    """What shares a colour: each name by itself, or where there are many, their first words."""
    if len(names) <= _NAMES:
        return {name: name for name in names}
    return {name: kind_of(name) for name in names}


def kind_of(name: str) -> str:
    """The first word of a span's name, without its number: ``F`` of ``F12``, ``sync`` of ``sync conv3``."""
    match = re.match(r"[^\W\d_]+", name)
    return name if match is None else match[0]


def _fills(places: Mapping[str, int], scope: str) -> str:
    # Steps of the golden angle keep neighbouring names far apart on the colour wheel.
    hues = {kind: f"hsl({place * 137.508 % 360:.0f} 60% 70%)" for kind, place in places.items()}
    if IDLE in hues:
        hues[IDLE] = "#f2f2f2"
    return "".join(f".{scope} .f{places[kind]}{{fill:{hue};color:{hue}}}" for kind, hue in hues.items())


def _axis(total_ms: float, foot: float) -> list[str]:
    parts = []
    for ms, label in ticks(total_ms):
        x = GUTTER + ms / total_ms * PLOT
        parts.append(
            f'<line class="tick" x1="{x:.2f}" x2="{x:.2f}" y1="{_HEAD - 6}" y2="{foot:g}"/>'
            f'<text class="small time" x="{x:.2f}" y="14" text-anchor="middle">{label}</text>'
        )
    return parts


def _legend(
    spans: Sequence[Span], kinds: Mapping[str, str], places: Mapping[str, int], y: float
) -> tuple[list[str], float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        sums[kinds[span.name]] += span.duration_ms
    parts = []
    x = float(GUTTER)
    for kind, place in places.items():
        said = f"{kind} {format_seconds(sums[kind] / 1e3)}" if sums[kind] else kind
        width = 7 * len(said) + 34
        if x + width > _WIDTH and x > GUTTER:
            x, y = float(GUTTER), y + 20
        parts.append(
            f'<rect class="f{place}" x="{x:.0f}" y="{y - 10:.0f}" width="12" height="12"/>'
            f'<text x="{x + 17:.0f}" y="{y:.0f}">{text(said)}</text>'
        )
        x += width
    return parts, y + 12
