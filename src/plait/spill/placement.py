"""Where segments go in memory that is partly full, and what has to leave for them; pure.

Free gaps are taken first, the smallest that fits. Where none does, a run of neighbours leaves: of all runs
that make enough room, the one whose members are missed last. Placing one segment at a time can cut
the room that the next would need, so where that fails they are packed side by side instead: then whatever
fits into the memory between what must stay is placed, whatever order its parts were in.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from plait.spill.arena import Range, Space

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Occupant(Generic[Key]):
    """A segment that may leave."""

    key: Key
    place: Range
    loss: tuple[float, ...]
    """What losing it costs; compared item by item, the larger is the worse."""


@dataclass(frozen=True, kw_only=True)
class Plan(Generic[Key]):
    """Where each one goes, and who leaves."""

    places: dict[Key, int]
    leaving: tuple[Key, ...]


def place(
    space: Space, sizes: Mapping[Key, int], occupants: Iterable[Occupant[Key]], *, pack: bool = True
) -> Plan[Key] | None:
    """A place for every size, where need be instead of occupants; None where what must stay is in the way."""
    largest_first = sorted(sizes.items(), key=lambda item: -item[1])
    ordered = sorted(occupants, key=lambda occupant: occupant.place)
    return _one_by_one(space, largest_first, ordered) or (
        _packed(space, largest_first, ordered) if pack else None
    )


def _one_by_one(
    space: Space, sizes: Sequence[tuple[Key, int]], occupants: Sequence[Occupant[Key]]
) -> Plan[Key] | None:
    trial, places = space.copy(), {}
    staying, leaving = list(occupants), []
    for key, size in sizes:
        start = trial.find(size)
        if start is None:
            window = _window(trial, size, staying)
            if window is None:
                return None
            out = [occupant for occupant in staying if _overlap(occupant.place, window)]
            for occupant in out:
                trial.free(occupant.place[0], occupant.place[1] - occupant.place[0])
            leaving += out
            staying = [occupant for occupant in staying if occupant not in out]
            start = window[0]
        trial.take(start, size)
        places[key] = start
    return Plan(places=places, leaving=tuple(occupant.key for occupant in leaving))


def _window(space: Space, size: int, occupants: Sequence[Occupant[Key]]) -> Range | None:
    """The range whose occupants are missed least; it begins where a gap or a neighbour ends.

    Any other range can be moved down until it does, and has then no more occupants than before.
    """
    best: tuple[tuple[float, ...], Range] | None = None
    for first, last in _runs(space, occupants):
        inside = [occupant for occupant in occupants if first <= occupant.place[0] < last]
        low = 0
        for start in [first, *(occupant.place[1] for occupant in inside)]:
            window = start, start + size
            if window[1] > last:
                break
            while inside[low].place[1] <= start:
                low += 1
            out = []
            for occupant in inside[low:]:
                if occupant.place[0] >= window[1]:
                    break
                out.append(occupant)
            loss = (*max(occupant.loss for occupant in out), sum(o.place[1] - o.place[0] for o in out))
            if best is None or loss < best[0]:
                best = loss, window
    return None if best is None else best[1]


def _packed(
    space: Space, sizes: Sequence[tuple[Key, int]], occupants: Sequence[Occupant[Key]]
) -> Plan[Key] | None:
    runs = _runs(space, occupants)
    filled = [first for first, _ in runs]
    places = {}
    for key, size in sizes:
        for i, (_, last) in enumerate(runs):
            if filled[i] + size <= last:
                places[key] = filled[i]
                filled[i] += size
                break
        else:
            return None
    taken = [(first, end) for (first, _), end in zip(runs, filled, strict=True)]
    leaving = (o.key for o in occupants if any(_overlap(o.place, part) for part in taken))
    return Plan(places=places, leaving=tuple(leaving))


def _runs(space: Space, occupants: Iterable[Occupant[Key]]) -> list[Range]:
    """The longest ranges of nothing but free room and occupants that may leave."""
    runs: list[Range] = []
    for start, end in sorted([*space.gaps(), *(occupant.place for occupant in occupants)]):
        if runs and runs[-1][1] == start:
            runs[-1] = runs[-1][0], end
        else:
            runs.append((start, end))
    return runs


def _overlap(one: Range, other: Range) -> bool:
    return one[0] < other[1] and other[0] < one[1]
