"""Which cores each host may use, as people write it: ``0-1``, or host by host ``0:1:0-1``."""

from __future__ import annotations

import os
from collections.abc import Sequence

from plait.errors import UsageError

_WORKS = "0-1 for all hosts, or host by host 0:1"
_LAST_CORE = 8191
"""What Linux can count to."""


def parse_cores(cores: str | Sequence[Sequence[int]] | None, hosts: int) -> list[tuple[int, ...] | None]:
    """The cores of each host; None means all. One entry holds for every host."""
    if cores is None:
        return [None] * hosts
    lists = [_read(part) for part in cores.split(":")] if isinstance(cores, str) else cores
    sets = [tuple(sorted(set(entry))) for entry in lists]
    if len(sets) not in (1, hosts):
        raise UsageError(f"cores are given for {len(sets)} of {hosts} hosts", setting="cores", works=_WORKS)
    usable = os.sched_getaffinity(0)
    for entry in sets:
        if not entry:
            raise UsageError("a host without a core cannot run", setting="cores", works=_WORKS)
        if strange := sorted(set(entry) - usable):
            raise UsageError(
                f"cores {strange} do not exist or may not be used here (usable: {sorted(usable)})",
                setting="cores",
                works=",".join(str(core) for core in sorted(usable)),
            )
    return list(sets) if len(sets) == hosts else [sets[0]] * hosts


def _read(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not (last.isdecimal() and int(first) <= int(last))):
            raise UsageError(f"{part!r} is neither a core nor a range of them", setting="cores", works=_WORKS)
        if int(last or first) > _LAST_CORE:
            raise UsageError(f"no machine has a core {last or first}", setting="cores", works=_WORKS)
        found += range(int(first), int(last or first) + 1)
    return found
