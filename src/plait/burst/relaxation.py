"""Bounds that no plan is below, and good plans, where there are too many blocks to keep every label.

The step is the longest of N chains (:mod:`plait.burst.costs`): for the block j from which on the wire never
rests, backward counts down to j and the wire from there. Any weighted mean of the chains is at most the
longest, and the best plan for such a mean is found block by block, by shortest paths over widths: so for any
price of device time and weights mu of chains,

    bound(price, mu) = least over plans of  mean over mu of chains + price * device time
                    <= least over plans of  step + price * device time

(An infinite price stands for device time alone.)

With M(i) = mu(i) + mu(i+1) + ..., a block's sync counts M(i) times and its backward M(i+1) times less. Round
after round the weights are those that are best against all plans found before (a game of weights against
plans, solved by fictitious play: Brown, "Iterative solution of games by fictitious play", 1951), which lifts
the bound towards the optimum; the plans on the way are good ones.

With many blocks the bound is close: what is left is of the size of a few blocks. It is what certifies a
frontier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from plait import native
from plait.burst.costs import Costs, Floats, Places

_TOGETHER = 96
"""Searches that go side by side: what they need then stays in the processor's cache."""
_PLAYS = 64
"""How often weights and plans take turns."""
_SHARES = (0.0, 0.5, 1.0)
"""Where the weights begin: the wire counts for nothing, as much as computing, for all."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What no part of a plan is below, by price."""

    prices: Floats
    weights: Floats
    """[block, price]: M(i)."""
    rest: Floats
    """[block, width, price]: of all before a block of that width, with moving rows to it."""
    waiting: Floats
    """[price]: of a backlog, for each unit of weight."""


def split(prices: Floats) -> tuple[Floats, Floats]:
    """What a millisecond of step time and one of device time count at each price."""
    alone = np.isinf(prices)
    return np.where(alone, 0.0, 1.0), np.where(alone, 1.0, prices)


class Relaxation:
    """Shortest paths over the widths of a chain, many searches at once.

    A search has a price, weights of chains, and a cap: only the first so many widths are allowed. What it
    finds does not depend on the others beside it, to the last bit: all of it is done element by element.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        # Shared weights are synchronised over the widest of their blocks: at least as long as the best width
        # from the first block's own on.
        self.sync = costs.sync.copy()
        for first in costs.sharers:
            self.sync[first] = np.minimum.accumulate(costs.sync[first][::-1])[::-1]
        self.moving = np.stack([costs.reshard, costs.reshard * costs.wider])
        """[2, block, width before, width after]: what moving rows takes of step time and of device time."""

    def paths(
        self,
        prices: Floats,
        weights: Floats,
        caps: Places,
        starts: Places | None = None,
        dtype: Any = np.float32,
    ) -> Floats:
        """[block, width, search]: the least of the blocks up to each; ``weights`` is [block, search].

        With ``starts``, the place of the first block's width is given: how many devices wait is then known.
        """
        costs, count = self.costs, int(caps.max())
        both = np.stack(split(prices))
        waiting = costs.widths[0] if starts is None else costs.widths[starts]
        counted = (weights * (both[0] + waiting * both[1])).astype(dtype)
        busy, down, sync = (
            table[:, :count].astype(dtype)[:, :, None] for table in (costs.busy, costs.backward, self.sync)
        )
        values: Floats = busy * (both[0] + costs.widths[:count, None] * both[1]).astype(dtype)
        values += sync * counted[:, None]
        values[:-1] -= down[:-1] * counted[1:, None]
        values[:, np.arange(count)[:, None] >= caps] = np.inf
        if starts is not None:
            values[0][np.arange(count)[:, None] != starts] = np.inf
        moving = np.ascontiguousarray(self.moving[:, :, :count, :count], dtype)
        native.paths(values, moving, both.astype(dtype))
        return values

    def plans(self, prices: Floats, values: Floats) -> Places:
        """[search, block]: the plans whose values are least."""
        costs = self.costs
        count, searches = values.shape[1:]
        both = np.stack(split(prices)).astype(values.dtype)
        moving = self.moving[:, :, :count, :count].astype(values.dtype)
        found = np.empty((searches, costs.blocks), dtype=np.int64)
        at = values[-1].argmin(axis=0)
        found[:, -1] = at
        for block in range(costs.blocks - 1, 0, -1):
            value = moving[1, block].take(at, axis=1) * both[1]  # in the order of ``paths``
            value += moving[0, block].take(at, axis=1) * both[0]
            value += values[block - 1]
            at = value.argmin(axis=0)
            found[:, block - 1] = at
        return found

    def chains(self, places: Places) -> Floats:
        """[plan, block]: what is left for the wire at the end if it never rests from a block on."""
        costs = self.costs
        found: Floats = np.cumsum(costs.chosen_sync(places), axis=1)
        found[:, 1:] -= np.cumsum(costs.backward[np.arange(costs.blocks), places], axis=1)[:, :-1]
        return found

    def _balanced(self, prices: Floats, waiting: Floats, turns: list[Places]) -> Floats:
        """[block, search]: the weights that are best against the plans found so far, by fictitious play.

        In turn, the plans' mean has its longest chain weighted, and the plan that is best for the weights so
        far is added to the mean.
        """
        searches = np.arange(len(prices))
        step, device = split(prices)
        chains = np.stack([self.chains(places).astype(np.float32) for places in turns])
        scores = [self.costs.score(places) for places in turns]
        firsts = [self.costs.widths[places[:, 0]] for places in turns]
        base = np.stack(
            [
                step * (score.step_ms - score.tail_ms) + device * (score.device_ms - score.tail_ms * first)
                for score, first in zip(scores, firsts, strict=True)
            ]
        )
        mean, paid, found = chains[-1].copy(), np.zeros_like(base), np.zeros(chains.shape[1:])
        for _ in range(_PLAYS):
            longest = mean.argmax(axis=1)
            found[searches, longest] += 1 / _PLAYS
            paid += base + waiting * chains[:, searches, longest]
            mean += chains[paid.argmin(axis=0), searches]
        return np.cumsum(found[:, ::-1], axis=1)[:, ::-1].T

    def search(
        self, prices: Floats, caps: Places, *, shares: int = len(_SHARES), rounds: int = 2
    ) -> tuple[Places, Floats]:
        """Good plans of every search, [turn, search, block], and the weights of its best bound, [block,
        search].

        ``prices`` and ``caps`` are equally long. What one search finds depends on no other.
        """
        found = np.empty((shares + rounds, len(prices), self.costs.blocks), dtype=np.int64)
        kept = np.empty((self.costs.blocks, len(prices)))
        order = np.argsort(caps, kind="stable")
        for start in range(0, len(order), _TOGETHER):
            some = order[start : start + _TOGETHER]
            begun = []
            for share in _SHARES[:shares]:
                begun.append(np.full((self.costs.blocks, len(some)), share))
                begun[-1][0] = 1.0
            found[:, some], kept[:, some] = self._played(prices[some], caps[some], None, begun, rounds)
        return found, kept

    def _played(
        self, prices: Floats, caps: Places, starts: Places | None, begun: list[Floats], rounds: int
    ) -> tuple[Places, Floats]:
        """Rounds from the best of the weights that are given, each [block, search]."""
        found: list[Places] = []
        best, kept = np.full(len(prices), -np.inf), begun[0]
        step, device = split(prices)
        waiting = step + (self.costs.widths[0] if starts is None else self.costs.widths[starts]) * device
        for turn in range(len(begun) + rounds):
            weights = begun[turn] if turn < len(begun) else self._balanced(prices, waiting, found)
            values = self.paths(prices, weights, caps, starts)
            least = values[-1].min(axis=0)
            kept = np.where(least > best, weights, kept)
            best = np.maximum(best, least)
            found.append(self.plans(prices, values))
        return np.stack(found), kept

    def least(
        self, prices: Floats, weights: Floats, *, rounds: int, starts: bool = False
    ) -> tuple[Floats, Floats]:
        """[price]: the best bounds over all widths, and their weights, that rounds find from those given.

        With ``starts`` every width of the first block is a search of its own, and the lowest counts: that is
        closer where devices wait for the wire, and takes as many times longer.
        """
        count = len(self.costs.widths)
        each = count if starts else 1
        prices, weights = np.repeat(prices, each), np.repeat(weights, each, axis=1)
        firsts = np.tile(np.arange(count), len(prices) // each)
        caps, found, kept = np.full(len(prices), count), np.empty(len(prices)), np.empty_like(weights)
        for begin in range(0, len(prices), _TOGETHER):
            some = slice(begin, begin + _TOGETHER)
            first = firsts[some] if starts else None
            free = np.zeros_like(weights[:, some])  # where the wire hardly matters, better than any weights
            free[0] = 1.0
            _, kept[:, some] = self._played(prices[some], caps[some], first, [free, weights[:, some]], rounds)
            values = self.paths(prices[some], kept[:, some], caps[some], first, np.float64)
            found[some] = values[-1].min(axis=0)
        lowest = found.reshape(-1, each)
        at = lowest.argmin(axis=1) + each * np.arange(len(lowest))
        return found[at], kept[:, at]

    def bounds(self, prices: Floats, weights: Floats) -> Bounds:
        """The bounds of given weights, also of parts of plans."""
        costs = self.costs
        caps = np.full(len(prices), len(costs.widths))
        values = self.paths(prices, weights, caps, dtype=np.float64)
        step, device = split(prices)
        rest = np.zeros_like(values)
        for block in range(1, costs.blocks):
            moving = self.moving[0, block][..., None] * step + self.moving[1, block][..., None] * device
            rest[block] = (values[block - 1][:, None] + moving).min(axis=0)
        return Bounds(
            prices=prices, weights=weights, rest=rest, waiting=step + float(costs.widths[0]) * device
        )
