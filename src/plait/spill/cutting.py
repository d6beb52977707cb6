"""The fastest cut of a chain within one window, by dynamic programming over its cuts.

A state is (the last shard [a, b), its activations, bytes of activations kept so far). Another shard [b, c)
may follow where it fits into the window and a device's own memory holds what is kept; it adds two columns
of the drawing in :mod:`plait.spill.forecast`. Every state keeps its fastest way, so the best at the end is
the best of all: what follows depends on a state, not on how it was reached.

Kept bytes are counted in quanta, rounded up: 1/256 of what keeping everything takes, or their common measure
where that is no finer.

Complexity: cuts x (shards that fit)^2 x modes^2 x quanta, in numpy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.spill.forecast import Model
from plait.spill.plan import MODES, Shard

Real = NDArray[np.float64]
Whole = NDArray[np.intp]

_KEEP = MODES.index("keep")
_QUANTA = 256


class Found(NamedTuple):
    """A cut, and what a step of it takes."""

    ms: float
    shards: tuple[Shard, ...]


class _Row(NamedTuple):
    """The states of one last shard, by kept quanta."""

    mode: int
    first: int
    ms: Real
    """The fastest way there; infinite where there is none."""
    came: Whole
    """The row of the state before it."""


class _States(NamedTuple):
    """All rows whose shard ends at one block."""

    modes: Whole
    firsts: Whole
    ms: Real
    came: Whole

    @classmethod
    def of(cls, rows: list[_Row]) -> _States:
        return cls(
            np.array([row.mode for row in rows]),
            np.array([row.first for row in rows]),
            np.array([row.ms for row in rows]),
            np.array([row.came for row in rows]),
        )


class Budget(NamedTuple):
    """A device's own memory in quanta of kept bytes, rounded so that what fits in quanta fits in bytes."""

    modes: tuple[int, ...]
    kept: Whole
    """By mode, first and end: what a shard keeps."""
    room: Whole
    """What shards before it may keep while it is at work; negative where it does not fit even alone."""
    quanta: int
    """No way keeps more than this."""


def budget_of(model: Model) -> Budget:
    """What a device's own memory holds."""
    n, private = model.blocks, model.machine.private_bytes
    fits = model.size.min(axis=0) <= model.window_bytes
    most = float(model.kept[_KEEP].max())  # shards keep no less when they are joined
    if most + np.max((model.own - model.kept)[_KEEP], where=fits, initial=0) <= private:
        return unlimited(model)
    # With a common measure of few parts nothing is rounded.
    quantum = max(1, int(np.gcd.reduce(model.kept.astype(np.int64).ravel())))
    if most > _QUANTA * quantum:
        quantum = -(-int(most) // _QUANTA)
    kept = np.ceil(model.kept / quantum).astype(np.intp)
    room = np.floor((private - model.own) / quantum).astype(np.intp)
    return Budget(tuple(range(len(MODES))), kept, room, min(private // quantum + 1, _QUANTA + n))


def unlimited(model: Model) -> Budget:
    """Room for keeping everything."""
    nothing = np.zeros(model.kept.shape, dtype=np.intp)
    return Budget((_KEEP,), nothing, nothing, 0)


def fastest(model: Model, budget: Budget, cuts: range, limit_ms: float) -> Found | None:
    """The fastest cut within the window that takes less than ``limit_ms``, if there is one."""
    n = model.blocks
    places = [*cuts[1:], n] if cuts[-1] < n else [*cuts[1:]]
    best = _undivided(model, budget, limit_ms)
    rows: list[list[_Row]] = [[] for _ in range(n + 1)]
    for end in places:
        for mode in budget.modes if end < n else (_KEEP,):
            if model.size[mode, 0, end] <= model.window_bytes and budget.room[mode, 0, end] >= 0:
                ms = np.full(budget.quanta + 1, np.inf)
                ms[budget.kept[mode, 0, end]] = model.first_ms[mode, end] + model.shard_ms[0, end]
                rows[end].append(_Row(mode, 0, ms, np.zeros(budget.quanta + 1, dtype=np.intp)))
    states: dict[int, _States] = {}
    for i, place in enumerate(places):
        if rows[place]:
            states[place] = _States.of(rows[place])
            _extend(model, budget, states[place], places[i:], rows)
    if n not in states:
        return best
    final = states[n]
    row, quanta = (int(i) for i in np.unravel_index(np.argmin(final.ms), final.ms.shape))
    if final.ms[row, quanta] >= (limit_ms if best is None else best.ms):
        return best
    return Found(float(final.ms[row, quanta]), _trace(states, budget, n, row, quanta))


def _undivided(model: Model, budget: Budget, limit_ms: float) -> Found | None:
    """One shard with all it needs in memory: nothing moves."""
    place = (_KEEP, 0, model.blocks)
    if model.roomy[place] > model.window_bytes or budget.room[place] < 0:
        return None
    ms = model.whole_ms()
    return Found(ms, (Shard(first=0, end=model.blocks),)) if ms < limit_ms else None


def _extend(
    model: Model,
    budget: Budget,
    states: _States,
    places: list[int],
    rows: list[list[_Row]],
) -> None:
    """Follow the states that end at the first place with every shard from there to the others."""
    first, *ends = places
    side = model.side(states.modes, states.firsts, first)
    for end in ends:
        for mode in budget.modes if end < model.blocks else (_KEEP,):
            top = budget.room[mode, first, end]
            if top < 0 or model.size[mode, first, end] > model.window_bytes:
                continue
            added = model.between_ms(side, first, end, mode) + model.shard_ms[first, end]
            candidates = states.ms + added[:, None]
            came = candidates.argmin(axis=0)
            kept = budget.kept[mode, first, end]
            count = max(0, min(top, budget.quanta - kept) + 1)
            ms = np.full(budget.quanta + 1, np.inf)
            ms[kept : kept + count] = np.take_along_axis(candidates, came[None], 0)[0, :count]
            back = np.zeros(budget.quanta + 1, dtype=np.intp)
            back[kept : kept + count] = came[:count]
            if np.isfinite(ms).any():
                rows[end].append(_Row(mode, first, ms, back))


def _trace(states: dict[int, _States], budget: Budget, end: int, row: int, quanta: int) -> tuple[Shard, ...]:
    """The shards on the way to a state."""
    shards = []
    while end:
        here = states[end]
        mode, first = int(here.modes[row]), int(here.firsts[row])
        shards.append(Shard(first=first, end=end, activations=MODES[mode]))
        row, quanta, end = int(here.came[row, quanta]), quanta - int(budget.kept[mode, first, end]), first
    return tuple(reversed(shards))
