"""Curves as SVG: axes, linear or logarithmic, several series with markers, a legend, lines to compare with.

plot = Plot(title="Scaling", x="devices", y="step ms", log_x=True, series=(
    Series(name="data", points=((1, 96.0), (2, 51.5))),
    Series(name="ideal", points=((1, 96.0), (2, 48.0)), dashed=True)))
plot.save("scaling.svg")                        # or as a section of a plait.page.page
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

from plait.destination import write_text
from plait.errors import UsageError
from plait.page import text

_WIDTH, _HEIGHT = 760, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 16, 40, 52
_LEGEND_ROW = 20
# Dark enough on white, and told apart by most eyes (Okabe and Ito, 2008); markers help the others.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#b8860b", "#000000", "#7b3294")
_STYLE = """
.plotted text{font:12px system-ui,sans-serif;fill:#222}.plotted .head{font-size:14px;font-weight:600}
.plotted .grid{stroke:#e4e4e4}.plotted .frame{fill:none;stroke:#888}.plotted .series{fill:none;stroke-width:2}
.plotted .line{stroke:#666;stroke-dasharray:2 4}.plotted .band{fill:#8883}
.plotted .note{font-size:11px;fill:#555}.plotted .back{fill:#fff}
@media(prefers-color-scheme:dark){.plotted text{fill:#ddd}.plotted .note{fill:#aaa}
.plotted .back{fill:#16191f}.plotted .grid{stroke:#2a2f38}.plotted .frame{stroke:#778}
.plotted .line{stroke:#aaa}.plotted [stroke="#000000"]{stroke:#fff}.plotted [fill="#000000"]{fill:#fff}
.plotted [stroke="#7b3294"]{stroke:#b57edc}.plotted [fill="#7b3294"]{fill:#b57edc}}
""".strip()


@dataclass(frozen=True, kw_only=True)
class Series:
    """A curve through points (x, y); a y that is None or not finite leaves a gap."""

    name: str
    points: Sequence[tuple[float, float | None]]
    dashed: bool = False
    place: int | None = None
    """Which of the colours and markers it has; None takes its place among the series."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """A line across the plot at one y, or a band between two: a published claim, a limit."""

    name: str
    y: float | tuple[float, float]

    @property
    def edges(self) -> tuple[float, float]:
        """Its lowest and its highest y."""
        return (min(self.y), max(self.y)) if isinstance(self.y, tuple) else (self.y, self.y)


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Curves over one x axis; a :class:`plait.page.Section`."""

    title: str
    x: str
    """What is written along the x axis, with its unit."""
    y: str
    series: Sequence[Series]
    levels: Sequence[Level] = ()
    log_x: bool = False
    log_y: bool = False
    from_zero: bool = True
    """Whether a linear y axis begins at 0 where no value is below."""
    style: ClassVar[str] = ""
    script: ClassVar[str] = ""

    def __post_init__(self) -> None:
        xs, ys = self._values
        if not ys:
            raise UsageError(
                f"plot {self.title!r} has no point to draw", setting="series", works="a point in a series"
            )
        for logarithmic, values, axis in ((self.log_x, xs, "x"), (self.log_y, ys, "y")):
            if logarithmic and min(values) <= 0:
                raise UsageError(
                    f"plot {self.title!r} has {axis} = {min(values):g} on a logarithmic axis",
                    setting=f"log_{axis}",
                    works="False, or values above zero",
                )

    @property
    def html(self) -> str:
        """The picture."""
        return self.svg()

    def save(self, path: str | Path) -> None:
        """Write the picture to an ``.svg`` file."""
        write_text(Path(path), self.svg() + "\n", setting="plot")

    def svg(self) -> str:
        """The picture, which loads nothing from anywhere."""
        xs, ys = self._values
        linear = ys + ([0.0] if self.from_zero and min(ys) >= 0 else [])
        across = _Axis.over(xs, _LEFT, _WIDTH - _RIGHT, self.log_x, values=sorted(set(xs)))
        up = _Axis.over(ys if self.log_y else linear, _HEIGHT - _BOTTOM, _TOP, self.log_y)
        legend, height = self._legend()
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" class="plotted" width="{_WIDTH}" height="{height}" '
                f'viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{text(self.title)}">',
                f"<style>{_STYLE}</style>",
                f'<rect class="back" width="{_WIDTH}" height="{height}" fill="#fff"/>',
                f'<text class="head" x="{_LEFT}" y="22">{text(self.title)}</text>',
                *self._axes(across, up),
                *self._levels(up),
                *(part for place, series in self._placed for part in _curve(series, place, across, up)),
                *legend,
                "</svg>",
            ]
        )

    @property
    def _values(self) -> tuple[list[float], list[float]]:
        kept = [
            (x, y) for series in self.series for x, y in series.points if y is not None and math.isfinite(y)
        ]
        edges = [edge for level in self.levels for edge in level.edges] if kept else []
        return [float(x) for x, _ in kept], [float(y) for _, y in kept] + edges

    def _axes(self, across: _Axis, up: _Axis) -> list[str]:
        right, foot = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        parts = []
        for value, label in across.ticks:
            x = f"{across.place(value):.1f}"
            parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP}" y2="{foot}"/>')
            parts.append(f'<text x="{x}" y="{foot + 17}" text-anchor="middle">{label}</text>')
        for value, label in up.ticks:
            y = up.place(value)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
        middle = (_TOP + foot) / 2
        return [
            *parts,
            f'<rect class="frame" x="{_LEFT}" y="{_TOP}" width="{right - _LEFT}" height="{foot - _TOP}"/>',
            f'<text x="{(_LEFT + right) / 2}" y="{foot + 38}" text-anchor="middle">{text(self.x)}</text>',
            f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">'
            f"{text(self.y)}</text>",
        ]

    def _levels(self, up: _Axis) -> list[str]:
        parts = []
        for level in self.levels:
            bottom, top = (up.place(edge) for edge in level.edges)
            width = _WIDTH - _RIGHT - _LEFT
            band = f'x="{_LEFT}" y="{top:.1f}" width="{width}" height="{bottom - top:.1f}"'
            parts.append(f'<rect class="band" {band}/>')
            for edge in sorted({bottom, top}):
                line = f'x1="{_LEFT}" x2="{_LEFT + width}" y1="{edge:.1f}" y2="{edge:.1f}"'
                parts.append(f'<line class="line" {line}/>')
            at = f'x="{_LEFT + width - 5}" y="{top - 4:.1f}" text-anchor="end"'
            parts.append(f'<text class="note" {at}>{text(level.name)}</text>')
        return parts

    @property
    def _placed(self) -> list[tuple[int, Series]]:
        """The series, each with its colour's place."""
        order = enumerate(self.series)
        return [(place if series.place is None else series.place, series) for place, series in order]

    def _legend(self) -> tuple[list[str], int]:
        """The names below the picture, in as many rows as they need, and where the last one ends."""
        parts, x, y = [], float(_LEFT), _HEIGHT + 4
        for place, series in self._placed:
            width = 40 + 6.8 * len(series.name)
            if x + width > _WIDTH and x > _LEFT:
                x, y = float(_LEFT), y + _LEGEND_ROW
            parts.append(
                f'<path class="series" stroke="{_colour(place)}"{_dashes(series)} d="M{x:.0f} {y}h24"/>'
                f'{_marker(place, x + 12, y)}<text x="{x + 30:.0f}" y="{y + 4}">{text(series.name)}</text>'
            )
            x += width
        return parts, y + 14


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """From values to places in the picture."""

    low: float
    high: float
    begin: float
    end: float
    logarithmic: bool
    ticks: tuple[tuple[float, str], ...]

    @classmethod
    def over(
        cls,
        found: Sequence[float],
        begin: float,
        end: float,
        logarithmic: bool,
        values: Sequence[float] = (),
    ) -> _Axis:
        low, high = min(found), max(found)
        if logarithmic:
            marks = _log_ticks(low, high, values)
            low, high = min(low, marks[0]), max(high, marks[-1])
            if high <= low * (1 + 1e-9):  # whose logarithms may be the same
                low, high = low / 2, high * 2
        else:
            marks = round_steps(low, high if high > low else low + 1)
            low, high = marks[0], marks[-1]
        shown = tuple((mark, written(mark)) for mark in marks)
        return cls(low=low, high=high, begin=begin, end=end, logarithmic=logarithmic, ticks=shown)

    def place(self, value: float) -> float:
        low, high, at = (
            (math.log(number) if self.logarithmic else number) for number in (self.low, self.high, value)
        )
        return self.begin + (at - low) / (high - low) * (self.end - self.begin)


def _curve(series: Series, place: int, across: _Axis, up: _Axis) -> list[str]:
    pieces: list[list[tuple[float, float]]] = [[]]
    markers = []
    for x, y in series.points:
        if y is None or not math.isfinite(y):
            pieces.append([])
            continue
        at = across.place(x), up.place(y)
        pieces[-1].append(at)
        told = f"<title>{text(series.name)}: {written(y)} at {written(x)}</title>"
        markers.append(_marker(place, *at, told))
    drawn = " ".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in piece) for piece in pieces if piece)
    return [f'<path class="series" stroke="{_colour(place)}"{_dashes(series)} d="{drawn}"/>', *markers]


def _colour(place: int) -> str:
    return _COLOURS[place % len(_COLOURS)]


def _dashes(series: Series) -> str:
    return ' stroke-dasharray="6 4"' if series.dashed else ""


def _marker(place: int, x: float, y: float, told: str = "") -> str:
    """A shape of its own for each of the first few series, as colour alone may not tell them apart."""
    shapes = (
        f"M{x - 4:.1f} {y:.1f}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0",
        f"M{x - 3.5:.1f} {y - 3.5:.1f}h7v7h-7z",
        f"M{x:.1f} {y - 4.5:.1f}l4.5 8h-9z",
        f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z",
        f"M{x:.1f} {y + 4.5:.1f}l4.5 -8h-9z",
    )
    return f'<path class="marker" fill="{_colour(place)}" d="{shapes[place % len(shapes)]}">{told}</path>'


def round_steps(low: float, high: float, most: int = 7) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that enclose two different values."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _log_ticks(low: float, high: float, values: Sequence[float]) -> list[float]:
    """The values themselves where they are few, as numbers of devices are; else 1, 2, 5 or powers of ten."""
    if 0 < len(values) <= 10 and _apart(values):
        return list(values)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors: Iterable[int] = (1, 2, 5) if last - first <= 3 else (1,)
    marks = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    kept = [mark for mark in marks if low * 0.999 <= mark <= high * 1.001]
    below = max((mark for mark in marks if mark <= low * 1.001), default=low)
    above = min((mark for mark in marks if mark >= high * 0.999), default=high)
    return sorted({below, *kept, above})


def _apart(values: Sequence[float]) -> bool:
    """Whether no two labels at these values would touch on a logarithmic axis."""
    if len(values) == 1:
        return True
    whole = math.log(values[-1] / values[0])
    return all(math.log(b / a) > 0.06 * whole for a, b in pairwise(values))


def written(value: float) -> str:
    """A number as it stands beside an axis: ``0.25``, ``20,000``, ``5e-6``."""
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:,.6g}")
