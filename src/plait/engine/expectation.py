"""What a step was expected to take and what it took, a line a job, for the end of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from plait.engine.figures import Placed, Row, median, placements
from plait.engine.record import Record
from plait.errors import FileError
from plait.units import format_seconds


def lines(record: Record) -> Iterator[str]:
    """Those of the jobs of which both are known."""
    try:
        placed = placements(record.plan)
    except FileError:  # a run that goes on may have lost its plan, and goes on all the same
        return
    rows = record.rows()
    found = (line(one, rows.get(one.job, ())) for one in placed)
    yield from (said for said in found if said is not None)


def line(placed: Placed, rows: Iterable[Row]) -> str | None:
    """That of one job, by the median of its steps; None where the plan or the rows do not tell."""
    took_s = median(rows, "seconds")
    # In the background a step takes what the foreground leaves it; the plan's figure is of the step alone.
    if placed.step_ms is None or took_s is None or placed.how == "background":
        return None
    waits = ", the turns of others included" if placed.how == "alternated" else ""
    expected, took = format_seconds(placed.step_ms / 1e3), format_seconds(took_s)
    return f"{placed.job}: expected {expected}, took {took} a step{waits}"
