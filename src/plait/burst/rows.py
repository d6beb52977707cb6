"""Which rows of the global batch a rank has at a width, and which must move where widths differ.

A block of width w runs on ranks 0 to w-1. Rows are cut as `torch.tensor_split` cuts them: in order, sizes
that differ by one at most, the larger ones first (32 over 3: 11, 11, 10). Where the next block is wider or
narrower, only rows that change their rank move:

    rows      0   1   2   3   4   5   6   7
    width 2   rank 0        | rank 1
    width 3   rank 0    | rank 1    | rank 2       row 3 moves from 0 to 1, rows 6 and 7 from 1 to 2
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from plait.errors import UsageError


@dataclass(frozen=True, slots=True)
class Move:
    """Rows ``start`` to ``end`` (the row after the last) go from one rank to another."""

    source: int
    target: int
    start: int
    end: int

    @property
    def rows(self) -> int:
        """How many rows move."""
        return self.end - self.start


def shares(batch: int, width: int) -> tuple[int, ...]:
    """How many rows each of the ranks has."""
    if not 1 <= width <= batch:
        raise UsageError(
            f"{batch} rows cannot be shared by {width} devices", setting="width", works=f"1 to {batch}"
        )
    least, more = divmod(batch, width)
    return (least + 1,) * more + (least,) * (width - more)


def begin(batch: int, width: int, rank: int) -> int:
    """The first row of a rank; of rank ``width``, and of all beyond, the row after the last."""
    least, more = divmod(batch, width)
    place = min(rank, width)
    return place * least + min(place, more)


@lru_cache(maxsize=4096)
def moves(batch: int, before: int, after: int) -> tuple[Move, ...]:
    """What moves where blocks of width ``before`` and ``after`` meet, in the order of the rows."""
    found = []
    row = source = target = 0
    while row < batch:
        ends = begin(batch, before, source + 1), begin(batch, after, target + 1)
        end = min(ends)
        if source != target:
            found.append(Move(source, target, row, end))
        source, target, row = source + (end == ends[0]), target + (end == ends[1]), end
    return tuple(found)
