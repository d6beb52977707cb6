"""The candidates that are worth a look: a ladder of every family, and depths made for these very links.

A uniform pipeline hides a transfer of c ms behind micro-batches of f+b ms with depth 1 + ceil(2c/(f+b)), so
this is where each link starts; from there one link at a time goes up or down while that pays. About thirty
predictions for every number of micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from plait.pipeline.candidate import Candidate
from plait.pipeline.orders import Family, Order, depth, kfkb, per_link_depth, work_conserving
from plait.pipeline.outlook import Outlook

_GAIN = 0.005
"""A step in the search for depths must save so much, or it would follow rounding."""


def ladder(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... and the most."""
    steps = (
        {1, most} | {2**i for i in range(1, most.bit_length())} | {3 * 2**i for i in range(most.bit_length())}
    )
    return sorted(step for step in steps if step <= most)


def fixed(stages: int, micro_batches: int, families: Sequence[Family]) -> Iterator[Order]:
    """The ladders of the families, 1F1B first; what is the same twice comes once."""
    seen = set()
    for order in _ladders(stages, micro_batches, families):
        key = order.steps or order.caps
        if key not in seen:
            seen.add(key)
            yield order


def _ladders(stages: int, micro_batches: int, families: Sequence[Family]) -> Iterator[Order]:
    yield kfkb(stages, micro_batches, 1)
    if "kfkb" in families:
        for k in ladder(micro_batches):
            yield kfkb(stages, micro_batches, k)
    if "depth" in families and stages > 1:
        for delta in ladder(micro_batches):
            yield depth(stages, micro_batches, delta)
            if delta * (stages - 1) >= micro_batches:
                break
    if "capped" in families:
        for cap in ladder(micro_batches):
            if cap > 1 or stages == 1:
                yield work_conserving(stages, micro_batches, cap)


def search(
    outlook: Outlook, stages: int, global_batch: int, micro_batches: Iterable[int], families: Sequence[Family]
) -> list[Candidate]:
    """The candidates that fit, each of which ``outlook`` has predicted."""
    found: dict[Candidate, None] = {}
    for count in micro_batches:
        for order in fixed(stages, count, families):
            found[Candidate(order=order, global_batch=global_batch)] = None
        if "depth" in families and stages > 2:
            found |= dict.fromkeys(deepen(outlook, stages, global_batch, count))
        if "capped" in families:
            found |= dict.fromkeys(fill(outlook, stages, global_batch, count))
    fitting = [candidate for candidate in found if outlook.fits(candidate)]
    for candidate in fitting:
        outlook.step_ms(candidate)
    return fitting


def deepen(outlook: Outlook, stages: int, global_batch: int, micro_batches: int) -> list[Candidate]:
    """The best depths, link by link, that fit; empty where none do."""

    def candidate(depths: Sequence[int]) -> Candidate:
        order = per_link_depth(stages, micro_batches, depths)
        return Candidate(order=order, global_batch=global_batch)

    depths = _needed(outlook, candidate([1] * (stages - 1)))
    while not outlook.fits(candidate(depths)):
        deepest = max(depths)
        if deepest == 0:
            return []
        depths[depths.index(deepest)] -= 1
    best = candidate(depths)
    while True:
        steps = [candidate(_changed(depths, link, by)) for link in range(stages - 1) for by in (1, 2, -1)]
        steps = [step for step in steps if outlook.fits(step)]
        next_ = min(steps, key=outlook.step_ms, default=best)
        if outlook.step_ms(next_) > (1 - _GAIN) * outlook.step_ms(best):
            return [best]
        best = next_
        assert best.order.depths is not None, "depths were asked for"
        depths = list(best.order.depths)


def fill(outlook: Outlook, stages: int, global_batch: int, micro_batches: int) -> list[Candidate]:
    """The work-conserving order that uses all the memory there is, stage by stage."""
    caps: list[int] = []
    for stage in range(stages):
        low, high = 1, micro_batches
        while low < high:  # the largest cap with which this stage fits, the others having the least
            middle = (low + high + 1) // 2
            trial = Candidate(
                order=work_conserving(stages, micro_batches, [*caps, *[middle] * (stages - stage)]),
                global_batch=global_batch,
            )
            fits = outlook.peak_bytes(trial)[stage] <= outlook.limits[stage]
            low, high = (middle, high) if fits else (low, middle - 1)
        caps.append(low)
    order = work_conserving(stages, micro_batches, caps)
    return [Candidate(order=order, global_batch=global_batch)]


def _needed(outlook: Outlook, candidate: Candidate) -> list[int]:
    """Depths that hide each link's transfers behind the slowest stage's computing."""
    now = outlook.conditions(candidate.rows)
    period_ms = max(load.forward_ms + load.backward_ms for load in now.loads)
    depths = []
    for link, wires in enumerate(now.network.links):
        sizes = now.loads[link].output_bytes, now.loads[link + 1].gradient_bytes
        there_and_back_ms = sum(
            wire.latency_ms + 1e3 * size / wire.bytes_per_s
            for wire, size in zip((wires.forward, wires.backward), sizes, strict=True)
        )
        needed = 1 + math.ceil(there_and_back_ms / period_ms) if period_ms else 1
        depths.append(min(needed, candidate.order.micro_batches))
    return depths


def _changed(depths: Sequence[int], link: int, by: int) -> list[int]:
    return [max(0, each + by) if place == link else each for place, each in enumerate(depths)]
