"""What a run's plan and its rows say, in numbers; pure, and for whatever a file may hold."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from plait.spill.outcome import Figures, comparison

MOST_POINTS = 200
"""Of a curve: more would be slow to draw, and no easier to read."""
LARGEST = 1e15
"""Beyond it a curve has a gap: a loss that large is not one."""

Row = Mapping[str, Any]
Points = list[tuple[float, float | None]]


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where a job was to run, from when to when, as a plan's file has it."""

    job: str
    how: str
    option: str
    devices: tuple[str, ...]
    start_ms: float
    end_ms: float
    step_ms: float | None
    wire_bytes: float | None
    """What its devices send each other in a step, where the plan tells."""
    done: float | None = None
    """Of a background job, the share of its steps that is done when the last foreground job ends."""

    def track(self, device: str) -> str:
        """Where it is drawn, as :attr:`plait.strategy.WorkloadPlan.timeline` has it."""
        if self.how == "background":
            return f"{device} (background)"
        return f"{device} ({self.job})" if self.how == "alternated" else device


def placements(plan: Row) -> list[Placed]:
    """Those of the way that was taken."""
    ways = plan.get("ways")
    rows = ways[0].get("placements", []) if isinstance(ways, list) and ways else []
    found = []
    for row in rows:
        start_ms, devices = number(row.get("start_ms")) or 0.0, tuple(map(str, row.get("devices", ())))
        wire = number(row.get("wire_bytes"))
        if wire is None:
            wire = _planned_bytes(plan, str(row.get("job")), row.get("option"), len(devices))
        found.append(
            Placed(
                job=str(row.get("job")),
                how=str(row.get("how", "")),
                option=str(row.get("option", "")),
                devices=devices,
                start_ms=start_ms,
                end_ms=max(start_ms, number(row.get("end_ms")) or 0.0),
                step_ms=number(row.get("step_ms")),
                wire_bytes=wire,
                done=number(row.get("done")),
            )
        )
    return found


def _planned_bytes(plan: Row, job: str, option: object, devices: int) -> float | None:
    """As the job's comparison has it, if that is of so many devices: it is made for the whole cluster."""
    for one in plan.get("jobs", {}).get(job, {}).get("options", []):
        if (one.get("name"), one.get("devices")) == (option, devices):
            return number(one.get("wire_bytes"))
    return None


def reason(compared: Row, placed: Placed | None) -> str:
    """Why a job runs as it does: a comparison is of the job alone on the whole cluster, a plan has others."""
    alone = str(compared.get("why") or "")
    if placed is None:
        return alone
    count = len(placed.devices)
    where = f"{count} device{'s' * (count != 1)}"
    step = "" if placed.step_ms is None else f", {placed.step_ms:.4g} ms a step"
    if placed.how == "background":
        share = "" if placed.done is None else f", {placed.done:.0%} of its steps by when the foreground ends"
        share += ", counted from when both have started" if share else ""
        takes = "" if placed.step_ms is None else f" (a step takes {placed.step_ms:.4g} ms of that)"
        return f"it is in the background, and gets what is idle on {', '.join(placed.devices)}{takes}{share}"
    if placed.how == "alternated":
        return f"it takes turns with others on {where}{step} by itself"
    options: Iterable[Row] = compared.get("options", [])
    chosen: Row = next((one for one in options if one.get("name") == compared.get("chosen")), {})
    if (placed.option, count) == (chosen.get("name"), chosen.get("devices")):
        return alone
    return f"{placed.option} on {where}, beside others{step}; alone on all: {alone}"


def foretold(facts: Row) -> list[tuple[str, str, str]]:
    """What jobs that spill took: what it is, what was foretold, and what was measured."""
    told = facts.get("foretold"), facts.get("measured")
    try:
        forecast, measured = (Figures(**one) for one in told if isinstance(one, Mapping))
        return comparison(forecast, measured)
    except (TypeError, ValueError):  # of another version
        return []


def number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def values(rows: Iterable[Row], name: str) -> list[float]:
    """What the rows have under a name, where it is a number."""
    found = (number(row.get(name)) for row in rows)
    return [value for value in found if value is not None]


def median(rows: Iterable[Row], name: str) -> float | None:
    """The median of what the rows have under a name; None where none has it."""
    found = values(rows, name)
    return statistics.median(found) if found else None


def points(rows: Iterable[Row], name: str) -> Points:
    """By step, what the rows have under a name; a gap where it is not a finite number."""
    return [(float(row["step"]), number(row.get(name))) for row in rows if name in row]


def wire_bytes(rows: Iterable[Row]) -> Points:
    """By step, what was sent: as the rows say, or by how much their count of all that was sent has grown."""
    found: Points = []
    before: dict[object, float] = {}
    for row in rows:
        sent, total = number(row.get("wire_bytes")), number(row.get("sent_bytes"))
        if sent is None and total is not None:
            attempt = row.get("attempt")
            sent = max(0.0, total - before.get(attempt, 0.0))
            before[attempt] = total
        if sent is not None:
            found.append((float(row["step"]), sent))
    return found


def thinned(curve: Points, most: int = MOST_POINTS) -> tuple[Points, int]:
    """A curve in at most so many points, and how many steps each is the mean of; fit to be drawn."""
    width = max(1, math.ceil(len(curve) / most))
    found: Points = []
    for begin in range(0, len(curve), width):
        part = curve[begin : begin + width]
        kept = [y for _, y in part if y is not None and abs(y) <= LARGEST]
        # Nine digits: values that differ in the last bit alone have no axis between them.
        mean = float(f"{math.fsum(kept) / len(kept):.9g}") if kept else None
        found.append((part[-1][0], mean))
    return found, width
