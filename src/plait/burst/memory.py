"""What a plan holds on each device: weights, gradients, optimizer state and activations, against its memory.

Device r holds, of every block wider than r, the weights, their gradients and the optimizer's state, and what
forward keeps of its share of rows; for a moment also what the most demanding of its passes needs. Device 0
runs every block with the largest share, and so on down: device r never holds more than device r - 1. So of
equal devices only the first can be too small, and of unequal ones only those with less memory than all before
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from plait.burst.costs import Costs, Floats, Places
from plait.burst.rows import shares
from plait.errors import UsageError
from plait.units import format_bytes


class Memory:
    """The bytes of blocks at their widths on the devices that can be too small, ``ranks``."""

    def __init__(self, costs: Costs, limits: Sequence[float]) -> None:
        self.costs, self.given = costs, limits
        blocks, widths = costs.profile.blocks, costs.widths.tolist()
        self.static = np.array([float(2 * block.parameter_bytes + block.optimizer_bytes) for block in blocks])
        most = min(len(limits), max(widths))
        lowest = np.minimum.accumulate(np.array(limits[:most]))
        ranks = [rank for rank in range(most) if rank == 0 or lowest[rank] < lowest[rank - 1]]
        saved = np.array([float(block.saved_bytes_per_sample) for block in blocks])
        base = np.array([float(block.transient_bytes) for block in blocks])
        each = np.array([float(block.transient_bytes_per_sample) for block in blocks])
        rows = np.array(
            [[(*shares(costs.batch, width), *[0] * most)[rank] for width in widths] for rank in ranks]
        )
        held = rows > 0
        resident = held[:, None, :] * self.static[:, None] + rows[:, None, :] * saved[:, None]
        transient = held[:, None, :] * (base[:, None] + rows[:, None, :] * each[:, None])
        # What cannot be too small, whatever the widths, needs no look.
        tight = [
            k
            for k, rank in enumerate(ranks)
            if resident[k].max(axis=1).sum() + transient[k].max() > limits[rank]
        ]
        self.ranks = tuple(ranks[k] for k in tight)
        self.limits = np.array([limits[rank] for rank in self.ranks], dtype=np.float64)
        self.resident: Floats = resident[tight].astype(np.float64)
        """[rank, block, width]: what stays during the step."""
        self.transient: Floats = transient[tight].astype(np.float64)

    def bytes(self, places: Places) -> Floats:
        """[plan, rank]: the most that plans ([plan, block] places of widths) hold on each of ``ranks``."""
        every = np.arange(self.costs.blocks)
        found = np.empty((len(places), len(self.ranks)))
        for k, rank in enumerate(self.ranks):
            resident = self.resident[k][every, places].sum(axis=1)
            for first, later in self.costs.sharers.items():
                own = self.costs.widths[places[:, first]] > rank
                any_of = (self.costs.widths[places[:, [first, *later]]] > rank).any(axis=1)
                resident += (any_of & ~own) * self.static[first]
            found[:, k] = resident + self.transient[k][every, places].max(axis=1)
        return found

    def fits(self, places: Places) -> NDArray[np.bool_]:
        """By plan, whether it stays within every limit."""
        return np.asarray((self.bytes(places) <= self.limits).all(axis=1))

    def too_small(self) -> UsageError:
        """The error of devices that no plan fits: what the least demanding one needs."""
        widest = np.full((1, self.costs.blocks), len(self.costs.widths) - 1)
        least = int(self.bytes(widest)[0, 0]) if self.ranks and self.ranks[0] == 0 else 0
        width = int(self.costs.widths[-1])
        return UsageError(
            f"no plan fits: with every block on {width} devices, the first needs {format_bytes(least)}",
            setting="memory",
            works=f"{least} for each device, more devices, or a smaller batch",
        )
