"""Where to cut a chain into shards, and what becomes of their activations: the fastest plan that fits.

The forecast of a cut (:mod:`plait.spill.forecast`) is a sum over neighbouring shards once the window is
fixed:

1. For each window size, set that much of the arena aside; the rest saves transfers. Sizes are tried in the
   order of what no cut with them can beat, until one found is as fast as all that are left.
2. Within a window the best cut is found by dynamic programming (:mod:`plait.spill.cutting`).
3. With plenty of memory for activations all of them are kept, and the search is quick. As keeping is fastest,
   this is looked at first, and the whole search is left out where it cannot help.

For up to 8 blocks the result is optimal by the forecast (tests compare it with all cuts there are), and more
memory never gives a slower plan. Beyond, four things make the search quick, and plans fit all the same: 24
window sizes are tried, and none more once one is within half a percent of what none can beat; where many
blocks fit into the window, not every place is one to cut at, but some eight for each shard; and kept bytes
are rounded up to whole quanta.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from plait.errors import UsageError
from plait.spill.cutting import Found, budget_of, fastest, unlimited
from plait.spill.description import Costs, Description, saved_bytes
from plait.spill.forecast import Machine, Model, arena_size, private_size
from plait.spill.intervals import Intervals
from plait.spill.plan import MODES, Shard, SpillPlan
from plait.units import format_bytes

Real = NDArray[np.float64]

_KEEP, _THRIFT, _SPILL, _RECOMPUTE = range(len(MODES))
_EXACT_BLOCKS = 8
_WINDOWS = 24
_NEAR = 1.005
_CUTS_PER_SHARD = 8


@dataclass(frozen=True, kw_only=True)
class Smallest:
    """The least memory in which a model can be trained, and what takes it."""

    arena_bytes: int
    """For one job at a time on each device, all devices together."""
    private_bytes: int
    """Of each device."""
    shared_by: str
    """The blocks that need most of the arena; :attr:`own_by` those that need most of a device."""
    shared_parts: dict[str, int]
    """What they put there, in bytes."""
    own_by: str
    own_parts: dict[str, int]

    @property
    def shared(self) -> str:
        """The arena, and what takes it."""
        return f"{format_bytes(self.arena_bytes)} shared ({self.shared_by}: {_listed(self.shared_parts)})"

    @property
    def own(self) -> str:
        """A device's own memory, and what takes it."""
        return f"{format_bytes(self.private_bytes)} on each device ({self.own_by}: {_listed(self.own_parts)})"

    def __str__(self) -> str:
        return f"{self.shared} and {self.own}"


def partition(
    description: Description,
    costs: Costs,
    *,
    arena_bytes: int,
    private_bytes: int,
    read_bytes_per_s: float,
    write_bytes_per_s: float,
    devices: int = 1,
    unit_ms: float = 2.0,
) -> SpillPlan:
    """The fastest plan for a job, or an error that names the least memory that works.

    ``arena_bytes`` is all of the store's memory, ``private_bytes`` what each device has of its own.
    """
    machine = Machine(
        arena_bytes=arena_bytes,
        private_bytes=private_bytes,
        read_bytes_per_s=read_bytes_per_s,
        write_bytes_per_s=write_bytes_per_s,
        devices=devices,
        unit_ms=unit_ms,
    )
    plan = best_cut(Intervals.of(description, costs), machine, steps=description.steps)

    def room(shard: Shard) -> int:
        if shard.activations != "spill":
            return 0
        return saved_bytes(description, costs, shard.first, shard.end, thrift=True)

    return replace(plan, shards=tuple(replace(shard, saved_bytes=room(shard)) for shard in plan.shards))


def best_cut(intervals: Intervals, machine: Machine, *, steps: int = 1) -> SpillPlan:
    """The fastest plan for a machine, or an error that names the least memory that works."""
    _check(intervals, machine)
    exact = intervals.blocks <= _EXACT_BLOCKS
    best: tuple[Found, Model] | None = None
    models = sorted(_models(intervals, machine), key=lambda entry: (entry[0], entry[1].window_bytes))
    for least_ms, model in models:
        if best is not None and least_ms * (1 if exact else _NEAR) >= best[0].ms:
            break
        limit_ms, places, budget = np.inf if best is None else best[0].ms, _places(model), budget_of(model)
        found = fastest(model, unlimited(model), places, limit_ms)
        if found is not None and len(budget.modes) > 1:
            found = fastest(model, budget, places, limit_ms)
        if found is not None:
            best = found, model
    if best is None:  # what fits barely fits in one way, which no grid may miss
        _, model = max(models, key=lambda entry: entry[1].window_bytes)
        found = fastest(model, budget_of(model), range(model.blocks + 1), np.inf)
        assert found is not None, "what fits is found"
        best = found, model
    (_, shards), model = best
    return SpillPlan(
        shards=shards,
        arena_bytes=machine.share_bytes,
        private_bytes=machine.private_bytes,
        window_bytes=int(model.window_bytes),
        forecast=model.forecast(shards, steps),
    )


def smallest(intervals: Intervals, *, devices: int = 1, private_bytes: int | None = None) -> Smallest:
    """The least memory that works; given a device's own memory, the least arena beside that."""
    size, _ = arena_size(intervals)
    _, own = private_size(intervals)
    # Spilling and computing again keep nothing on a device; computing again needs less of the arena.
    working = np.minimum(own[_SPILL], own[_RECOMPUTE])
    one = max(_most_even(working), key=lambda place: float(working[place]))
    private = max(math.ceil(working[one]), 0 if private_bytes is None else private_bytes)
    mode = np.where(own[_RECOMPUTE] <= private, _RECOMPUTE, _SPILL)
    fits = np.take_along_axis(own, mode[None], 0)[0] <= private
    needs = np.where(fits, np.take_along_axis(size, mode[None], 0)[0], np.inf)
    widest = max(_most_even(needs), key=lambda place: float(needs[place]))
    spilled = int(intervals.spilled[widest]) if mode[widest] == _SPILL else 0
    return Smallest(
        arena_bytes=devices * int(needs[widest]),
        private_bytes=private,
        shared_by=_span(widest),
        shared_parts={**intervals.shard_bytes(*widest), "spilled activations": spilled},
        own_by=_span(one),
        own_parts={
            "gradients": int(intervals.gradients[one]),
            "other values for a moment": int(working[one] - intervals.gradients[one]),
        },
    )


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)


def _most_even(needs: Real) -> list[tuple[int, int]]:
    """The cut whose neediest shard needs least, as (first, end) of its shards."""
    n = len(needs) - 1
    least, before = np.zeros(n + 1), np.zeros(n + 1, dtype=int)
    for end in range(1, n + 1):
        worst = np.maximum(least[:end], needs[:end, end])
        before[end] = int(np.argmin(worst))
        least[end] = worst[before[end]]
    places, end = [], n
    while end:
        places.append((int(before[end]), end))
        end = int(before[end])
    return places


def _span(place: tuple[int, int]) -> str:
    first, end = place
    return f"block {first}" if end == first + 1 else f"blocks {first} to {end - 1}"


def _check(intervals: Intervals, machine: Machine) -> None:
    """Refuse what no cut fits into."""
    least = smallest(intervals, devices=machine.devices)
    if machine.private_bytes >= least.private_bytes:
        least = smallest(intervals, devices=machine.devices, private_bytes=machine.private_bytes)
        if machine.arena_bytes >= least.arena_bytes:
            return
    raise UsageError(
        f"{format_bytes(machine.arena_bytes)} shared and {format_bytes(machine.private_bytes)} on each "
        f"device cannot hold what training takes at least: {least}",
        setting="memory",
        works=f"{format_bytes(least.arena_bytes)} shared, {format_bytes(least.private_bytes)} on each device",
    )


# --- windows ------------------------------------------------------------------------------------------


def _windows(intervals: Intervals, least_bytes: int, most_bytes: int) -> Real:
    """The window sizes to try: those at which something comes to fit."""
    size, roomy = arena_size(intervals)
    n = intervals.blocks
    first, end = np.triu_indices(n + 1, 1)
    alone = [size[:, first, end].ravel(), roomy[:, first, end].ravel()]
    if n <= _EXACT_BLOCKS:
        pairs = [
            (size[:, a, b][:, None] + size[:, b, c]).ravel()
            for a in range(n)
            for b in range(a + 1, n)
            for c in range(b + 1, n + 1)
        ]
    else:
        pairs = [2 * alone[0]]
    pool = np.unique(np.concatenate([[float(least_bytes)], *alone, *pairs]))
    pool = pool[(pool >= least_bytes) & (pool <= most_bytes)]
    if n <= _EXACT_BLOCKS or len(pool) <= _WINDOWS:
        return pool
    steps = np.geomspace(max(pool[0], 1.0), pool[-1], _WINDOWS)
    return np.unique(pool[np.minimum(np.searchsorted(pool, steps), len(pool) - 1)])


def _models(intervals: Intervals, machine: Machine) -> Iterator[tuple[float, Model]]:
    """Every way to divide the arena, with what no cut can beat there."""
    least = smallest(intervals, private_bytes=machine.private_bytes).arena_bytes
    if intervals.blocks <= _EXACT_BLOCKS:  # what keeps its activations may fit where the others do not
        size, own = arena_size(intervals)[0], private_size(intervals)[1]
        needs = np.where(own <= machine.private_bytes, size, np.inf).min(axis=0)
        least = min(least, int(max(needs[place] for place in _most_even(needs))))
    for window_bytes in _windows(intervals, least, machine.share_bytes):
        model = Model(intervals, machine, window_bytes=float(window_bytes))
        yield _least_ms(model), model


def _least_ms(model: Model) -> float:
    """No cut within the window takes less: all computing, or the transfers that any cut has.

    The first and the last shard are at hand at the turns, but neither is larger than the window; and what the
    rest of the arena holds need not move. All else does, at either turn.
    """
    of, n, machine = model.intervals, model.blocks, model.machine
    back_ms = float(of.backward_ms[0, n] + of.update_ms[0, n])
    compute_ms = float(of.forward_ms[0, n]) + of.loss_ms + back_ms + 2 * machine.unit_ms
    if model.roomy[_KEEP, 0, n] <= model.window_bytes:
        return compute_ms
    window, spare = model.window_bytes, machine.share_bytes - model.window_bytes
    weights, moments = float(of.weights[0, n]), float(of.moments[0, n])
    weights_read = max(0.0, weights - max(spare, window))
    moments_read = max(0.0, moments - max(0.0, spare - weights))
    read_ms = machine.read_ms(2 * weights_read + moments_read)
    if of.clips:
        return max(compute_ms, read_ms)
    written = moments_read + (float(of.changed[0, n]) if weights > spare else 0.0) - window
    down_ms = [machine.read_ms(weights_read + moments_read - window), machine.write_ms(written)]
    return max(compute_ms, read_ms, machine.read_ms(weights_read) + max(back_ms, *down_ms))


def _places(model: Model) -> range:
    """Where the chain may be cut: everywhere, unless the window holds many blocks."""
    n = model.blocks
    fits = model.size.min(axis=0) <= model.window_bytes
    longest = max(int(np.flatnonzero(fits[first, first + 1 :]).max(initial=0)) + 1 for first in range(n))
    return range(0, n + 1, 1 if n <= _EXACT_BLOCKS else max(1, longest // _CUTS_PER_SHARD))
