"""The ways through a cluster, and what flows on them share.

    device a            host A                     host B            device b
             --> [egress of A] --> [link A to B] --> [ingress of B] -->

All that leaves a host shares its egress, all that comes to it its ingress, all between two hosts in one
direction their link. Within a host, each pair of devices has the local link to itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from plait.cluster import Cluster
from plait.cluster.parts import ANY
from plait.errors import UsageError
from plait.sim.cards import cards
from plait.sim.trace import Trace

if TYPE_CHECKING:
    from plait.sim.transfer import Transfer

TraceKey = tuple[str, str] | str
MANY = 16
"""A route over more resources than that is large: who is on them is looked up there, not noted at each."""
Resource = tuple[str, str, str]
"""What it is and its ends: egress and ingress have one host, a link two, and ``local`` two devices."""


@dataclass(eq=False, slots=True)
class Route:
    """A way, or the ways of a ring that all carry the same."""

    index: int
    edges: tuple[tuple[int, ...], ...]
    """By edge, the cards on it."""
    links: tuple[int, ...]
    hops: tuple[tuple[str, str], ...]
    """From host to host."""
    latency_ms: float = 0.0
    uses: dict[int, int] = field(default_factory=dict)
    """By resource, how often."""
    traced: tuple[int, ...] = ()
    """Resources with a trace."""
    edges_at: dict[int, list[int]] = field(default_factory=dict)
    """By card, the edges that cross it."""
    alone: tuple[int, float] = (-1, 0.0)
    """Of an age of the capacities, the rate that a flow without a cap would have alone."""
    sent_bytes: float = 0.0
    users: tuple[dict[Transfer, None], ...] = ()
    """By resource, what is on its way there, on this route or another; only for routes that are not large."""

    def __post_init__(self) -> None:
        for place, edge in enumerate(self.edges):
            for card in edge:
                self.uses[card] = self.uses.get(card, 0) + 1
                self.edges_at.setdefault(card, []).append(place)
        for link in self.links:
            self.uses[link] = self.uses.get(link, 0) + 1

    @property
    def large(self) -> bool:
        """Whether it has many resources."""
        return len(self.uses) > MANY


class Routes:
    """All that can be shared in a cluster, with its capacity at the moment, and the ways through it."""

    def __init__(
        self,
        cluster: Cluster,
        traces: Mapping[TraceKey, Trace],
        ingress: Mapping[str, float],
    ) -> None:
        self.cluster = cluster
        self.capacities: dict[int, float] = {}
        self.users: dict[int, dict[Transfer, None]] = {}
        """By resource, what is on its way there, except for what takes large routes."""
        self.age = 0
        """Counts the changes of capacities."""
        self.all: list[Route] = []
        self._numbers: dict[Resource, int] = {}
        self._traced: dict[int, tuple[float, tuple[Trace, ...]]] = {}
        self._ways: dict[tuple[str, str], Route] = {}
        self._rings: dict[tuple[str, ...], Route] = {}
        self._traces = traces
        self._cards = cards(cluster)
        for name, rate in ingress.items():
            cluster.host(name)
            if not rate > 0:
                raise UsageError(f"host {name!r} takes {rate} bytes/s", setting="ingress", works="125e6")
            self._cards.coming[name] = rate
        for key in traces:
            for host in (key,) if isinstance(key, str) else key:
                if host != ANY or key == (ANY, ANY):
                    cluster.host(host)

    def way(self, source: str, target: str) -> Route:
        """From a device (or a host) to another."""
        key = (source, target)
        found = self._ways.get(key)
        if found is None:
            a, b = self.cluster.host_of(source), self.cluster.host_of(target)
            link = self.cluster.link(a, b)
            if a == b:
                local = self._resource(("local", source, target), link.bandwidth_bytes_per_s, [(a, a)])
                found = self._new((), (local,), (), link.latency_ms)
            elif source != a or target != b:
                found = self.way(a, b)
            else:
                edge, links = self._edge(a, b)
                found = self._new((edge,), links, ((a, b),), link.latency_ms)
            self._ways[key] = found
        return found

    def ring(self, devices: Sequence[str]) -> Route:
        """Around the hosts of the devices, in their order; without an edge where they are all on one host."""
        key = tuple(devices)
        found = self._rings.get(key)
        if found is None:
            hosts = [self.cluster.host_of(name) for name in devices]
            hops = tuple((a, b) for a, b in zip(hosts, [*hosts[1:], *hosts[:1]], strict=True) if a != b)
            ways = [self._edge(a, b) for a, b in hops]
            links = tuple(link for _, its in ways for link in its)
            found = self._rings[key] = self._new(tuple(edge for edge, _ in ways), links, hops, 0.0)
        return found

    def refresh(self, resource: int, now_ms: float) -> bool:
        """Set the capacity of a resource with a trace to what it is now; whether it was another."""
        base, traces = self._traced[resource]
        capacity = base * math.prod(trace.at(now_ms) for trace in traces)
        if capacity == self.capacities[resource]:
            return False
        self.capacities[resource] = capacity
        self.age += 1
        return True

    def next_change(self, resource: int, now_ms: float) -> float:
        """When the capacity of a resource changes next."""
        return min(trace.next_change(now_ms) for trace in self._traced[resource][1])

    def alone(self, route: Route) -> float:
        """The rate of a flow that has a route to itself."""
        age, rate = route.alone
        if age != self.age:
            capacities = self.capacities
            rate = min((capacities[r] / count for r, count in route.uses.items()), default=math.inf)
            route.alone = (self.age, rate)
        return rate

    def _new(
        self,
        edges: tuple[tuple[int, ...], ...],
        links: tuple[int, ...],
        hops: tuple[tuple[str, str], ...],
        latency_ms: float,
    ) -> Route:
        made = Route(len(self.all), edges, links, hops, latency_ms)
        made.traced = tuple(resource for resource in made.uses if resource in self._traced)
        if not made.large:
            made.users = tuple(self.users[resource] for resource in made.uses)
        self.all.append(made)
        return made

    def _edge(self, a: str, b: str) -> tuple[tuple[int, int], tuple[int, ...]]:
        """From host to host: the cards, and the link where it could be the narrowest."""
        rate = self.cluster.link(a, b).bandwidth_bytes_per_s
        leaving, coming = self._cards.leaving[a], self._cards.coming[b]
        out = self._resource(("egress", a, ""), leaving, [a, (a, ANY)])
        into = self._resource(("ingress", "", b), coming, [b, (ANY, b)])
        if rate >= min(leaving, coming) and not ({out, into} & self._traced.keys() or (a, b) in self._traces):
            return (out, into), ()
        return (out, into), (self._resource(("link", a, b), rate, [(a, b)]),)

    def _resource(self, name: Resource, capacity: float, keys: Sequence[TraceKey]) -> int:
        if name not in self._numbers:
            self._numbers[name] = number = len(self._numbers)
            self.capacities[number] = capacity
            self.users[number] = {}
            traces = tuple(self._traces[key] for key in keys if key in self._traces)
            if traces:
                self._traced[number] = (capacity, traces)
                self.refresh(number, 0.0)
        return self._numbers[name]
