"""Which questions a run with little time asks, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import zip_longest


def turns(names: Iterable[str], known_s: Mapping[str, float]) -> tuple[str, ...]:
    """The questions in rounds, so that little time still asks something of everything.

    A round takes one question of each family (what stands before the first dash of a name): of those
    left the one that took the fewest seconds before, and those of which nobody knows it last.
    """
    families: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: (name not in known_s, known_s.get(name, 0.0), name)):
        families.setdefault(name.split("-", 1)[0], []).append(name)
    rounds = zip_longest(*(families[family] for family in sorted(families)))
    return tuple(name for each in rounds for name in each if name is not None)


def why_not(spent_s: float, known_s: float | None, budget_s: float | None) -> str | None:
    """Why a question is not asked after so many seconds of a budget; None where it is.

    One that took longer before than what is left is not begun; one of which nobody knows it is, as long
    as anything is left.
    """
    if budget_s is None:
        return None
    left_s = max(budget_s - spent_s, 0.0)
    if known_s is not None and known_s > left_s:
        return f"took {known_s:.0f} s before, and {left_s:.0f} of {budget_s:.0f} s were left"
    return None if left_s > 0 else f"the {budget_s:.0f} s were over"
