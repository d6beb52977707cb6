"""The frontier of plans: exact by labels where that can be done, else good plans and how good they are.

1. For every cap on the width, prices of device time from nothing to everything give plans that are good for
   them (:mod:`plait.burst.relaxation`), and so do those plans' crossings (:mod:`plait.burst.crossing`).
2. Up to ``EXACT_WORK``, labels look for all that is better (:mod:`plait.burst.labels`). Where they come to
   an end, the frontier is exact. Where there are too many, they look for what is better by more than 1%.
3. Else bounds say how far the plans may be from the best (:func:`certified`).

What is found within a cap depends on nothing beyond it, and whatever was found within smaller caps counts,
too: so a device more never makes anything worse, exact or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plait.burst.costs import Costs, Floats, Places
from plait.burst.crossing import Crossings
from plait.burst.labels import Ceiling, exact
from plait.burst.memory import Memory
from plait.burst.pareto import minimal
from plait.burst.relaxation import Relaxation, split

EXACT_WORK = 20_000
"""Labels are tried up to this number of blocks times widths squared: 50 blocks at 20 widths.

They may fail, and take seconds to; beyond 16 widths, they are tried at every fourth only, unless there is
no more than ``_EASY`` of this work.
"""
_EASY = 2_000
EXACT_BLOCKS = 64
"""Longer chains are not searched by labels at all: at many blocks the bounds are close."""
SLACK = 0.01
"""What labels may let go where they become too many."""
_PRICES = 12
_MANY = 300
"""Longer chains are searched less thoroughly: what is lost weighs less there, and costs more."""
_FIRST = 16
"""Up to which block a plan may begin at another width."""
_NEAR = 1.001
"""Of points closer than this in both figures, one is enough where there are thousands."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Plans of a frontier, fastest first."""

    places: Places
    """[plan, block]: places of the widths."""
    step_ms: Floats
    device_ms: Floats
    gap: float = 0.0
    """No plan has both figures below those of each of these over 1 + gap."""


def find(costs: Costs, memory: Memory) -> Found:
    """The frontier over all widths of the costs."""
    caps = len(costs.widths)
    pools, *weights = _seeds(costs, memory)
    gap: float | None = None
    for cap in range(caps, 0, -1):  # a smaller cap is looked at only where no larger one was exact
        work = costs.blocks * cap**2
        if work > EXACT_WORK or costs.blocks > EXACT_BLOCKS or (cap > 16 and cap % 4 and work > _EASY):
            continue
        within = costs.capped(cap)
        limited = Memory(within, memory.given)
        known = _front(within, np.concatenate(pools[:cap]))
        better, its_gap = _labelled(within, limited, known)
        pools.append(better)
        if cap == caps:
            gap = its_gap
        if its_gap == 0.0:
            break
    found = _front(costs, np.concatenate(pools))
    if not len(found.places):
        raise memory.too_small()
    if gap is None:
        gap = certified(costs, found, *weights)
    return Found(places=found.places, step_ms=found.step_ms, device_ms=found.device_ms, gap=gap)


def _labelled(costs: Costs, memory: Memory, known: Found) -> tuple[Places, float | None]:
    """What labels find beyond the known plans, and how far from the best that may be; None: not known."""
    if not len(known.places):
        found = exact(costs, memory)
        return (_nothing(costs), None) if found is None else (found, 0.0)
    some = np.unique(np.linspace(0, len(known.places) - 1, 4 * _PRICES).astype(int))
    step_ms, device_ms, prices = corners(known.step_ms[some], known.device_ms[some])
    relaxation = Relaxation(costs)
    even = np.full((costs.blocks, len(prices)), 0.5)
    even[0] = 1.0
    bounds = relaxation.bounds(prices, relaxation.least(prices, even, rounds=6)[1])
    for slack in (0.0, SLACK):
        ceiling = Ceiling.under(bounds, step_ms, device_ms, slack=slack)
        found = exact(costs, memory, ceiling=ceiling)
        if found is not None:
            return found, slack
    return _nothing(costs), None


def corners(step_ms: Floats, device_ms: Floats) -> tuple[Floats, Floats, Floats]:
    """The corners of a frontier (fastest first) and the prices at which its neighbours are worth the same.

    What is better than the frontier has, for some corner, less of both. At the ends one of the two is
    infinite.
    """
    steps = np.concatenate([step_ms, [np.inf]])
    devices = np.concatenate([[np.inf], device_ms])
    between = np.diff(step_ms) / -np.diff(device_ms)
    return steps, devices, np.concatenate([[0.0], between, [np.inf]])


def certified(costs: Costs, found: Found, known: Floats, weights: Floats) -> float:
    """How far a frontier may be from the best: no plan has both figures below all of its over 1 + this.

    Bounds begin with the ``weights``, [block, price], of prices that were looked at before.
    """
    steps, devices, _ = corners(found.step_ms, found.device_ms)
    # Prices at even distances along the frontier, each over a stretch of it.
    count = 2 * _PRICES
    ends = np.unique(np.linspace(0, len(found.step_ms) - 1, count).astype(int))
    _, _, prices = corners(found.step_ms[ends], found.device_ms[ends])
    nearest = np.abs(_order(prices)[:, None] - _order(known)).argmin(axis=1)
    relaxation = Relaxation(costs)
    least, weights = relaxation.least(prices, weights[:, nearest], rounds=3)
    gap = _gap(prices, least, steps, devices)
    if gap > SLACK and costs.blocks <= _MANY:
        closer, _ = relaxation.least(prices, weights, rounds=3, starts=True)
        gap = _gap(prices, np.maximum(least, closer), steps, devices)
    return gap


def _order(prices: Floats) -> Floats:
    """Prices from nothing to everything on a scale on which they can be compared."""
    return np.log(np.clip(prices, 1e-9, 1e3))


def _gap(prices: Floats, least: Floats, steps: Floats, devices: Floats) -> float:
    """The largest share by which a plan could lie below a corner in both figures, for all that bounds say."""
    step, device = split(prices)
    with np.errstate(invalid="ignore"):  # nothing times infinity
        worth = np.where(step[:, None] > 0, steps, 0.0) + np.where(
            device[:, None] > 0, device[:, None] * devices, 0.0
        )
    # A bound may say nothing at all; where the frontier is at zero, there is nothing to be said.
    over = np.where(worth > 0, np.inf, 1.0)
    np.divide(worth, least[:, None], out=over, where=(worth > 0) & (least[:, None] > 0))
    return float(np.clip(over.min(axis=0).max() - 1, 0.0, np.finfo(float).max))


def _seeds(costs: Costs, memory: Memory) -> tuple[list[Places], Floats, Floats]:
    """By cap, plans within it that are good for some price; the prices, and their weights with no cap."""
    caps = np.arange(1, len(costs.widths) + 1)
    count, shares, rounds = (_PRICES, 1, 3) if costs.blocks > _MANY else (2 * _PRICES, 2, 3)
    prices = np.concatenate([[0.0], np.geomspace(1e-6, 4.0, count - 2), [1e6]])
    turns, weights = Relaxation(costs).search(
        np.tile(prices, len(caps)), np.repeat(caps, count), shares=shares, rounds=rounds
    )
    turns = turns.reshape(len(turns), len(caps), count, costs.blocks)
    same = np.repeat(np.arange(len(caps))[:, None], costs.blocks, axis=1)
    found = []
    for cap in caps.tolist():
        plans = drawn = turns[:, cap - 1].reshape(-1, costs.blocks)
        if costs.blocks > 1 and not costs.sharers:
            plans = _paired(costs, plans, len(turns))
            plans = _narrowed(costs, _front(costs, np.concatenate([plans, same[:cap]])).places, same[:cap])
            plans = _mixed(costs, plans)
        else:
            plans = _front(costs, np.concatenate([plans, same[:cap]])).places
        fits = memory.fits(plans)
        if not fits.all():
            plans = np.concatenate(
                [plans[fits], _fitting(costs, memory, np.concatenate([drawn, same[:cap]]))]
            )
        found.append(plans)
    return found, prices, weights[:, -count:]


def _fitting(costs: Costs, memory: Memory, plans: Places) -> Places:
    """The best of plans that fit, and of the crossings of neighbours; better ones that do not fit hid them.

    Of equal devices the first needs least with every block as wide as can be: where any plan fits, that does.
    """
    plans = _front(costs, plans[memory.fits(plans)]).places
    if len(plans) < 2 or costs.blocks < 2 or costs.sharers:
        return plans
    mixed = _mixed(costs, plans)
    return np.concatenate([plans, mixed[memory.fits(mixed)]])


def _paired(costs: Costs, plans: Places, turns: int) -> Places:
    """The best of plans, and of the crossings of those that several turns found for one price.

    Where the wire and computing are to be even, the best plan is one of each kind in part.
    """
    both = Crossings(costs, plans)
    each = len(plans) // turns
    pairs = [(one, other) for one in range(turns) for other in range(turns) if one != other]
    front, behind = (
        (np.array(side)[:, None] * each + np.arange(each)).ravel() for side in zip(*pairs, strict=True)
    )
    return _best(both, front, both, behind)


def _narrowed(costs: Costs, plans: Places, same: Places) -> Places:
    """The best of plans, and of those with another width up to one of the first blocks."""
    fronts, backs = Crossings(costs, same), Crossings(costs, plans)
    front = np.repeat(np.arange(len(same)), len(plans))
    behind = np.tile(np.arange(len(plans)), len(same))
    return _best(fronts, front, backs, behind, cuts=_FIRST)


def _mixed(costs: Costs, plans: Places) -> Places:
    """The best of plans, fastest first, and of the crossings of neighbours, thinned where they lie close."""
    both = Crossings(costs, plans)
    left, right = np.arange(len(plans) - 1), np.arange(1, len(plans))
    return _best(both, np.concatenate([left, right]), both, np.concatenate([right, left]))


def _best(
    fronts: Crossings, front: Places, backs: Crossings, behind: Places, *, cuts: int | None = None
) -> Places:
    """The best of the plans ``backs`` and of crossings with ``fronts``, fastest first."""
    step_ms, device_ms = fronts.cross(front, backs, behind, cuts=cuts)
    figures = np.stack(
        [
            np.concatenate([backs.step_ms, step_ms.ravel()]),
            np.concatenate([backs.device_ms, device_ms.ravel()]),
        ]
    )
    chosen = minimal(figures)
    chosen = chosen[_thinned(*figures[:, chosen])]
    own, mixed = chosen[chosen < len(backs.plans)], chosen[chosen >= len(backs.plans)]
    pair, cut = np.divmod(mixed - len(backs.plans), step_ms.shape[1])
    crossed = fronts.crossed(front[pair], backs, behind[pair], cut)
    every = np.concatenate([backs.plans[own], crossed])
    return every[np.argsort(np.concatenate([figures[0, own], figures[0, mixed]]), kind="stable")]


def _front(costs: Costs, plans: Places) -> Found:
    """Those of plans that no other is at or below in both figures."""
    score = costs.score(plans)
    best = minimal(np.stack([score.step_ms, score.device_ms]))
    return Found(places=plans[best], step_ms=score.step_ms[best], device_ms=score.device_ms[best])


def _thinned(step_ms: Floats, device_ms: Floats) -> Places:
    """Points of a frontier, fastest first, to which all others are close; both ends are among them."""
    if len(step_ms) < 100:
        return np.arange(len(step_ms))
    kept, at = [0], 0
    while at < len(step_ms) - 1:
        # The next that lies beyond the last in device time; from there as far on as step time is close.
        start = int(np.searchsorted(-device_ms, -device_ms[at] / _NEAR, side="right"))
        if start >= len(step_ms):
            kept.append(len(step_ms) - 1)
            break
        at = max(start, int(np.searchsorted(step_ms, step_ms[start] * _NEAR, side="right")) - 1)
        kept.append(at)
    return np.unique(kept)


def _nothing(costs: Costs) -> Places:
    return np.empty((0, costs.blocks), dtype=np.int64)
