"""What will be needed, in which order: L. A. Belady, "A study of replacement algorithms for a
virtual-storage computer", IBM Systems Journal 5(2), 1966: what is needed last leaves first. Training knows
its order, so the rule that was a yardstick there can be followed here; pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from plait.spill.segment import Mode, Request

NEVER = math.inf


@dataclass(frozen=True)
class Use:
    """The next use of a segment."""

    position: int
    """Which unit from now."""
    mode: Mode
    nbytes: int = 0
    """The room that it will take, where it is not defined yet."""


class Foresight:
    """The units to come; what is needed by none of them is needed last."""

    def __init__(self, units: Iterable[Sequence[Request]] = ()) -> None:
        self.units = [tuple(unit) for unit in units]
        self._uses: dict[str, Use] | None = None

    def begin(self, unit: Mapping[str, Mode]) -> None:
        """A unit that asks for these has come: it is no longer to come."""
        for i, other in enumerate(self.units):
            if unit.keys() == {request.key for request in other}:
                del self.units[i]
                self._uses = None
                return

    def uses(self, waiting: Iterable[Mapping[str, Mode]] = ()) -> Mapping[str, Use]:
        """The next use of every segment that is needed, in their order; those waited for come first."""
        if self._uses is None:
            self._uses = {}
            for position, requests in enumerate(self.units):
                for request in requests:
                    if request.key not in self._uses:
                        self._uses[request.key] = Use(position, request.mode, request.nbytes)
        first = {key: Use(-1, mode) for unit in waiting for key, mode in unit.items()}
        return {**first, **self._uses, **first} if first else self._uses


def kept(sizes: Iterable[tuple[str, int]], room_bytes: int) -> set[str]:
    """Of segments in the order in which they are needed, those that fit until the first that does not."""
    keep = set()
    for key, size in sizes:
        room_bytes -= size
        if room_bytes < 0:
            break
        keep.add(key)
    return keep
