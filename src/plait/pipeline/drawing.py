"""An order drawn in text: a row a stage, a column a moment, where every action takes one (or some) of them.

    stage 0  F0 F1 .. B0 F2 B1 .. B2
    stage 1  .. F0 B0 F1 B1 F2 B2 ..

Transfers take no time in a drawing; `plait.pipeline.events` knows better, and `grid` draws what it says.
"""

from __future__ import annotations

from plait.pipeline.orders import Order
from plait.pipeline.validity import check, ready_kinds
from plait.units import parse_whole


def draw(order: Order, *, forward: int = 1, backward: int = 1) -> str:
    """The drawing; a forward and a backward are so many columns wide."""
    lengths = {
        "F": parse_whole(forward, setting="forward"),
        "B": parse_whole(backward, setting="backward"),
    }
    check(order)
    done = [(0, 0)] * order.stages
    rows: list[list[str]] = [[] for _ in range(order.stages)]
    now = 0
    while any(order.choices(stage, *done[stage]) for stage in range(order.stages)):
        # What is done at this moment: actions that were drawn up to here; a longer one is not done yet.
        visible = [_done_by(rows[stage], now) for stage in range(order.stages)]
        for stage, row in enumerate(rows):
            if len(row) > now:
                continue
            action = order.next(stage, *done[stage], ready_kinds(order, stage, visible))
            if action is None:
                row.append("..")
                continue
            row += [f"{action.kind}{action.micro_batch}"] * lengths[action.kind]
            forwards, backwards = done[stage]
            done[stage] = (forwards + 1, backwards) if action.kind == "F" else (forwards, backwards + 1)
        now += 1
    columns = max(map(len, rows))
    width = max(len(cell) for row in rows for cell in row)
    label = len(f"stage {order.stages - 1}")
    return "\n".join(
        f"{f'stage {stage}':{label}}  "
        + " ".join(f"{cell:{'.' if cell == '..' else ''}<{width}}" for cell in row)
        for stage, row in enumerate(row + [".."] * (columns - len(row)) for row in rows)
    )


def _done_by(row: list[str], now: int) -> tuple[int, int]:
    """Forwards and backwards of a row that have ended before a column."""
    ended = {cell for place, cell in enumerate(row[:now]) if place + 1 >= len(row) or row[place + 1] != cell}
    return sum(cell[0] == "F" for cell in ended), sum(cell[0] == "B" for cell in ended)
