"""The rows of one timeline in a picture: its title, how busy it was, its tracks and its counters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from plait.page import text
from plait.timeline.span import Sample, Span, lanes, natural
from plait.timeline.utilisation import IDLE, busy_tracks, coarser
from plait.units import format_seconds

GUTTER = 170
"""Where the time axis begins."""
_ROW, _SPACE, _LINE, _TITLE = 18, 8, 40, 24
_STEPS = 2_000


class Panel:
    """Collects the parts of the picture from top to bottom; ``y`` is where the next row goes.

    ``scale`` is in units of the picture a millisecond, and ``start_ms`` the time at its left edge.
    """

    def __init__(self, *, y: float, start_ms: float, end_ms: float, scale: float) -> None:
        self.y = y
        self._start_ms, self._end_ms, self._scale = start_ms, end_ms, scale
        self.labels: list[str] = []
        self.shapes: list[str] = []
        self.names: list[str] = []

    def title(self, words: str) -> None:
        """What the panel shows."""
        self.labels.append(f'<text class="title" x="{GUTTER}" y="{self.y + 14}">{text(words)}</text>')
        self.y += _TITLE

    def busy(self, spans: Sequence[Span], tracks: Collection[str]) -> None:
        """The share of the tracks that is busy, over time."""
        found = [(at_ms, count / len(tracks)) for at_ms, count in busy_tracks(spans, self._end_ms, tracks)]
        steps = coarser(found, self._start_ms, self._end_ms, _STEPS)
        self._label("busy", self.y + 13)
        self._small(f"of {len(tracks)} track" + "s" * (len(tracks) > 1), self.y + 27)
        foot = self.y + _LINE - 2
        corners = [
            f"{self._x(at_ms):.5f} {foot}"
            for at_ms in (steps[0][0] if steps else self._start_ms, self._end_ms)
        ]
        line = "L".join([corners[0], *self._steps(steps, 0.0, 1.0), corners[1]])
        place = f'data-top="{self.y + 2}" data-height="{_LINE - 4}"'
        self.shapes.append(f'<path class="busy" {place} d="M{line}Z"/>')
        self.y += _LINE + _SPACE

    def track(self, track: str, spans: Sequence[Span], colours: Mapping[str, str]) -> None:
        """The track's spans; nested ones below their parents, overlapping ones below each other."""
        self._label(track, self.y + 13)
        for lane in lanes(spans):
            for span, depth in lane:
                self._span(span, self.y + depth * _ROW, colours[span.name])
            self.y += (1 + max(depth for _, depth in lane)) * _ROW
        self.y += _SPACE

    def counters(self, samples: Sequence[Sample]) -> None:
        """Each counter as a line of steps: a value holds until the next one."""
        found: defaultdict[tuple[str, str], list[Sample]] = defaultdict(list)
        for sample in samples:
            found[sample.track, sample.name].append(sample)
        for key in sorted(found, key=lambda key: (natural(key[0]), natural(key[1]))):
            values = [sample.value for sample in found[key]]
            low, high = min(0.0, *values), max(0.0, *values)
            self._label(" ".join(key), self.y + 13)
            self._small(f"{low:.4g} to {high:.4g}", self.y + 27)
            steps = [(sample.at_ms, sample.value) for sample in found[key]]
            points = " ".join(self._steps(steps, low, high))
            self.shapes.append(f'<polyline class="count" points="{points}"/>')
            self.y += _LINE + _SPACE

    def _x(self, at_ms: float) -> float:
        return (at_ms - self._start_ms) * self._scale

    def _label(self, words: str, y: float) -> None:
        # The end of a long track name tells it from its neighbours, so the beginning is cut.
        cut = words if len(words) <= 24 else "…" + words[-23:]
        self.labels.append(f'<text x="{GUTTER - 8}" y="{y}" text-anchor="end">{text(cut)}</text>')

    def _small(self, words: str, y: float) -> None:
        self.labels.append(f'<text class="small" x="{GUTTER - 8}" y="{y}" text-anchor="end">{words}</text>')

    def _steps(self, steps: Sequence[tuple[float, float]], low: float, high: float) -> list[str]:
        """Two points a step, at its begin and its end."""
        points = []
        ends = [at_ms for at_ms, _ in steps[1:]] + [self._end_ms] * bool(steps)
        for (at_ms, value), end_ms in zip(steps, ends, strict=True):
            level = (value - low) / (high - low) if high > low else 0.0
            y = self.y + (1 - level) * (_LINE - 4) + 2
            points += [f"{self._x(at_ms):.5f} {y:.1f}", f"{self._x(end_ms):.5f} {y:.1f}"]
        return points

    def _span(self, span: Span, y: float, colour: str) -> None:
        x, width = self._x(span.start_ms), span.duration_ms * self._scale
        told = [f"{span.name}: {format_seconds(span.duration_ms / 1e3)}"]
        told.append(f"from {format_seconds((span.start_ms - self._start_ms) / 1e3)}")
        told += [f"{key}={value}" for key, value in span.info.items()]
        title = f"<title>{text(', '.join(told))}</title>"
        bottom = y + _ROW - 2
        if width == 0:
            line = f'<line class="mark {colour}" x1="{x:.5f}" x2="{x:.5f}" y1="{y}" y2="{bottom}">'
            self.shapes.append(f"{line}{title}</line>")
            return
        name = text(span.name)
        size = f'width="{width:.5f}" height="{_ROW - 2}" data-name="{name}"'
        self.shapes.append(f'<rect class="span {colour}" x="{x:.5f}" y="{y}" {size}>{title}</rect>')
        if width > 6 * len(span.name) + 6 and span.name != IDLE:
            self.names.append(f'<text class="name" x="{x + 3:.3f}" y="{y + 12}">{name}</text>')
