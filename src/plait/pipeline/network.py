"""The network between the stages as a planner sees it: wires with rate and latency, hosts that share them.

    host 0          host 1                    host 2
    stage 0 --F-->  stage 1  ------F------->  stage 2
            <--B--           <-----B--------

A wire is one direction of the link between two stages that follow each other. All that leaves a host shares
its egress, and all that comes to it its ingress: a middle stage sends activations one way and gradients the
other through the same card, and that is where pipelines on thin networks really wait. Where the capacity of a
host is not given, it is taken to be that of its fastest wire, as with one card a host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from plait.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Wire:
    """One direction of a link: what one message alone would meet."""

    latency_ms: float = 0.0
    bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.latency_ms < math.inf:
            raise UsageError(f"a latency of {self.latency_ms} ms", setting="latency_ms", works="0 or more")
        if not self.bytes_per_s > 0:
            raise UsageError(f"a rate of {self.bytes_per_s} bytes/s", setting="bytes_per_s", works="above 0")


@dataclass(frozen=True, kw_only=True)
class Link:
    """Both directions between a stage and the next: activations go forward, gradients backward."""

    forward: Wire
    backward: Wire


@dataclass(frozen=True, kw_only=True)
class Network:
    """The links of a pipeline, first to last."""

    links: tuple[Link, ...]
    hosts: tuple[int, ...] | None = None
    """By stage, the host that it is on; None is a host each. Wires within a host share nothing."""
    egress_bytes_per_s: tuple[float, ...] | None = None
    """By host; None is the fastest wire that leaves it."""
    ingress_bytes_per_s: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.hosts is not None and len(self.hosts) != self.stages:
            what = f"{len(self.hosts)} hosts are named for {self.stages} stages"
            raise UsageError(what, setting="hosts", works=f"{self.stages} numbers, one a stage")
        count = 1 + max(self.host_of)
        for name in ("egress_bytes_per_s", "ingress_bytes_per_s"):
            given = getattr(self, name)
            if given is not None and (len(given) != count or not all(rate > 0 for rate in given)):
                raise UsageError(f"{name} is {given} for {count} hosts", setting=name, works=f"{count} rates")

    @classmethod
    def uniform(
        cls,
        stages: int,
        *,
        latency_ms: float = 0.0,
        bytes_per_s: float = math.inf,
        hosts: Sequence[int] | None = None,
    ) -> Network:
        """The same link everywhere."""
        wire = Wire(latency_ms=latency_ms, bytes_per_s=bytes_per_s)
        links = (Link(forward=wire, backward=wire),) * (stages - 1)
        return cls(links=links, hosts=None if hosts is None else tuple(hosts))

    @property
    def stages(self) -> int:
        """One more than there are links."""
        return len(self.links) + 1

    @cached_property
    def host_of(self) -> tuple[int, ...]:
        """The host of each stage."""
        return tuple(range(self.stages)) if self.hosts is None else self.hosts

    @cached_property
    def wires(self) -> tuple[Wire, ...]:
        """Link by link, both of its wires: wire 2i leads from stage i to the next, 2i+1 back to it."""
        return tuple(wire for link in self.links for wire in (link.forward, link.backward))

    def _ends(self, wire: int) -> tuple[int, int]:
        """The hosts that a wire leads from and to."""
        link, backward = divmod(wire, 2)
        there, back = self.host_of[link], self.host_of[link + 1]
        return (back, there) if backward else (there, back)

    @cached_property
    def _cards(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """By host, what can leave it and what can come to it; infinite where no wire says."""
        found = []
        for given, side in ((self.egress_bytes_per_s, 0), (self.ingress_bytes_per_s, 1)):
            fastest = [0.0] * (1 + max(self.host_of))
            for place, wire in enumerate(self.wires):
                host = self._ends(place)[side]
                if host != self._ends(place)[1 - side]:
                    fastest[host] = max(fastest[host], wire.bytes_per_s)
            found.append(tuple(rate or math.inf for rate in fastest) if given is None else given)
        return found[0], found[1]

    @cached_property
    def _shared(self) -> tuple[tuple[float, int], ...]:
        """What wires share: the capacity of an egress or ingress, and a bit for every wire that uses it."""
        found = []
        for side, rates in enumerate(self._cards):
            for host, rate in enumerate(rates):
                ends = [self._ends(place) for place in range(len(self.wires))]
                users = [place for place, end in enumerate(ends) if end[side] == host != end[1 - side]]
                if users:
                    found.append((rate, sum(1 << place for place in users)))
        return tuple(found)

    def with_cards_alone(self) -> Network:
        """The same hosts, with wires between them that only their cards limit."""
        leaving, coming = self._cards

        def freed(place: int) -> Wire:
            wire, (source, target) = self.wires[place], self._ends(place)
            return (
                wire if source == target else replace(wire, bytes_per_s=min(leaving[source], coming[target]))
            )

        links = (Link(forward=freed(2 * i), backward=freed(2 * i + 1)) for i in range(len(self.links)))
        return replace(self, links=tuple(links), egress_bytes_per_s=leaving, ingress_bytes_per_s=coming)

    @cached_property
    def _known(self) -> dict[int, dict[int, float]]:
        return {}

    def rates(self, active: int) -> dict[int, float]:
        """Bytes per second of each wire that is at work (a bit each).

        All rates grow together until a wire is at its own rate, or an egress or ingress that it uses is full.
        A wire that crosses two cards which others use too grows half as fast. This is proportional fairness
        here, which TCP comes close to (F. Kelly, A. Maulloo, D. Tan, J. Oper. Res. Soc. 49, 1998): who is
        held up twice backs off twice.
        """
        if active not in self._known:
            self._known[active] = self._fair(active)
        return self._known[active]

    def _fair(self, active: int) -> dict[int, float]:
        shared = [(mask & active, rate) for rate, mask in self._shared if mask & active]
        places = [place for place in range(active.bit_length()) if active >> place & 1]
        crossed = {p: sum(mask >> p & 1 for mask, _ in shared if mask.bit_count() > 1) for p in places}
        limits = [([p], self.wires[p].bytes_per_s) for p in places]
        limits += [([p for p in places if mask >> p & 1], rate) for mask, rate in shared]
        found: dict[int, float] = {}
        while len(found) < len(places):
            # How far the growth can go until each limit is met; the smallest binds first.
            growth, bound = math.inf, places
            for users, rate in limits:
                growing = [p for p in users if p not in found]
                if growing:
                    left = rate - sum(found[p] for p in users if p in found)
                    allowed = left / sum(1 / max(1, crossed[p]) for p in growing)
                    if allowed < growth:
                        growth, bound = allowed, growing
            for p in bound:
                if p not in found:
                    found[p] = growth / max(1, crossed[p])
        return found
