"""What ``plait plan --strategy burst`` shows: the frontier of plans, and the one that is chosen."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from plait.errors import UsageError

if TYPE_CHECKING:
    from plait.burst.burst_plan import BurstPlan
    from plait.burst.frontier import Frontier
    from plait.page import Section
    from plait.profile import Profile

_ROWS = 16
"""Of a longer frontier, the table shows so many plans."""
_COLUMNS = ("step ms", "speed-up", "device ms", "amplification", "blocks x width")
_PLOT = (64, 14)
"""Columns and lines."""


def planned(profile: Profile, **settings: Any) -> Frontier:
    """The frontier of a profile; settings are those of :func:`plait.burst.plan`."""
    from plait.burst.planner import plan

    try:
        return plan(profile, **settings)
    except UsageError as error:
        if error.setting != "deadline_ms":
            raise
        # Here it is read with a unit, and without one as seconds.
        works = f"{error.works}ms" if str(error.works)[:1].isdigit() else error.works
        raise UsageError(error.what, setting="--deadline", works=works) from None


def widths_of(text: str) -> list[int]:
    """Widths to choose from, as in ``1,2,4,8``."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{text!r} is no list of widths", setting="--widths", works="1,2,4,8") from None


def milliseconds(text: str) -> float:
    """A deadline."""
    from plait.units import parse_seconds

    return 1e3 * parse_seconds(text, setting="--deadline")


def print_frontier(frontier: Frontier) -> None:
    """As JSON."""
    from plait.cli.console import print_json

    chosen = frontier.chosen
    forecast = chosen.forecast
    assert forecast is not None
    print_json(
        {
            "format": "plait.frontier.burst/1",
            "strategy": "burst",
            "step_ms": forecast.step_ms,
            "device_ms": forecast.device_ms,
            "single_ms": forecast.single_ms,
            "amplification": forecast.amplification,
            "devices": chosen.devices,
            "batch": chosen.batch,
            "blocks": list(chosen.blocks),
            "widths": list(chosen.widths),
            "idle_ms": list(forecast.idle_ms),
            "gap": frontier.gap,
            "frontier": [list(point) for point in frontier.points],
            "remarks": list(frontier.remarks),
        }
    )


def show(frontier: Frontier, profile: Profile) -> None:
    """As a table and a plot in characters."""
    from plait.cli.console import print_table

    chosen = frontier.plans.index(frontier.chosen)
    rows = []
    for place in _shown(len(frontier), chosen):
        rows.append(["→" if place == chosen else "", *_row(frontier.plans[place])])
    name = profile.model or "profile"
    title = f"{name}: batch {frontier.fastest.batch} on up to {frontier.fastest.devices} devices"
    print_table(title, ["", *_COLUMNS], rows)
    lines = [""] if len(frontier) == 1 else ["", *plot(frontier.points, chosen), ""]
    exact = "these are all plans worth having"
    below = frontier.gap / (1 + frontier.gap)
    near = f"no plan has both figures more than {100 * below:.1f}% below all of these"
    count = "1 plan" if len(frontier) == 1 else f"{len(frontier)} plans"
    lines.append(f"{count}; {exact if frontier.gap == 0 else near}")
    lines += [f"note: {remark}" for remark in frontier.remarks]
    sys.stdout.write("\n".join(lines) + "\n")


def _row(made: BurstPlan) -> list[str]:
    forecast = made.forecast
    assert forecast is not None
    return [
        f"{forecast.step_ms:.4g}",
        f"{forecast.speedup:.2f}",
        f"{forecast.device_ms:.4g}",
        f"{forecast.amplification:.2f}",
        _runs(made),
    ]


def _shown(count: int, chosen: int) -> list[int]:
    """The plans that the table shows, the chosen one and both ends among them."""
    if count <= _ROWS:
        return list(range(count))
    return sorted({round(k * (count - 1) / (_ROWS - 1)) for k in range(_ROWS)} | {chosen})


def _runs(made: BurstPlan, most: int = 6) -> str:
    """The widths, blocks of one width together: ``13x8 3x1``."""
    found: list[list[int]] = []
    for width in made.widths:
        if found and found[-1][1] == width:
            found[-1][0] += 1
        else:
            found.append([1, width])
    text = " ".join(f"{count}x{width}" for count, width in found[:most])
    return text + (f" ... ({len(found)} runs)" if len(found) > most else "")


def plot(points: Sequence[tuple[float, float]], chosen: int) -> list[str]:
    """The points in characters, both figures on a logarithmic scale; the chosen one stands out."""
    columns, lines = _PLOT
    places = []
    for axis, size in ((0, columns), (1, lines)):
        logs = [math.log(max(point[axis], 1e-9)) for point in points]
        low, high = min(logs), max(logs)
        places.append([round((value - low) / (high - low or 1) * (size - 1)) for value in logs])
    grid = [[" "] * columns for _ in range(lines)]
    for x, y in zip(*places, strict=True):
        grid[lines - 1 - y][x] = "*"
    grid[lines - 1 - places[1][chosen]][places[0][chosen]] = "@"
    top, bottom = (f"{pick(point[1] for point in points):.4g}" for pick in (max, min))
    edge = max(len(top), len(bottom))
    left = [top.rjust(edge), *[" " * edge] * (lines - 2), bottom.rjust(edge)]
    found = ["device ms"] + [f"{mark} |{''.join(row).rstrip()}" for mark, row in zip(left, grid, strict=True)]
    first, last = (f"{pick(point[0] for point in points):.4g}" for pick in (min, max))
    found.append(f"{' ' * edge} +{'-' * columns}")
    found.append(f"{' ' * edge}  {first}{last.rjust(columns - len(first))}  step ms (@ is the plan)")
    return found


def sections(frontier: Frontier) -> list[Section]:
    """For a page: the frontier, and its plot."""
    from plait.page import Heading, Paragraph, Table
    from plait.plot import Plot, Series

    chosen = frontier.plans.index(frontier.chosen)
    shown = _shown(len(frontier), chosen)
    rows = [_row(frontier.plans[place]) for place in shown]
    return [
        *(Paragraph(f"Note: {remark}.") for remark in frontier.remarks),
        Heading("Plans worth having"),
        Table(columns=_COLUMNS, rows=rows, chosen=shown.index(chosen)),
        Plot(
            title="The faster the step, the more device time it takes",
            x="step, ms",
            y="device time, ms",
            log_x=True,
            log_y=True,
            series=[
                Series(name="plans", points=frontier.points),
                Series(name="chosen", points=[frontier.points[chosen]]),
            ],
        ),
    ]
