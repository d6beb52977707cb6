"""The exact frontier of (step time, device time): label-setting dynamic programming over blocks and widths.

From the last block to the first, a label at (block, width) stands for one choice of widths of the blocks
behind it:

    clock       forward, backward and optimizer of these blocks, and moving rows between them
    device      their device time
    backlog     what the wire still has to synchronise when their backward has ended

Whatever the blocks before choose, they add to clock and device, and make of a backlog q some max(q - b, g).
So a label is no better than another, whatever follows, if none of these four is smaller:

    clock    clock + backlog    device    device + backlog * the most devices that could wait for it

A backlog that will not delay a later one, whatever follows, counts as the largest of that kind. Weights that
several blocks share, and memory, add figures of their own, which must not be smaller either. Where
plans are known already, labels whose bounds (:mod:`plait.burst.relaxation`) say that nothing better comes of
them go, too. Nothing else is ever dropped, so the frontier is exact; the number of labels has no useful
bound, and above ``most`` of them the search gives up.

The idea of planning widths block by block, and of bounding device time, is from Park et al., "Efficient
Strong Scaling Through Burst Parallel Training" (DeepPool), MLSys 2022, whose planner is greedy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plait.burst.costs import Costs, Floats, Places
from plait.burst.memory import Memory
from plait.burst.pareto import minimal
from plait.burst.relaxation import Bounds, split

MOST = 10_000
"""Labels of a block, over all its widths, beyond which a search gives up."""


@dataclass(frozen=True, kw_only=True)
class _Labels:
    """Labels of one block, all widths together; the arrays are equally long."""

    place: Places
    """The width, as a place in the costs' widths."""
    parent: Places
    """The label of the block behind that it goes on from."""
    clock: Floats
    device: Floats
    backlog: Floats
    shared: Places
    """[group, label]: the widest place so far of blocks that share weights."""
    held: Floats
    """[rank, label]: bytes that stay."""
    passing: Floats
    """[rank, label]: bytes needed for a moment."""

    def take(self, chosen: Places) -> _Labels:
        return _Labels(
            place=self.place[chosen],
            parent=self.parent[chosen],
            clock=self.clock[chosen],
            device=self.device[chosen],
            backlog=self.backlog[chosen],
            shared=self.shared[:, chosen],
            held=self.held[:, chosen],
            passing=self.passing[:, chosen],
        )


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """Plans that are known: only what may come to lie below them matters.

    Between two neighbours of a frontier lies a corner, the slower one's step time and the other's device
    time. A plan that is better than all of them is below some corner in both; one whose bound, at the
    corner's price, is not less than the corner's worth is not below that one.
    """

    bounds: Bounds
    worth: Floats
    """[price]: what the corner of each price is worth."""

    @classmethod
    def under(cls, bounds: Bounds, step_ms: Floats, device_ms: Floats, *, slack: float = 0.0) -> Ceiling:
        """The ceiling of corners, one a price; what is not better by more than the slack is let go."""
        step, device = split(bounds.prices)
        with np.errstate(invalid="ignore"):  # nothing times infinity, at both ends of a frontier
            worth = np.where(step > 0, step_ms, 0.0) + np.where(device > 0, device * device_ms, 0.0)
        return cls(bounds=bounds, worth=worth / (1 + slack) * (1 + 1e-12))

    def open(self, block: int, place: int, clock: Floats, device: Floats, backlog: Floats) -> Places:
        """The labels from which some corner may be undercut."""
        bounds = self.bounds
        price, device_price = split(bounds.prices)
        found = np.zeros(len(clock), dtype=bool)
        for k in range(len(price)):
            at = price[k] * clock + device_price[k] * device
            at += bounds.waiting[k] * bounds.weights[block, k] * backlog + bounds.rest[block, place, k]
            found |= at < self.worth[k]
        return np.flatnonzero(found)


class _Search:
    def __init__(self, costs: Costs, memory: Memory, most: int, ceiling: Ceiling | None) -> None:
        self.costs, self.memory, self.most, self.ceiling = costs, memory, most, ceiling
        self.widths = costs.widths.astype(np.float64)
        self.groups = list(costs.sharers.items())
        # A shared weight's widest user so far is one more figure that must not be smaller, where a wider sync
        # is never shorter; elsewhere only labels with the same are compared.
        self.rising = [bool((np.diff(costs.sync[first]) >= 0).all()) for first, _ in self.groups]
        self.covered = _covered(costs)
        least = memory.resident.min(axis=2)
        self.least_held = np.concatenate([np.zeros((len(memory.ranks), 1)), np.cumsum(least, axis=1)], axis=1)

    def places(self) -> Places | None:
        """The plans on the frontier, [plan, block]; None where labels are too many, empty if none fits."""
        last = self.costs.blocks - 1
        kept: list[_Labels] = []
        for block in range(last, -1, -1):
            found = []
            for place in range(len(self.widths)):
                labels = self._extended(block, place, kept[-1] if kept else None)
                if self.ceiling is not None:
                    figures = labels.clock, labels.device, labels.backlog
                    labels = labels.take(self.ceiling.open(block, place, *figures))
                chosen = self._undominated(block, labels)
                found.append(labels.take(chosen))
                if sum(len(some.clock) for some in found) > self.most:
                    return None
            kept.append(_joined(found))
        return self._ended(kept)

    def _extended(self, block: int, place: int, behind: _Labels | None) -> _Labels:
        """All labels behind, gone on to a width of this block."""
        costs, width = self.costs, self.widths[place]
        if behind is None:
            behind = _start(len(self.groups), len(self.memory.ranks))
            clock, device = behind.clock, behind.device
        else:
            moving = costs.reshard[block + 1][place][behind.place]
            clock = behind.clock + moving
            device = behind.device + moving * costs.wider[place][behind.place]
        busy = costs.busy[block, place]
        sync, shared = self._sync(block, place, behind.shared)
        held = behind.held + self.memory.resident[:, block, place][:, None]
        for group, (first, _) in enumerate(self.groups):
            if first == block:  # devices that only later blocks of the group are on hold its weights too
                for k, rank in enumerate(self.memory.ranks):
                    widest = self.widths[np.maximum(behind.shared[group], place)]
                    held[k] += ((widest > rank) & (width <= rank)) * self.memory.static[block]
        return _Labels(
            place=np.full(len(clock), place),
            parent=np.arange(len(clock)),
            clock=clock + busy,
            device=device + busy * width,
            backlog=np.maximum(0.0, behind.backlog - costs.backward[block, place]) + sync,
            shared=shared,
            held=held,
            passing=np.maximum(behind.passing, self.memory.transient[:, block, place][:, None]),
        )

    def _sync(self, block: int, place: int, shared: Places) -> tuple[Floats | float, Places]:
        """The sync of a block by label, and the groups' widest; a group that is through is forgotten."""
        sync: Floats | float = float(self.costs.sync[block, place])
        shared = shared.copy()
        for group, (first, later) in enumerate(self.groups):
            if block in later:
                shared[group] = np.maximum(shared[group], place)
            elif block == first:
                sync = self.costs.sync[block][np.maximum(shared[group], place)]
                shared[group] = -1
        return sync, shared

    def _undominated(self, block: int, labels: _Labels) -> Places:
        remaining = self.least_held[:, block][:, None]
        fits = np.flatnonzero(
            (labels.held + labels.passing + remaining <= self.memory.limits[:, None]).all(axis=0)
        )
        backlog = np.maximum(labels.backlog, self.covered[block])
        figures = [labels.clock, labels.device]
        if len(backlog) and backlog.max() > self.covered[block]:
            figures += [labels.clock + backlog, labels.device + self.widths[-1] * backlog]
        for group, rising in enumerate(self.rising):
            widest = labels.shared[group].astype(np.float64)
            figures += [widest] if rising else [widest, -widest]
        figures += [*labels.held, *labels.passing]
        return fits[minimal(np.stack(figures)[:, fits])]

    def _ended(self, kept: list[_Labels]) -> Places:
        labels = kept[-1]
        step = labels.clock + labels.backlog
        device = labels.device + labels.backlog * self.widths[labels.place]
        at = minimal(np.stack([step, device]))
        found = []
        for one in reversed(kept):
            found.append(one.place[at])
            at = one.parent[at]
        return np.stack(found, axis=1)


def _covered(costs: Costs) -> list[float]:
    """By block, a backlog behind it that delays no sync before it, whatever the widths.

    It must be gone before block i-1's sync begins (that takes no more than its backward), or, where it is
    not, have pushed back only syncs that the wire waits for later anyway.
    """
    found = [0.0]
    for block in range(costs.blocks - 1):
        sync = costs.sync[block]
        if block in costs.sharers:
            sync = np.full_like(sync, sync.max())
        found.append(float((costs.backward[block] + np.maximum(0.0, found[-1] - sync)).min()))
    return found


def _start(groups: int, ranks: int) -> _Labels:
    """Before any block: one label that has cost nothing."""
    nothing = np.zeros(1)
    return _Labels(
        place=np.zeros(1, dtype=np.int64),
        parent=np.zeros(1, dtype=np.int64),
        clock=nothing,
        device=nothing,
        backlog=nothing,
        shared=np.full((groups, 1), -1),
        held=np.zeros((ranks, 1)),
        passing=np.zeros((ranks, 1)),
    )


def _joined(found: list[_Labels]) -> _Labels:
    return _Labels(
        place=np.concatenate([one.place for one in found]),
        parent=np.concatenate([one.parent for one in found]),
        clock=np.concatenate([one.clock for one in found]),
        device=np.concatenate([one.device for one in found]),
        backlog=np.concatenate([one.backlog for one in found]),
        shared=np.concatenate([one.shared for one in found], axis=1),
        held=np.concatenate([one.held for one in found], axis=1),
        passing=np.concatenate([one.passing for one in found], axis=1),
    )


def exact(
    costs: Costs, memory: Memory, *, ceiling: Ceiling | None = None, most: int | None = None
) -> Places | None:
    """The plans of the exact frontier, those below the ceiling if one is given, as [plan, block] places of
    widths.

    None where that takes more than ``most`` labels (by default ``MOST``) at some block; none at all where no
    plan is left.
    """
    return _Search(costs, memory, MOST if most is None else most, ceiling).places()
