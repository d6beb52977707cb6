"""Plays an order on stages and links of known speed: how long a step takes, and when what happens.

Transfers are as gloo makes them: receives are posted ahead, a sender does not block, a wire carries one
message at a time and first in, first out, and wires share the hosts' cards (:mod:`plait.pipeline.network`).
A stage computes one thing at a time, asks the order for the next, and waits where its input is not there yet.

Time goes from event to event: a computation ends, the last byte of a message leaves, a message arrives. A
step of S stages and M micro-batches has O(S M) of them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from plait.errors import UsageError
from plait.pipeline.network import Network
from plait.pipeline.orders import Kind, Order
from plait.timeline import Span, Timeline


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a stage does for one micro-batch."""

    forward_ms: float
    backward_ms: float
    output_bytes: int = 0
    """Sent to the next stage by a forward."""
    gradient_bytes: int = 0
    """Sent to the stage before by a backward."""

    def __post_init__(self) -> None:
        for name in ("forward_ms", "backward_ms", "output_bytes", "gradient_bytes"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name} is {getattr(self, name)}", setting=name, works="0 or more")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step as the model sees it."""

    order: Order
    step_ms: float
    """Until the last stage has done its last."""
    busy_ms: tuple[float, ...]
    """By stage, what it computes."""
    actions: tuple[tuple[tuple[Kind, int, float, float], ...], ...]
    """By stage: kind, micro-batch, start and end."""
    messages: tuple[tuple[tuple[int, float, float, float], ...], ...]
    """By wire (as in ``Network.wires``): micro-batch, when it was handed over, began to move, and arrived."""

    @property
    def idle(self) -> float:
        """The share of all stages' time in which they wait."""
        total = self.step_ms * len(self.busy_ms)
        return 1 - sum(self.busy_ms) / total if total else 0.0

    @cached_property
    def timeline(self) -> Timeline:
        """Spans ``F3`` and ``B3`` on tracks ``stage0``, ..., ``link0 forward``, ``link0 backward``, ..."""
        spans = [
            Span(f"stage{stage}", f"{kind}{micro_batch}", start_ms, end_ms)
            for stage, actions in enumerate(self.actions)
            for kind, micro_batch, start_ms, end_ms in actions
        ]
        for wire, messages in enumerate(self.messages):
            link, backward = divmod(wire, 2)
            track, kind = f"link{link} {'backward' if backward else 'forward'}", "FB"[backward]
            spans += [Span(track, f"{kind}{m}", moved_ms, there_ms) for m, _, moved_ms, there_ms in messages]
        return Timeline.of(spans)


def predict(
    order: Order, loads: Sequence[Load], network: Network, *, shares: Sequence[float] | None = None
) -> Prediction:
    """Play one step; where micro-batches differ, ``shares`` are their sizes as shares of a load."""
    if not len(loads) == network.stages == order.stages:
        what = f"{len(loads)} loads and {len(network.links)} links for an order of {order.stages} stages"
        raise UsageError(what, setting="loads", works=f"{order.stages} loads and {order.stages - 1} links")
    if shares is not None and (
        len(shares) != order.micro_batches or not all(0 < each <= 1 for each in shares)
    ):
        works = f"{order.micro_batches} numbers above 0, 1 at most"
        raise UsageError(f"the shares of {order} are {list(shares)}", setting="shares", works=works)
    return _Play(order, loads, network, shares or (1.0,) * order.micro_batches).played()


class _Play:
    """A step under way. Wire 2i carries stage i's activations to the next, 2i+1 the gradients back."""

    def __init__(
        self, order: Order, loads: Sequence[Load], network: Network, shares: Sequence[float]
    ) -> None:
        self.order, self.loads, self.network, self.shares = order, loads, network, shares
        stages = order.stages
        self.now_ms = 0.0
        self.forwards, self.backwards = [0] * stages, [0] * stages
        # What has come; the first stage has all of its inputs, the last makes its own gradients.
        self.inputs, self.gradients = [0] * stages, [0] * stages
        self.inputs[0] = order.micro_batches
        self.running: list[Kind | None] = [None] * stages
        self.happenings: list[tuple[float, int, int]] = []
        """When, and of which stage a computation ends (0), or on which wire a message arrives (1)."""
        wires = len(network.wires)
        self.sending = 0
        """A bit for every wire that has a message on it."""
        self.left_bytes = [0.0] * wires
        self.queues: list[list[tuple[int, float]]] = [[] for _ in range(wires)]
        """Messages handed over and not yet gone: micro-batch, when."""
        self.begun_ms = [0.0] * wires
        self.actions: list[list[tuple[Kind, int, float, float]]] = [[] for _ in range(stages)]
        self.messages: list[list[tuple[int, float, float, float]]] = [[] for _ in range(wires)]

    def played(self) -> Prediction:
        for stage in range(self.order.stages):
            self._begin(stage)
        while self.happenings or self.sending:
            self._advance()
            if self.now_ms == math.inf:  # from there on no time passes, and the wires never empty
                raise UsageError(
                    f"a step of {self.order} would take more milliseconds than a number can hold",
                    setting="loads, network",
                    works="rates and latencies that networks have, such as 1gbit and 40us",
                )
            touched = set()
            while self.happenings and self.happenings[0][0] <= self.now_ms:
                _, what, place = heapq.heappop(self.happenings)
                touched.add(self._end(place) if what == 0 else self._arrive(place))
            for stage in sorted(touched):
                if self.running[stage] is None:
                    self._begin(stage)
        if min(self.backwards) < self.order.micro_batches:
            raise UsageError(
                f"{self.order} does not come to an end", setting="order", works="validity.check tells why"
            )
        ends = [actions[-1][3] for actions in self.actions]
        busy = tuple(sum(end - start for _, _, start, end in actions) for actions in self.actions)
        return Prediction(
            order=self.order,
            step_ms=max(ends),
            busy_ms=busy,
            actions=tuple(map(tuple, self.actions)),
            messages=tuple(map(tuple, self.messages)),
        )

    def _begin(self, stage: int) -> None:
        """Start what a stage may run now, if anything."""
        forwards, backwards = self.forwards[stage], self.backwards[stage]
        for kind in self.order.choices(stage, forwards, backwards):
            there, done = (self.inputs, forwards) if kind == "F" else (self.gradients, backwards)
            if there[stage] > done:
                load = self.loads[stage]
                length_ms = (load.forward_ms if kind == "F" else load.backward_ms) * self.shares[done]
                self.running[stage] = kind
                self.actions[stage].append((kind, done, self.now_ms, self.now_ms + length_ms))
                heapq.heappush(self.happenings, (self.now_ms + length_ms, 0, stage))
                return

    def _end(self, stage: int) -> int:
        """A computation ends: its result goes to the neighbour; returns the stage, which is free."""
        kind, self.running[stage] = self.running[stage], None
        last = self.order.stages - 1
        if kind == "F":
            if stage == last:
                self.gradients[stage] += 1
            else:
                self._send(2 * stage, self.forwards[stage])
            self.forwards[stage] += 1
        else:
            if stage > 0:
                self._send(2 * stage - 1, self.backwards[stage])
            self.backwards[stage] += 1
        return stage

    def _send(self, wire: int, micro_batch: int) -> None:
        self.queues[wire].append((micro_batch, self.now_ms))
        if not self.sending >> wire & 1:
            self._load(wire)

    def _load(self, wire: int) -> None:
        """Put the next message of its queue on a wire."""
        link, backward = divmod(wire, 2)
        size = self.loads[link + 1].gradient_bytes if backward else self.loads[link].output_bytes
        self.left_bytes[wire] = size * self.shares[self.queues[wire][0][0]]
        self.begun_ms[wire] = self.now_ms
        self.sending |= 1 << wire

    def _depart(self, wire: int) -> None:
        """The last byte has left: it arrives a latency later, and the next message may go."""
        there_ms = self.now_ms + self.network.wires[wire].latency_ms
        micro_batch, handed_ms = self.queues[wire].pop(0)
        self.messages[wire].append((micro_batch, handed_ms, self.begun_ms[wire], there_ms))
        heapq.heappush(self.happenings, (there_ms, 1, wire))
        self.sending &= ~(1 << wire)
        if self.queues[wire]:
            self._load(wire)

    def _arrive(self, wire: int) -> int:
        """A message is there; returns the stage that has it."""
        link, backward = divmod(wire, 2)
        (self.gradients if backward else self.inputs)[link + 1 - backward] += 1
        return link + 1 - backward

    def _advance(self) -> None:
        """Move time on to what happens next, and the messages on their wires with it."""
        next_ms = self.happenings[0][0] if self.happenings else math.inf
        if not self.sending:
            self.now_ms = next_ms
            return
        rates = self.network.rates(self.sending)
        left = self.left_bytes
        for wire, rate in rates.items():
            next_ms = min(next_ms, self.now_ms + 1e3 * left[wire] / rate)
        passed_s = (next_ms - self.now_ms) / 1e3
        self.now_ms = next_ms
        for wire, rate in rates.items():
            # An infinite rate empties the wire even where no time passes; elsewhere what remains may take
            # less time than rounding can tell.
            left[wire] = 0.0 if rate == math.inf else left[wire] - rate * passed_s
            if left[wire] <= rate * 1e-15 * max(1.0, next_ms):
                self._depart(wire)
