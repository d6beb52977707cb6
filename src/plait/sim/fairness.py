"""Who gets how much of what is shared: rates of flows that cross cards and links of known capacity.

The rule is that of :mod:`plait.pipeline.network`, for any flows: all rates grow together until a flow is at
its own cap, or a card or link that it uses is full. A flow that crosses two cards which others use too grows
half as fast. This is proportional fairness in simple cases, which TCP comes close to (F. Kelly, A. Maulloo,
D. Tan, J. Oper. Res. Soc. 49, 1998): who is held up twice backs off twice. (It differs where a card that
others use is not full.) Where all cross equally many, it is max-min fairness.

A flow may have many edges, as a ring all-reduce has: the same rate crosses each of them, so it grows as its
most crowded edge does, and ends where the first of them is full.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import NamedTuple


class Flow(NamedTuple):
    """What a flow uses. A resource that stands there twice is used twice."""

    edges: tuple[tuple[int, ...], ...]
    """By edge, the cards (egress and ingress of hosts) that it crosses."""
    links: tuple[int, ...] = ()
    """Links, which limit it and do not slow its growth."""
    cap: float = math.inf
    """The most that it wants."""


def rates(flows: Sequence[Flow], capacities: Mapping[int, float]) -> list[float]:
    """The rate of each flow, in the unit of the capacities. O(n log n) for n uses of resources in all."""
    uses = [[*chain.from_iterable(flow.edges), *flow.links] for flow in flows]
    users: dict[int, list[int]] = {}
    for place, its in enumerate(uses):
        for resource in its:
            if resource in users:
                users[resource].append(place)
            else:
                users[resource] = [place]
    # Users are in order, so that others are among them where the last is not the first.
    shared = {resource for resource, its in users.items() if its[0] != its[-1]}
    crossed = [max((sum(map(shared.__contains__, edge)) for edge in f.edges), default=0) for f in flows]
    weights = [1 / count if count else 1.0 for count in crossed]
    left = {resource: capacities[resource] for resource in users}
    growing = {resource: sum([weights[place] for place in its]) for resource, its in users.items()}

    # How far growth can go until a resource is full (by its number) or a flow at its cap (-1 - its place).
    # Whenever a flow stops, those that share with it can go further, never less far: old entries are early.
    limits = [(left[r] / growing[r], r) for r in users if left[r] < math.inf]
    limits += [(flow.cap / weights[i], -1 - i) for i, flow in enumerate(flows) if flow.cap < math.inf]
    heapify(limits)
    found: list[float | None] = [None] * len(flows)
    while limits:
        level, limit = heappop(limits)
        if limit < 0:
            stopped = [-1 - limit]
        else:
            stopped = [place for place in users[limit] if found[place] is None]
            if not stopped:
                continue
            now = left[limit] / growing[limit]
            if now > level:
                heappush(limits, (now, limit))
                continue
        for place in stopped:
            if found[place] is None:
                weight = weights[place]
                found[place] = rate = level * weight
                for resource in uses[place]:
                    left[resource] = max(0.0, left[resource] - rate)
                    growing[resource] -= weight
    return [math.inf if rate is None else rate for rate in found]
