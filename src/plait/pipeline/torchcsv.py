"""Orders in the CSV of `torch.distributed.pipelining`, both ways.

torch keeps a schedule as a file with a row a rank and a cell an action, ``2F0`` for the forward of
micro-batch 0 on stage 2; an empty cell is a moment of waiting. Here a rank has one stage.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from plait.destination import write_text
from plait.errors import FileError, UsageError
from plait.pipeline.orders import Order, listed
from plait.pipeline.validity import check

_CELL = re.compile(r"(\d+)([A-Z_]+)(\d*)")


def dumps(order: Order) -> str:
    """The order as torch's compute-only CSV; a rule has no list to write."""
    if order.steps is None:
        raise UsageError(
            f"{order} decides while it runs and has no list for a CSV",
            setting="order",
            works="kfkb(...), depth(...) or per_link_depth(...)",
        )
    text = io.StringIO()
    writer = csv.writer(text)
    for stage in range(order.stages):
        writer.writerow(f"{stage}{kind}{micro_batch}" for kind, micro_batch in order.actions(stage) or ())
    return text.getvalue()


def loads(text: str, *, source: str = "CSV") -> Order:
    """The order of a compute-only CSV, checked to come to an end."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text))]
    steps = [_steps(stage, row, source) for stage, row in enumerate(row for row in rows if row)]
    try:
        order = listed(steps)
        check(order)
    except UsageError as error:
        raise FileError(f"{source}: {error.what}", setting=error.setting, works=error.works) from None
    return order


def save(order: Order, path: str | Path) -> None:
    """Write the order as torch's CSV."""
    write_text(Path(path), dumps(order), setting="CSV file")


def load(path: str | Path) -> Order:
    """Read torch's CSV; an error names the file, the row and the cell."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(
            f"{path} cannot be read: {error}", setting="FILE", works="a schedule in CSV"
        ) from None
    return loads(text, source=str(path))


def _steps(stage: int, row: list[str], source: str) -> str:
    counts = {"F": 0, "B": 0}
    letters = []
    for cell in filter(None, row):
        where = f"{source}: row {stage + 1}: cell {cell!r}"
        match = _CELL.fullmatch(cell)
        if match is None or match[2] not in counts or not match[3]:
            raise FileError(
                f"{where} is no forward or backward", setting="CSV", works=f"{stage}F0 or {stage}B0"
            )
        if int(match[1]) != stage:
            raise FileError(
                f"{where} is of stage {match[1]}, but a rank has one stage, and this is rank {stage}",
                setting="CSV",
                works=f"{stage}{match[2]}{match[3]}",
            )
        kind = match[2]
        if int(match[3]) != counts[kind]:
            raise FileError(
                f"{where} comes where micro-batch {counts[kind]} is due: each kind runs in their order",
                setting="CSV",
                works=f"{stage}{kind}{counts[kind]}",
            )
        counts[kind] += 1
        letters.append(kind)
    return "".join(letters)
