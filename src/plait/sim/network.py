"""The network of a cluster: messages and collectives that share it fairly.

What flows is fluid: between two events every flow has a rate (:mod:`plait.sim.fairness`), which changes only
when a flow that shares something with it, near or far, begins or ends, or a trace says so. Rates are settled
once a moment, when all that begins and ends at that moment is known.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from plait.cluster import Cluster
from plait.errors import UsageError
from plait.sim.route import Route, Routes, TraceKey
from plait.sim.shares import Shares
from plait.sim.simulation import Simulation
from plait.sim.trace import Trace
from plait.sim.transfer import Transfer


@dataclass(frozen=True, kw_only=True)
class Cross:
    """Other people's traffic from one host (or device) to another that never ends."""

    source: str
    target: str
    bytes_per_s: float = math.inf
    """The most that each of its flows wants."""
    flows: int = 1
    """So many at once, each of which counts in fair sharing."""

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise UsageError(
                f"cross traffic of {self.bytes_per_s} bytes/s", setting="bytes_per_s", works="1e6"
            )
        if self.flows < 1:
            raise UsageError(f"cross traffic of {self.flows} flows", setting="flows", works="1")


class Moving(NamedTuple):
    """A flow at some moment."""

    name: str
    hops: tuple[tuple[str, str], ...]
    """From host to host; none within a host."""
    bytes_per_s: float


class Network:
    """Sends messages between the devices of a cluster."""

    def __init__(
        self,
        simulation: Simulation,
        cluster: Cluster,
        *,
        traces: Mapping[TraceKey, Trace] | None = None,
        cross: Iterable[Cross] = (),
        ingress: Mapping[str, float] | None = None,
    ) -> None:
        """``traces`` are factors on capacities, over time.

        ``(a, b)`` is the link from one host to another, ``(a, "*")`` all that leaves a host, ``("*", a)`` all
        that comes to it, and ``a`` both. A host sends and takes what its fastest link does, unless the
        cluster (egress) or ``ingress`` (bytes/s by host) says otherwise.
        """
        self.simulation, self.cluster = simulation, cluster
        self._routes = Routes(cluster, traces or {}, ingress or {})
        self._shares = Shares(self._routes)
        self._channels: dict[Hashable, deque[Transfer]] = {}
        self._touched: list[Route | int] = []
        """Routes and resources on which something changed at this moment."""
        self._paused: set[Transfer] = set()
        self._ending = 0
        """How many active flows come to an end."""
        self._ticking: set[int] = set()
        """Resources whose next change is among the events to come."""
        self._cross: list[Route] = []
        for each in cross:
            route = self._routes.way(each.source, each.target)
            self._cross.append(route)
            for _ in range(each.flows):
                self._begin(self._transfer("cross", route, math.inf, _nothing, cap=each.bytes_per_s))

    def send(
        self,
        name: str,
        source: str,
        target: str,
        size_bytes: float,
        then: Callable[[], None],
        *,
        channel: Hashable = None,
        track: str | None = None,
    ) -> Transfer:
        """Send a message from a device to another, and call ``then`` when it is there.

        It is there a latency after its last byte has left. Messages of one channel (any value; None is none)
        go one at a time, first in, first out; others share. With a track, a span is noted from its first byte
        to its arrival.
        """
        if not 0 <= size_bytes < math.inf:
            raise UsageError(
                f"message {name!r} of {size_bytes} bytes", setting="size_bytes", works="0 or more"
            )
        route = self._routes.way(source, target)
        transfer = self._transfer(name, route, size_bytes, then, channel=channel, track=track)
        if channel is None:
            self._begin(transfer)
        elif channel in self._channels:
            self._channels[channel].append(transfer)
        else:
            self._channels[channel] = deque((transfer,))
            self._begin(transfer)
        return transfer

    def collective(
        self,
        name: str,
        devices: Sequence[str],
        edge_bytes: float,
        alone_ms: float,
        then: Callable[[], None],
        *,
        track: str | None = None,
    ) -> Transfer:
        """Run a symmetric collective as one flow, and call ``then`` at its end.

        ``edge_bytes`` cross every edge of the ring of the devices' hosts, at the pace of its most crowded
        edge. Alone it takes ``alone_ms``, latencies and computing included, which is the most pace it has.
        Within one host nothing is shared, and it takes just that.
        """
        for value, setting in ((edge_bytes, "edge_bytes"), (alone_ms, "alone_ms")):
            if not 0 <= value < math.inf:
                what = f"collective {name!r}: {setting} is {value}"
                raise UsageError(what, setting=setting, works="0 or more")
        if not devices:
            raise UsageError(f"collective {name!r} of no device", setting="devices", works="1 or more")
        route = self._routes.ring(devices)
        if route.edges and edge_bytes:
            cap = 1e3 * edge_bytes / alone_ms if alone_ms else math.inf
            transfer = self._transfer(name, route, edge_bytes, then, cap=cap, track=track)
        else:
            # Milliseconds in place of bytes, on a route that has nothing on it, at a thousand a second.
            transfer = self._transfer(name, self._routes.ring(()), alone_ms, then, cap=1e3, track=track)
        self._begin(transfer)
        return transfer

    def pause(self, transfer: Transfer) -> None:
        """Let what is on its way stand still; others have its share. Spans are noted in pieces.

        What waits in its channel, has left, or leaves at this very moment is not concerned.
        """
        if transfer.moving and transfer.stop():
            self._shares.remove(transfer)
            self._ending -= 1
            self._touch(transfer.route)
            self._paused.add(transfer)

    def resume(self, transfer: Transfer) -> None:
        """Let what was paused go on from where it was."""
        if transfer in self._paused:
            self._paused.remove(transfer)
            self._begin(transfer)

    def moved_bytes(self, link: tuple[str, str]) -> float:
        """What has gone from a host to another; messages count when their last byte has left."""
        return math.fsum(route.sent_bytes * route.hops.count(link) for route in self._routes.all)

    def egress_bytes(self, host: str) -> float:
        """What has gone from a host to others; within the host does not count, nor does cross traffic."""
        return math.fsum(
            route.sent_bytes * sum(a == host for a, _ in route.hops) for route in self._routes.all
        )

    def moving(self) -> list[Moving]:
        """What flows at this moment, cross traffic too, at the rates settled last."""
        return [Moving(each.name, each.route.hops, max(0.0, each.rate)) for each in self._shares.active()]

    def _transfer(
        self,
        name: str,
        route: Route,
        size_bytes: float,
        then: Callable[[], None],
        *,
        cap: float = math.inf,
        channel: Hashable = None,
        track: str | None = None,
    ) -> Transfer:
        return Transfer(
            self.simulation,
            name,
            route,
            size_bytes,
            then,
            self._depart,
            cap=cap,
            channel=channel,
            track=track,
        )

    def _begin(self, transfer: Transfer) -> None:
        transfer.begin()
        self._shares.add(transfer)
        route = transfer.route
        if transfer.size_bytes < math.inf:
            self._ending += 1
            if route.traced:
                self._follow(route)
            if self._ending == 1:
                for other in self._cross:
                    self._follow(other)
        self._touch(route)

    def _depart(self, transfer: Transfer) -> None:
        """The last byte has left: it arrives a latency later, and the next of its channel may go."""
        route = transfer.route
        route.sent_bytes += transfer.size_bytes
        self.simulation.after(route.latency_ms, transfer.arrive)
        self._shares.remove(transfer)
        following = None if transfer.channel is None else self._following(transfer.channel)
        if following is not None and following.route is route:
            # For all others it is as if the first one went on.
            following.begin()
            self._shares.add(following)
            following.change(transfer.rate)
            return
        self._ending -= 1
        self._touch(route)
        if following is not None:
            self._begin(following)

    def _following(self, channel: Hashable) -> Transfer | None:
        """What comes in a channel after the one that has just left."""
        queue = self._channels[channel]
        queue.popleft()
        if queue:
            return queue[0]
        del self._channels[channel]
        return None

    def _touch(self, what: Route | int) -> None:
        if not self._touched:
            self.simulation.settle(self._settle)
        self._touched.append(what)

    def _settle(self) -> None:
        touched, self._touched = self._touched, []
        self._shares.settle(touched)

    def _follow(self, route: Route) -> None:
        """Follow the traces of a route, from now until nothing is on it."""
        for resource in route.traced:
            if resource not in self._ticking:
                self._tick(resource)

    def _tick(self, resource: int) -> None:
        """Set a capacity to what it is now, and ask for an event when it changes next."""
        self._ticking.discard(resource)
        if self._routes.refresh(resource, self.simulation.now_ms):
            self._touch(resource)
        next_ms = self._routes.next_change(resource, self.simulation.now_ms)
        if next_ms < math.inf:
            self._ticking.add(resource)
            self.simulation.at(next_ms, partial(self._tick, resource), wanted=partial(self._ticks, resource))

    def _ticks(self, resource: int, _: float) -> bool:
        # With nothing to end, nobody would ever stop following a trace that repeats.
        wanted = self._ending > 0 and self._shares.any_on(resource)
        if not wanted:
            self._ticking.discard(resource)
        return wanted


def _nothing() -> None:
    """What follows on traffic that never ends."""
