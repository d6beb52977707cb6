"""Many cases in one picture: a line each, with its figure, its spread and its bound on a common axis.

Made for what a plot of curves cannot show: figures that have names in place of an x. The picture is SVG and
loads nothing from anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import ClassVar

from plait.destination import write_text
from plait.errors import UsageError
from plait.page import text
from plait.plot import written

_WIDTH, _LEFT, _RIGHT = 1120, 470, 118
_TOP, _ROW, _GROUP, _BOTTOM = 44, 18, 24, 46
_LETTERS = 66
"""So many letters of a name fit beside the picture; all of them are in its tooltip."""
# Told apart by most eyes (Okabe and Ito, 2008), and by their shape.
_COLOURS = {True: "#0072b2", False: "#d55e00", None: "#777777"}
_STYLE = """
.forest text{font:12px system-ui,sans-serif;fill:#222}.forest .head{font-size:14px;font-weight:600}
.forest .group{font-weight:600}.forest .grid{stroke:#e4e4e4}.forest .one{stroke:#444}
.forest .spread{stroke-width:2;opacity:.55}.forest .bound{stroke:#000;stroke-width:2}
.forest .note{font-size:11px;fill:#555}
""".strip()


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One line of the picture."""

    group: str
    name: str
    value: float
    low: float | None = None
    """From here to ``high`` its rounds lie."""
    high: float | None = None
    bound: float | None = None
    holds: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Forest:
    """Marks on a logarithmic axis; a :class:`plait.page.Section`. A line stands at 1.

    What is not above zero has no place on such an axis: it is counted below the picture.
    """

    title: str
    x: str
    marks: Sequence[Mark]
    """Those of a group stand together."""
    style: ClassVar[str] = ""
    script: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if not self._drawn:
            raise UsageError(
                f"picture {self.title!r} has no mark above zero", setting="marks", works="a mark above zero"
            )

    @property
    def _drawn(self) -> list[Mark]:
        return [mark for mark in self.marks if mark.value > 0 and math.isfinite(mark.value)]

    @property
    def html(self) -> str:
        """The picture."""
        return self.svg()

    def save(self, path: str | Path) -> None:
        """Write the picture to an ``.svg`` file."""
        write_text(Path(path), self.svg() + "\n", setting="picture")

    def svg(self) -> str:
        """The picture."""
        drawn = self._drawn
        scale = _Scale.over([1.0, *(edge for mark in drawn for edge in _edges(mark))])
        parts, y = [], _TOP
        for group, marks in groupby(drawn, key=lambda mark: mark.group):
            y += _GROUP
            parts.append(f'<text class="group" x="8" y="{y - 5}">{text(group)}</text>')
            for mark in marks:
                y += _ROW
                parts += _line(mark, y - _ROW / 2, scale)
        foot, height = y + 4, y + _BOTTOM
        left_out = len(self.marks) - len(drawn)
        note = f"; {left_out} of {len(self.marks)} are not above zero, and not drawn" if left_out else ""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" class="forest" width="{_WIDTH}" height="{height}" '
                f'viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{text(self.title)}">',
                f'<style>{_STYLE}</style><rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
                f'<text class="head" x="8" y="22">{text(self.title)}</text>',
                *_axis(scale, foot),
                *parts,
                f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{foot + 36}" text-anchor="middle">'
                f"{text(self.x)}</text>",
                f'<text class="note" x="8" y="{foot + 36}">● holds ■ falls short ◆ informs | bound'
                f"{text(note)}</text>",
                "</svg>",
            ]
        )


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """A logarithmic axis over the picture's width."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float]) -> _Scale:
        low, high = min(values), max(values)
        return cls(low=min(low / 1.05, 0.9), high=max(high * 1.05, 1.1))

    def place(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return _LEFT + share * (_WIDTH - _RIGHT - _LEFT)

    @property
    def ticks(self) -> list[float]:
        """1, 2 and 5 times powers of ten, as many as have room; powers of ten alone where there are many."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for factors in ((1, 2, 5), (1,)):
            found = [
                factor * 10.0**power
                for power in powers
                for factor in factors
                if self.low <= factor * 10.0**power <= self.high
            ]
            if len(found) <= 12:
                break
        return found[:: max(1, len(found) // 12)] or [1.0]


def _edges(mark: Mark) -> list[float]:
    """Where something of it is drawn."""
    edges = (mark.value, mark.low, mark.high, mark.bound)
    return [edge for edge in edges if edge is not None and edge > 0]


def _axis(scale: _Scale, foot: float) -> list[str]:
    parts = []
    for value in dict.fromkeys([*scale.ticks, 1.0]):
        x = f"{scale.place(value):.1f}"
        kind = "one" if value == 1.0 else "grid"
        parts.append(f'<line class="{kind}" x1="{x}" x2="{x}" y1="{_TOP}" y2="{foot}"/>')
        parts.append(f'<text x="{x}" y="{foot + 16}" text-anchor="middle">{written(value)}</text>')
    return parts


def _line(mark: Mark, y: float, scale: _Scale) -> list[str]:
    colour = _COLOURS[mark.holds]
    name = mark.name if len(mark.name) <= _LETTERS else mark.name[: _LETTERS - 1] + "…"
    parts = [f'<text x="18" y="{y + 4:.1f}"><title>{text(mark.name)}</title>{text(name)}</text>']
    if mark.low is not None and mark.high is not None and mark.low > 0:
        low, high = scale.place(mark.low), scale.place(mark.high)
        parts.append(f'<path class="spread" stroke="{colour}" d="M{low:.1f} {y:.1f}H{high:.1f}"/>')
    if mark.bound is not None and mark.bound > 0:
        at = f"{scale.place(mark.bound):.1f}"
        parts.append(f'<line class="bound" x1="{at}" x2="{at}" y1="{y - 6:.1f}" y2="{y + 6:.1f}"/>')
    x = scale.place(mark.value)
    shape = {
        True: f"M{x - 4:.1f} {y:.1f}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0",
        False: f"M{x - 4:.1f} {y - 4:.1f}h8v8h-8z",
        None: f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z",
    }[mark.holds]
    told = f"<title>{text(mark.name)}: {written(mark.value)}</title>"
    parts.append(f'<path class="mark" fill="{colour}" d="{shape}">{told}</path>')
    parts.append(f'<text x="{_WIDTH - _RIGHT + 8}" y="{y + 4:.1f}">{mark.value:.3g}</text>')
    return parts
