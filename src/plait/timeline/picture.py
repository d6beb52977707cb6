"""A timeline as a picture: SVG, and a page around it with zoom. Neither loads anything from anywhere."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from html import escape

from plait.timeline.span import Sample, Span, by_track, extent, lanes, natural
from plait.units import format_seconds

_WIDTH, _GUTTER, _PLOT = 1200, 170, 1010
_ROW, _SPACE, _COUNTER, _HEAD = 18, 8, 40, 26
_MOST = 20_000

_STYLE = """
text{font:12px system-ui,sans-serif;fill:#222}.small{font-size:11px;fill:#555}
.name{font-size:10px;pointer-events:none}.tick{stroke:#ddd}
.span{stroke:#0005;stroke-width:.5;vector-effect:non-scaling-stroke}
.count{fill:none;stroke:#357;vector-effect:non-scaling-stroke}
.mark{stroke:currentColor;stroke-width:2;vector-effect:non-scaling-stroke}
""".strip()

# The picture's x runs from 0 to its width; what scales with zoom sits in the group "scaled". Ticks keep
# their places and get new numbers; names are shown wherever their span has become wide enough.
_SCRIPT = """
const plot=document.querySelector('.plot'),W=+plot.getAttribute('width'),total=+plot.dataset.ms;
const scaled=plot.querySelector('.scaled'),ticks=[...document.querySelectorAll('.time')];
const names=[...plot.querySelectorAll('.name')];
let zoom=1,left=0,held=null;
function unit(ms){
  const [n,u]=ms>=1e3?[ms/1e3,' s']:ms>=1||ms<=0?[ms,' ms']:[ms*1e3,' µs'];return +n.toPrecision(5)+u}
function show(){
  left=Math.min(Math.max(left,0),W-W/zoom);
  scaled.setAttribute('transform',`scale(${zoom} 1) translate(${-left} 0)`);
  for(const t of ticks)t.textContent=unit((left+t.dataset.x/zoom)*total/W);
  for(const n of names){const x=(n.dataset.x-left)*zoom,w=n.dataset.w*zoom,seen=Math.min(x+w,W)-Math.max(x,0);
    n.style.display=seen>6*n.textContent.length+6?'':'none';n.setAttribute('x',Math.max(x,0)+3)}
}
function at(e){
  const box=plot.querySelector('rect').getBoundingClientRect();return (e.clientX-box.left)*W/box.width}
plot.addEventListener('wheel',e=>{e.preventDefault();const x=at(e),t=left+x/zoom;
  zoom=Math.min(Math.max(zoom*Math.exp(-e.deltaY/300),1),1e5);left=t-x/zoom;show()},{passive:false});
plot.addEventListener('pointerdown',e=>{held=left+at(e)/zoom;plot.setPointerCapture(e.pointerId)});
plot.addEventListener('pointermove',e=>{if(held!==null){left=held-at(e)/zoom;show()}});
plot.addEventListener('pointerup',()=>held=null);
plot.addEventListener('dblclick',()=>{zoom=1;left=0;show()});
""".strip()


def page(spans: Sequence[Span], samples: Sequence[Sample]) -> str:
    """A whole page with the picture: the wheel zooms, dragging moves, a double click shows all."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>timeline</title>'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
        "<style>body{margin:1em;background:#fff}body>svg{max-width:100%;height:auto}"
        ".plot{cursor:grab;touch-action:none}</style>"
        f"</head><body>{svg(spans, samples)}<script>{_SCRIPT}</script></body></html>\n"
    )


def svg(spans: Sequence[Span], samples: Sequence[Sample]) -> str:
    """The picture: tracks as rows, time from left to right, a colour a name, counters below."""
    start_ms, end_ms = _extent(spans, samples)
    total_ms = end_ms - start_ms
    longest = sorted(spans, key=lambda span: -span.duration_ms)[:_MOST]
    colours = {name: i for i, name in enumerate(sorted({span.name for span in spans}))}
    canvas = _Canvas(start_ms, _PLOT / total_ms if total_ms else 1.0, colours)
    for track, its_spans in by_track(longest).items():
        canvas.track(track, its_spans)
    for (track, name), its_samples in _counters(samples).items():
        canvas.counter(f"{track} {name}", its_samples, end_ms)
    foot = canvas.y
    legend, height = _legend(spans, colours, foot + 20)
    if len(longest) < len(spans):
        height += 20
        text = f"{len(spans) - len(longest)} shorter spans are not drawn"
        legend.append(f'<text class="small" x="{_GUTTER}" y="{height - 6}">{text}</text>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}"><style>{_STYLE}{_fills(colours)}</style>',
            f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
            *_axis(total_ms, foot),
            *canvas.labels,
            f'<svg class="plot" x="{_GUTTER}" y="0" width="{_PLOT}" height="{foot}" data-ms="{total_ms!r}">',
            f'<rect width="{_PLOT}" height="{foot}" fill="#fff" fill-opacity="0"/>',
            '<g class="scaled">',
            *canvas.shapes,
            "</g>",
            *canvas.names,
            "</svg>",
            *legend,
            "</svg>",
        ]
    )


class _Canvas:
    """Collects the parts of the picture from top to bottom; ``y`` is where the next row goes."""

    def __init__(self, start_ms: float, scale: float, colours: dict[str, int]) -> None:
        self._start_ms, self._scale, self._colours = start_ms, scale, colours
        self.labels: list[str] = []
        self.shapes: list[str] = []
        self.names: list[str] = []
        self.y = _HEAD

    def _x(self, at_ms: float) -> float:
        return (at_ms - self._start_ms) * self._scale

    def _label(self, text: str, y: float) -> None:
        # The end of a long track name tells it from its neighbours, so the beginning is cut.
        cut = text if len(text) <= 24 else "…" + text[-23:]
        self.labels.append(f'<text x="{_GUTTER - 8}" y="{y}" text-anchor="end">{_text(cut)}</text>')

    def track(self, track: str, spans: Sequence[Span]) -> None:
        """The track's spans; nested ones below their parents, overlapping ones below each other."""
        self._label(track, self.y + 13)
        for lane in lanes(spans):
            for span, depth in lane:
                self._span(span, self.y + depth * _ROW)
            self.y += (1 + max(depth for _, depth in lane)) * _ROW
        self.y += _SPACE

    def _span(self, span: Span, y: float) -> None:
        x, width = self._x(span.start_ms), span.duration_ms * self._scale
        told = [f"{span.name}: {format_seconds(span.duration_ms / 1e3)}"]
        told.append(f"from {format_seconds((span.start_ms - self._start_ms) / 1e3)}")
        told += [f"{key}={value}" for key, value in span.info.items()]
        title = f"<title>{_text(', '.join(told))}</title>"
        colour = f"f{self._colours[span.name]}"
        bottom = y + _ROW - 2
        if width == 0:
            line = f'<line class="mark {colour}" x1="{x:.3f}" x2="{x:.3f}" y1="{y}" y2="{bottom}">'
            self.shapes.append(f"{line}{title}</line>")
            return
        size = f'width="{width:.3f}" height="{_ROW - 2}"'
        self.shapes.append(f'<rect class="span {colour}" x="{x:.3f}" y="{y}" {size}>{title}</rect>')
        hidden = "" if width > 6 * len(span.name) + 6 else ' style="display:none"'
        self.names.append(
            f'<text class="name" x="{x + 3:.3f}" y="{y + 12}" data-x="{x:.3f}" data-w="{width:.3f}"{hidden}>'
            f"{_text(span.name)}</text>"
        )

    def counter(self, label: str, samples: Sequence[Sample], end_ms: float) -> None:
        """A counter as a line of steps: a value holds until the next one."""
        low = min(0.0, min(sample.value for sample in samples))
        high = max(0.0, max(sample.value for sample in samples))
        self._label(label, self.y + 13)
        self.labels.append(
            f'<text class="small" x="{_GUTTER - 8}" y="{self.y + 27}" text-anchor="end">'
            f"{low:.4g} to {high:.4g}</text>"
        )
        points = []
        for sample, following in zip(samples, [*samples[1:], None], strict=True):
            level = (sample.value - low) / (high - low) if high > low else 0.0
            y = self.y + (1 - level) * (_COUNTER - 4) + 2
            until = end_ms if following is None else following.at_ms
            points.append(f"{self._x(sample.at_ms):.3f},{y:.1f} {self._x(until):.3f},{y:.1f}")
        self.shapes.append(f'<polyline class="count" points="{" ".join(points)}"/>')
        self.y += _COUNTER + _SPACE


def _text(text: str) -> str:
    # XML has no way to write most control characters, not even escaped.
    return escape("".join(c if c >= " " else "\N{REPLACEMENT CHARACTER}" for c in text))


def _extent(spans: Sequence[Span], samples: Sequence[Sample]) -> tuple[float, float]:
    times = [*extent(spans)] if spans else []
    times += [sample.at_ms for sample in samples]
    return min(times, default=0.0), max(times, default=0.0)


def _counters(samples: Sequence[Sample]) -> dict[tuple[str, str], list[Sample]]:
    found: defaultdict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        found[sample.track, sample.name].append(sample)
    return {key: found[key] for key in sorted(found, key=lambda key: (natural(key[0]), natural(key[1])))}


def _fills(colours: dict[str, int]) -> str:
    # Steps of the golden angle keep neighbouring names far apart on the colour wheel.
    hues = {i: f"hsl({i * 137.508 % 360:.0f} 60% 70%)" for i in colours.values()}
    return "".join(f".f{i}{{fill:{hue};color:{hue}}}" for i, hue in hues.items())


def ticks(total_ms: float) -> list[tuple[float, str]]:
    """Round times from 0 on, eight at most or so, each with what is written beside it."""
    if not total_ms:
        return []
    rough = total_ms / 8
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    times = [i * step for i in range(int(total_ms / step) + 1)]
    return [(ms, format_seconds(ms / 1e3) if ms else "0") for ms in times]


def _axis(total_ms: float, foot: float) -> list[str]:
    parts = []
    for ms, label in ticks(total_ms):
        x = ms / total_ms * _PLOT
        parts.append(
            f'<line class="tick" x1="{_GUTTER + x:.2f}" x2="{_GUTTER + x:.2f}" y1="{_HEAD - 6}" y2="{foot}"/>'
            f'<text class="small time" x="{_GUTTER + x:.2f}" y="14" text-anchor="middle" data-x="{x:.2f}">'
            f"{label}</text>"
        )
    return parts


def _legend(spans: Sequence[Span], colours: dict[str, int], y: float) -> tuple[list[str], float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        sums[span.name] += span.duration_ms
    parts = []
    x = float(_GUTTER)
    for name, colour in colours.items():
        text = f"{name} {format_seconds(sums[name] / 1e3)}" if sums[name] else name
        width = 7 * len(text) + 34
        if x + width > _WIDTH and x > _GUTTER:
            x, y = float(_GUTTER), y + 20
        parts.append(
            f'<rect class="f{colour}" x="{x:.0f}" y="{y - 10:.0f}" width="12" height="12"/>'
            f'<text x="{x + 17:.0f}" y="{y:.0f}">{_text(text)}</text>'
        )
        x += width
    return parts, y + 12
