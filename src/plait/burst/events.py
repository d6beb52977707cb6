"""Plays a plan as the model of a step has it: when each device computes, moves rows, waits or is free.

    device0  F0 F1 | F2 F3 B3 B2 | B1   B0   wait  optimizer
    device1  F0 F1 |             | B1   B0   wait  optimizer      blocks 2 and 3 have width 1: device 1 is
    free wire                           sync 1    sync 0

It follows :mod:`plait.burst.costs` event by event, row by row (:mod:`plait.burst.rows`), and must come to the
same figures: the tables and this check each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from plait.burst.burst_plan import BurstPlan
from plait.burst.live import cut_bytes, sharers
from plait.burst.network import Network
from plait.burst.rows import moves
from plait.collective import Collective, ring_ms
from plait.errors import UsageError
from plait.profile import Profile
from plait.timeline import Span, Timeline


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What the first ``width`` devices do from ``start_ms`` to ``end_ms``."""

    kind: str
    """``forward``, ``backward``, ``reshard``, ``wait`` or ``optimizer``."""
    name: str
    width: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step as the model sees it."""

    plan: BurstPlan
    step_ms: float
    phases: tuple[Phase, ...]
    """In their order. The optimizer's are one after another, each on the devices of its block."""
    syncs: tuple[tuple[str, float, float], ...]
    """What is on the wire: block, start and end; a sync that rows being moved interrupt comes in pieces."""

    @property
    def device_ms(self) -> float:
        """What all devices spend together."""
        return sum(phase.width * (phase.end_ms - phase.start_ms) for phase in self.phases)

    @cached_property
    def gaps(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """By device, when it is free, as (start, end) in milliseconds."""
        return tuple(tuple(self._gaps(device)) for device in range(self.plan.devices))

    def _gaps(self, device: int) -> Iterator[tuple[float, float]]:
        at_ms = 0.0
        for phase in self.phases:
            if device < phase.width:
                if phase.start_ms > at_ms:
                    yield at_ms, phase.start_ms
                at_ms = max(at_ms, phase.end_ms)
        if self.step_ms > at_ms:
            yield at_ms, self.step_ms

    @property
    def idle_ms(self) -> tuple[float, ...]:
        """By device, how long it is free."""
        return tuple(sum(end - start for start, end in its) for its in self.gaps)

    @cached_property
    def timeline(self) -> Timeline:
        """Tracks ``device0``, ... with what each does (``idle``, too) and ``wire`` with the syncs."""
        spans = [
            Span(f"device{device}", f"{phase.kind} {phase.name}".strip(), phase.start_ms, phase.end_ms)
            for phase in self.phases
            for device in range(phase.width)
            if phase.end_ms > phase.start_ms
        ]
        spans += [
            Span(f"device{device}", "idle", start_ms, end_ms)
            for device, its in enumerate(self.gaps)
            for start_ms, end_ms in its
        ]
        spans += [Span("wire", f"sync {name}", start_ms, end_ms) for name, start_ms, end_ms in self.syncs]
        return Timeline.of(spans)


def predict(
    plan: BurstPlan, profile: Profile, network: Network, *, collective: Collective | None = None
) -> Prediction:
    """Play one step of a plan for the chain of a profile."""
    names = tuple(block.name for block in profile.blocks)
    if names != plan.blocks:
        other = next((f"{a!r} and {b!r}" for a, b in zip(names, plan.blocks, strict=False) if a != b), None)
        what = f"a profile of {len(names)} blocks and a plan of {len(plan.blocks)}"
        raise UsageError(
            what if other is None else f"{what} differ in {other}",
            setting="profile",
            works="the profile that the plan was made from",
        )
    if network.devices is not None and network.devices < plan.width:
        raise UsageError(
            f"a network of {network.devices} devices for a plan of {plan.width}",
            setting="network",
            works=f"{plan.width} rows",
        )
    return _Play(plan, profile, network, collective).played()


class _Play:
    """A step under way."""

    def __init__(
        self, plan: BurstPlan, profile: Profile, network: Network, collective: Collective | None
    ) -> None:
        self.plan, self.profile, self.network, self.collective = plan, profile, network, collective
        self.alive = cut_bytes(profile)
        self.sharers = sharers(profile)
        self.now_ms = 0.0
        self.phases: list[Phase] = []
        self.queue: list[tuple[str, float]] = []
        """Syncs that are not through, with what is left of each."""
        self.syncs: list[tuple[str, float, float]] = []

    def played(self) -> Prediction:
        blocks, widths = self.profile.blocks, self.plan.widths
        for place, block in enumerate(blocks):
            if place:
                self._move(place, widths[place - 1], widths[place])
            self._spend("forward", block.name, widths[place], self._longest(place, "forward"))
        for place in reversed(range(len(blocks))):
            length_ms = self._longest(place, "backward")
            self._drain(length_ms)
            self._spend("backward", blocks[place].name, widths[place], length_ms)
            self._synchronise(place)
            if place:
                self._move(place, widths[place], widths[place - 1])
        left_ms = sum(left for _, left in self.queue)
        self._drain(left_ms)
        self._spend("wait", "", widths[0], left_ms)
        # A device updates its own blocks one after another; wide ones first, all devices begin together.
        for place in sorted(range(len(blocks)), key=lambda place: -widths[place]):
            self._spend("optimizer", blocks[place].name, widths[place], blocks[place].optimizer_milliseconds)
        return Prediction(
            plan=self.plan, step_ms=self.now_ms, phases=tuple(self.phases), syncs=tuple(self.syncs)
        )

    def _longest(self, place: int, kind: str) -> float:
        block = self.profile.blocks[place]
        time_ms = block.forward_ms if kind == "forward" else block.backward_ms
        return max(time_ms(rows) for rows in set(self.plan.shares(place)))

    def _spend(self, kind: str, name: str, width: int, length_ms: float) -> None:
        if length_ms > 0:
            end_ms = self.now_ms + length_ms
            phase = Phase(kind=kind, name=name, width=width, start_ms=self.now_ms, end_ms=end_ms)
            self.phases.append(phase)
            self.now_ms = end_ms

    def _move(self, place: int, before: int, after: int) -> None:
        """Bring all that is alive before a block from a width to another."""
        if before == after or not self.alive[place]:
            return
        busy_ms: dict[tuple[str, int], float] = {}
        for move in moves(self.plan.batch, before, after):
            way = move.source, move.target
            length_ms = self.network.latency(*way) + 1e3 * move.rows * self.alive[
                place
            ] / self.network.bandwidth(*way)
            for end in (("sends", move.source), ("receives", move.target)):
                busy_ms[end] = busy_ms.get(end, 0.0) + length_ms
        name = self.profile.blocks[place].name
        self._spend("reshard", name, max(before, after), max(busy_ms.values()))

    def _synchronise(self, place: int) -> None:
        """Queue the gradients of a block whose backward has ended; shared ones go with their first block."""
        block = self.profile.blocks[place]
        width = max(self.plan.widths[user] for user in (place, *self.sharers.get(place, ())))
        if width == 1 or not block.parameter_bytes:
            return
        link = self.network.ring(width)
        estimate = ring_ms if self.collective is None else self.collective.estimate_ms
        self.queue.append((block.name, estimate(block.parameter_bytes, width, link)))

    def _drain(self, length_ms: float) -> None:
        """Let the wire work for so long, from now."""
        at_ms, end_ms = self.now_ms, self.now_ms + length_ms
        while self.queue and at_ms < end_ms:
            name, left_ms = self.queue.pop(0)
            done_ms = min(left_ms, end_ms - at_ms)
            if done_ms < left_ms:
                self.queue.insert(0, (name, left_ms - done_ms))
            self.syncs.append((name, at_ms, at_ms + done_ms))
            at_ms += done_ms
