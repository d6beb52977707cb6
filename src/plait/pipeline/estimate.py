"""The network as training itself shows it: rates, latencies, clock offsets, from messages that cross anyway.

A transfer is a small header and then the payload, on one wire that is first in, first out. The receiver notes
when each has come. So

- the payload took ``arrived - started``, whatever the clocks say and however long it waited to be sent;
- a header that met no other message took the latency, and the distance of the two clocks is added to that one
  way and taken from it the other way: half the sum is the latency, half the difference the offset. (That the
  latency is the same both ways is assumed; nobody can tell without a common clock.)

Wires share the cards of hosts, so a payload may have had a part of its wire's rate only. How large a part
is known once the rates are (:meth:`plait.pipeline.network.Network.rates`), and the rates are known once the
parts are: a few rounds of one after the other settle both. So all wires of a step are looked at together.

A sliding median of rates follows a change within a step and ignores single transfers that went wrong; of
latencies the smallest counts, since all that disturbs a header makes it later. A step of n transfers takes
O(n log n).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from plait.errors import UsageError
from plait.pipeline.network import Link, Network, Wire

Direction = Literal["forward", "backward"]

_ROUNDS = 4
_LEAST_MS = 1e-3
"""What a clock can tell of a transfer; a payload that took no time would have an infinite rate."""
_FEWEST = 6
"""Transfers that a median is taken over, at least, once there are so many."""
_HEADERS = 64
"""Latencies that are remembered of a wire."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A transfer from a stage to its neighbour."""

    link: int
    """0 is between stages 0 and 1."""
    direction: Direction
    micro_batch: int
    size_bytes: int
    sent_ms: float
    """By the sender's clock, when it was handed over."""
    started_ms: float
    """By the receiver's clock, when its header had come."""
    arrived_ms: float
    """By the receiver's clock, when it was all there."""

    @property
    def wire(self) -> int:
        """As in ``Network.wires``."""
        return 2 * self.link + (self.direction == "backward")


class Estimator:
    """Collects the arrivals of steps; says what the network is like now."""

    def __init__(self, stages: int, *, hosts: Sequence[int] | None = None, window_steps: float = 1.0) -> None:
        """``window_steps``: how many steps' transfers the median is taken over."""
        if not window_steps > 0:
            raise UsageError(f"a window of {window_steps} steps", setting="window_steps", works="1")
        self._links = stages - 1
        self._hosts = None if hosts is None else tuple(hosts)
        self._window_steps = window_steps
        self._rates: list[list[float]] = [[] for _ in range(2 * self._links)]
        self._delays: list[list[float]] = [[] for _ in range(2 * self._links)]
        """Of headers that met nothing: latency and clock offset together."""

    def observe(self, arrivals: Iterable[Arrival]) -> None:
        """Take in all transfers of one step."""
        by_wire: list[list[Arrival]] = [[] for _ in range(2 * self._links)]
        for arrival in arrivals:
            by_wire[arrival.wire].append(arrival)
        for wire, its in enumerate(by_wire):
            its.sort(key=lambda arrival: arrival.started_ms)
            self._delays[wire] = [*self._delays[wire], *self._unhindered(its)][-_HEADERS:]
        offsets_ms = self.offsets_ms
        whole = [
            _Transfer(a, offsets_ms[a.link if a.direction == "backward" else a.link + 1])
            for its in by_wire
            for a in its
            if a.size_bytes
        ]
        for wire, found in self._rates_of(whole).items():
            window = max(_FEWEST, round(self._window_steps * len(found)))
            self._rates[wire] = [*self._rates[wire], *found][-window:]

    @property
    def offsets_ms(self) -> tuple[float, ...]:
        """By stage: how far its clock is ahead of the first stage's."""
        offsets = [0.0]
        for link in range(self._links):
            there, back = self._delays[2 * link], self._delays[2 * link + 1]
            ahead = (min(there) - min(back)) / 2 if there and back else 0.0
            offsets.append(offsets[-1] + ahead)
        return tuple(offsets)

    @property
    def network(self) -> Network | None:
        """What the network is like; None until something has crossed every link both ways."""
        if not all(self._rates):
            return None
        return self._network([statistics.median(rates) for rates in self._rates])

    def _network(self, rates: Sequence[float]) -> Network:
        links = []
        for link in range(self._links):
            there, back = (min(self._delays[wire], default=0.0) for wire in (2 * link, 2 * link + 1))
            latency_ms = max(0.0, (there + back) / 2)
            forward, backward = (
                Wire(latency_ms=latency_ms, bytes_per_s=rates[wire]) for wire in (2 * link, 2 * link + 1)
            )
            links.append(Link(forward=forward, backward=backward))
        return Network(links=tuple(links), hosts=self._hosts)

    def _unhindered(self, arrivals: Sequence[Arrival]) -> list[float]:
        """Delays of headers that were sent when nothing else was on their wire."""
        delays: list[float] = []
        busy_until_ms = -math.inf
        for arrival in arrivals:
            delay_ms = arrival.started_ms - arrival.sent_ms
            # Sent, at the earliest, a smallest delay before it began to come: by then the last had arrived.
            known = [*self._delays[arrival.wire], *delays, delay_ms]
            if arrival.sent_ms + min(known) >= busy_until_ms:
                delays.append(delay_ms)
            busy_until_ms = arrival.arrived_ms
        return delays

    def _rates_of(self, transfers: Sequence[_Transfer]) -> dict[int, list[float]]:
        """By wire, the rate that each transfer would have had alone."""
        if not transfers:
            return {}
        # At first all wires are taken to be as fast as the fastest, and to share equally. Starting from what
        # they were seen to carry, a wire that had half of its rate all the time would seem to have no more.
        fastest = max(transfer.size_bytes / transfer.length_ms * 1e3 for transfer in transfers)
        known = [fastest] * (2 * self._links)
        pieces = _pieces(transfers)
        found: dict[int, list[float]] = {}
        for _ in range(_ROUNDS):
            shares = _Shares(self._network(known))
            alone_ms = dict.fromkeys(transfers, 0.0)
            for length_ms, open_ in pieces:
                active = sum(1 << transfer.wire for transfer in open_)
                for transfer in open_:
                    alone_ms[transfer] += length_ms * shares.of(active, transfer.wire)
            found = {}
            for transfer in transfers:
                rate = transfer.size_bytes / max(alone_ms[transfer], _LEAST_MS) * 1e3
                found.setdefault(transfer.wire, []).append(rate)
            known = [
                statistics.median(found.get(wire) or self._rates[wire] or [fastest])
                for wire in range(2 * self._links)
            ]
        return found


class _Shares:
    """How much of what it could have alone each wire has, by which wires are at work.

    Only cards count. That a wire between two hosts is slower than both shows when it is alone; when it is
    not, half of a card and a wire of half the rate look the same, and the former is far more common.
    """

    def __init__(self, network: Network) -> None:
        self._network = network.with_cards_alone()

    def of(self, active: int, wire: int) -> float:
        """A wire's, where a bit each says which are at work."""
        return self._network.rates(active)[wire] / self._network.wires[wire].bytes_per_s


class _Transfer:
    """A payload on its way, by the first stage's clock."""

    __slots__ = ("end_ms", "length_ms", "size_bytes", "start_ms", "wire")

    def __init__(self, arrival: Arrival, ahead_ms: float) -> None:
        self.wire, self.size_bytes = arrival.wire, arrival.size_bytes
        self.start_ms = arrival.started_ms - ahead_ms
        self.length_ms = max(arrival.arrived_ms - arrival.started_ms, _LEAST_MS)
        self.end_ms = self.start_ms + self.length_ms


def _pieces(transfers: Sequence[_Transfer]) -> list[tuple[float, tuple[_Transfer, ...]]]:
    """Time cut where a transfer begins or ends: how long each piece is, and what was on its way."""
    edges = sorted(
        [(t.start_ms, 1, i) for i, t in enumerate(transfers)]
        + [(t.end_ms, 0, i) for i, t in enumerate(transfers)]
    )
    found, open_, before_ms = [], dict[int, _Transfer](), 0.0
    for at_ms, begins, i in edges:
        if open_ and at_ms > before_ms:
            # On one wire only one thing can be; where clocks make it two, the later one has it.
            on_wires = {transfer.wire: transfer for transfer in open_.values()}
            found.append((at_ms - before_ms, tuple(on_wires.values())))
        if begins:
            open_[i] = transfers[i]
        else:
            open_.pop(i, None)
        before_ms = at_ms
    return found
