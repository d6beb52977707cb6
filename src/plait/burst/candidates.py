"""The widths that a planner chooses from: a fixed row of numbers, of which as many are taken as there are
devices.

Because the row does not depend on the number of devices, all that can be planned with some can be with more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from plait.errors import UsageError
from plait.units import parse_whole

_MANY_BLOCKS = 64


def candidates(blocks: int, devices: int, batch: int) -> tuple[int, ...]:
    """The widths for a chain of so many blocks: every number up to 16, then four for each doubling.

    For more than 64 blocks, every number up to 8, then two for each doubling: 8, 12, 16, 24, 32, ...
    """
    every, steps = (16, 4) if blocks <= _MANY_BLOCKS else (8, 2)
    most = min(devices, batch)
    found = list(range(1, min(every, most) + 1))
    base = every
    while base <= most:
        found += [base + base * step // steps for step in range(1, steps + 1)]
        base *= 2
    return tuple(width for width in found if width <= most)


def checked(widths: Sequence[int], devices: int, batch: int) -> tuple[int, ...]:
    """Widths that a user gave, sorted; those beyond the devices or the rows are left out."""
    if not isinstance(widths, Iterable) or isinstance(widths, str):
        raise UsageError(f"widths is {widths!r}", setting="widths", works="[1, 2, 4]")
    given = sorted({parse_whole(width, setting="widths") for width in widths})
    found = tuple(width for width in given if width <= min(devices, batch))
    if not found:
        raise UsageError(
            f"none of the widths {given} can be had with {devices} devices and {batch} rows",
            setting="widths",
            works="1, 2, 4",
        )
    return found
