"""Plans between two plans: one up to a block, the other from there on, all such places of a cut at once.

Their costs follow from running sums: of the first plan's blocks before the cut, and of the second plan's
behind it. A chain of equal blocks, whose best plans have one width throughout, gets its whole frontier this
way; and a plan whose devices wait for the wire at the end gets a narrow beginning, so that fewer of them do.
"""

from __future__ import annotations

import numpy as np

from plait.burst.costs import Costs, Floats, Places


class Crossings:
    """Running sums of plans, [plan, block] places of widths. Sharing weights is not looked at."""

    def __init__(self, costs: Costs, plans: Places) -> None:
        self.costs, self.plans = costs, plans
        every, widths = np.arange(costs.blocks), costs.widths.astype(np.float64)
        wide = widths[plans]
        busy, down, sync = (table[every, plans] for table in (costs.busy, costs.backward, costs.sync))
        moving = np.zeros_like(busy)
        moving[:, 1:] = costs.reshard[every[1:], plans[:, :-1], plans[:, 1:]]
        wider = wide.copy()
        wider[:, 1:] = np.maximum(wide[:, :-1], wide[:, 1:])
        # What lies before a cut, and behind it: moving rows at the cut itself belongs to neither.
        clock, device = np.cumsum(busy + moving, axis=1), np.cumsum(busy * wide + moving * wider, axis=1)
        self.clock_before, self.device_before = clock[:, :-1], device[:, :-1]
        self.clock_behind = _behind(busy + moving)[:, 1:] - moving[:, 1:]
        self.device_behind = _behind(busy * wide + moving * wider)[:, 1:] - (moving * wider)[:, 1:]
        # The wire's chains: those that begin before the cut, what a backlog behind it loses on the way to the
        # first block, and that backlog.
        synced, passed = np.cumsum(sync, axis=1), np.cumsum(down, axis=1)
        chain = np.maximum.accumulate(synced - passed + down, axis=1)
        self.chain_before = chain[:, :-1]
        self.lost_before = (passed - synced)[:, :-1]
        sync_behind, down_behind = _behind(sync), _behind(down)
        most = np.maximum.accumulate((down_behind - sync_behind + sync)[:, ::-1], axis=1)[:, ::-1]
        self.backlog = (sync_behind - down_behind + most)[:, 1:]
        self.first = wide[:, :1]
        self.step_ms: Floats = clock[:, -1] + chain[:, -1]
        """[plan]: of the plans as they are."""
        self.device_ms: Floats = device[:, -1] + chain[:, -1] * wide[:, 0]

    def cross(
        self, front: Places, back: Crossings, behind: Places, *, cuts: int | None = None
    ) -> tuple[Floats, Floats]:
        """[pair, cut]: step and device time where plans ``front`` of these go on as plans ``behind`` of
        ``back``.

        Cut c, from 0 on, takes blocks c + 1 and later from the latter; ``cuts`` says how many of them are
        wanted.
        """
        costs = self.costs
        upto = slice(0, costs.blocks - 1 if cuts is None else min(cuts, costs.blocks - 1))
        here, there = self.plans[:, upto][front], back.plans[:, 1:][:, upto][behind]
        joint = costs.reshard[1:][upto][np.arange(here.shape[1]), here, there]
        clock = self.clock_before[:, upto][front] + back.clock_behind[:, upto][behind] + joint
        device = self.device_before[:, upto][front] + back.device_behind[:, upto][behind]
        device += joint * costs.widths[np.maximum(here, there)]
        carried = back.backlog[:, upto][behind] - self.lost_before[:, upto][front]
        tail = np.maximum(self.chain_before[:, upto][front], carried)
        step: Floats = clock + tail
        device += tail * self.first[front]
        return step, device

    def crossed(self, front: Places, back: Crossings, behind: Places, cut: Places) -> Places:
        """[pair, block]: the plans themselves."""
        return np.where(np.arange(self.costs.blocks) <= cut[:, None], self.plans[front], back.plans[behind])


def _behind(values: Floats) -> Floats:
    """[plan, block]: the sum from that block on."""
    found: Floats = np.cumsum(values[:, ::-1], axis=1)[:, ::-1]
    return found
