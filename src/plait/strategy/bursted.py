"""Burst parallelism as an option: each block only as wide as it pays, gradients in fp32 or compressed.

The plan is the fastest of :mod:`plait.burst.planner`, which knows nothing of the processor's part in
compressing: where a CPU's core packs what it also computes, the step is played once more with that counted
(:mod:`plait.strategy.overlap`). Memory is that of :mod:`plait.burst.memory`. Devices that are not equally
fast count as the slowest of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from plait.burst.burst_plan import BurstPlan
from plait.burst.costs import Costs
from plait.burst.live import cut_bytes, sharers
from plait.burst.planner import plan as planned
from plait.burst.rows import moves
from plait.profile import Profile
from plait.sim.reduction import Reduction, Ring
from plait.strategy.codecs import Codecs, Mixed
from plait.strategy.demand import Demand
from plait.strategy.option import Option
from plait.strategy.overlap import Overlap, Piece, overlap
from plait.strategy.site import Site

_TRIED = 16
"""Plans of a frontier that are played where packing takes the core."""


def bursted(demand: Demand, site: Site, codecs: Codecs | None = None, bits: int = 4) -> Option:
    """The fastest burst plan; with ``codecs``, gradients travel in so many bits."""
    name = "burst" if codecs is None else f"burst, {bits} bits"
    if len(site) < 2 or demand.batch < 2:
        return Option(
            strategy="burst",
            name=name,
            batch=demand.batch,
            why_not=f"widths need two devices and rows, and there are {len(site)} and {demand.batch}",
            works="2 devices",
        )
    compressing = None if codecs is None else Mixed(parts=((bits, 1.0),), codecs=codecs)
    reduction: Reduction = compressing or Ring()
    speed = site.slowest(len(site))
    here = demand.slower(speed)
    network = site.network
    frontier = planned(
        here.profile,
        devices=len(site),
        batch=demand.batch,
        bandwidth=network.bandwidth_bytes_per_s,
        latency=_seconds(network.latency_ms),
        memory=list(site.budgets),
        collective=compressing,
    )
    # What packing costs may make another plan than the planner's fastest the fastest.
    tried = frontier.plans[:1] if codecs is None else _spread(frontier.plans)
    sent, said = (None, ()) if codecs is None else (bits, codecs.remark)
    said = (*frontier.remarks, *said)
    options = [_option(here, site, plan, name, reduction, sent, said, speed) for plan in tried]
    return min(options, key=lambda option: option.step_ms or 0.0)


def _spread(plans: Sequence[BurstPlan]) -> list[BurstPlan]:
    """Some plans of a frontier, both ends among them."""
    count = min(len(plans), _TRIED)
    return [plans[round(k * (len(plans) - 1) / max(1, count - 1))] for k in range(count)]


def _seconds(latency_ms: float | tuple[tuple[float, ...], ...]) -> float | list[list[float]]:
    if isinstance(latency_ms, tuple):
        return [[each / 1e3 for each in row] for row in latency_ms]
    return latency_ms / 1e3


def _option(
    demand: Demand,
    site: Site,
    plan: BurstPlan,
    name: str,
    reduction: Reduction,
    bits: int | None,
    remarks: tuple[str, ...],
    speed: float,
) -> Option:
    profile, width = demand.profile, plan.width
    played = _Step(plan, profile, site, reduction)
    step_ms = played.step_ms
    held = burst_bytes(plan, profile)
    if speed != 1:
        remarks = (*remarks, f"all devices count as the slowest, of {speed:.3g} times the first one's speed")
    return Option(
        strategy="burst",
        name=name,
        batch=demand.batch,
        step_ms=step_ms,
        memory_bytes=dict(zip(site.names, held[:width], strict=False)),
        budget_bytes=dict(zip(site.names[:width], site.budgets, strict=False)),
        wire_bytes=burst_wire_bytes(plan, profile, reduction),
        parts_ms={
            "compute": played.compute_ms,
            "moving": played.moving_ms,
            "codec": played.done.slowed_ms,
            "wire": played.done.wait_ms,
            "optimizer": played.optimizer_ms,
        },
        idle_ms={
            device: max(0.0, step_ms - busy_ms)
            for device, busy_ms in zip(site.names, played.busy_ms(), strict=True)
        },
        plan=plan,
        collective=reduction,
        bits=bits if width > 1 else None,
        remarks=remarks,
    )


class _Step:
    """A step of a plan as its first device, which has every block, goes through it."""

    def __init__(self, plan: BurstPlan, profile: Profile, site: Site, reduction: Reduction) -> None:
        self.plan, self.profile, self.reduction = plan, profile, reduction
        self.widths = sorted(set(plan.widths))
        costs = Costs(profile, self.widths, batch=plan.batch, network=site.network)
        blocks = len(profile.blocks)
        places = np.array([self.widths.index(width) for width in plan.widths])
        every = np.arange(blocks)
        self.forward = costs.forward[every, places]
        self.backward = costs.backward[every, places]
        moving = costs.one_way[every[1:], places[:-1], places[1:]]
        back = costs.one_way[every[1:], places[1:], places[:-1]]
        self.optimizer = costs.optimizer
        self.widest = [
            max(plan.widths[user] for user in (place, *costs.sharers.get(place, ())))
            for place in range(blocks)
        ]
        self.compute_ms = float(self.forward.sum() + self.backward.sum())
        self.moving_ms = float(moving.sum() + back.sum())
        self.optimizer_ms = float(self.optimizer.sum())
        self.done = self._backward(site, back)
        self.step_ms = float(self.forward.sum() + moving.sum()) + self.done.end_ms + self.optimizer_ms

    def _backward(self, site: Site, back: NDArray[np.float64]) -> Overlap:
        pieces = []
        for place in reversed(range(len(self.profile.blocks))):
            size, width = self.profile.blocks[place].parameter_bytes, self.widest[place]
            syncs = width > 1 and size > 0
            pieces.append(
                Piece(
                    float(self.backward[place]),
                    self.reduction.estimate_ms(size, width, site.ring(width)) if syncs else 0.0,
                    self.reduction.busy_ms(size, width) if syncs else 0.0,
                    float(back[place - 1]) if place else 0.0,
                )
            )
        return overlap(pieces)

    def busy_ms(self) -> list[float]:
        """By device, what it computes and packs."""
        found = [0.0] * self.plan.devices
        for place, width in enumerate(self.plan.widths):
            work = self.forward[place] + self.backward[place] + self.optimizer[place]
            size = self.profile.blocks[place].parameter_bytes
            widest = self.widest[place]
            packing = self.reduction.busy_ms(size, widest) if size and widest > 1 else 0.0
            for device in range(max(width, widest if packing else 0)):
                found[device] += (float(work) if device < width else 0.0) + packing
        return found


def burst_bytes(plan: BurstPlan, profile: Profile) -> list[int]:
    """By device, the most that it holds: of its blocks weights, gradients, optimizer state and saved rows."""
    shared = sharers(profile)
    found, known = [], {}
    for rank in range(plan.devices):
        shares = tuple(
            plan.shares(place)[rank] if rank < width else 0 for place, width in enumerate(plan.widths)
        )
        if shares not in known:
            held = sum(
                2 * block.parameter_bytes + block.optimizer_bytes + rows * block.saved_bytes_per_sample
                for block, rows in zip(profile.blocks, shares, strict=True)
                if rows
            )
            for first, later in shared.items():
                if not shares[first] and any(shares[place] for place in later):
                    block = profile.blocks[first]
                    held += 2 * block.parameter_bytes + block.optimizer_bytes
            transient = (b.transient(rows) for b, rows in zip(profile.blocks, shares, strict=True) if rows)
            known[shares] = held + max(transient, default=0)
        found.append(known[shares])
    return found


def burst_wire_bytes(plan: BurstPlan, profile: Profile, reduction: Reduction) -> float:
    """What devices send each other in a step: gradients, and rows where widths differ, there and back."""
    alive, shared, total = cut_bytes(profile), sharers(profile), 0.0
    for place, block in enumerate(profile.blocks):
        width = max(plan.widths[user] for user in (place, *shared.get(place, ())))
        if width > 1 and block.parameter_bytes:
            total += width * reduction.wire_bytes(block.parameter_bytes, width)
        if place and plan.widths[place - 1] != plan.widths[place]:
            moved = sum(move.rows for move in moves(plan.batch, plan.widths[place - 1], plan.widths[place]))
            total += 2.0 * moved * alive[place]
    return total
