"""What a step of a cut model takes: peak memory, bytes moved, and time, by a model that fits on a page.

**Order.** Forward through the shards, a turn at the last, and back, each shard updated behind its backward:

    compute    | F0 | F1 | T2 U2 | B1 U1 | B0 U0 | F0 ...
    reader     | 1  | 2  |   1   |   0   |   -   | 1  ...     the shard that is read meanwhile
    writer     |    |    |   2   |   1   |     0 ...          the shard that is written meanwhile

**Time.** Each column takes as long as the busiest of its three rows, so a step takes at least all its
computing, and at least all its reading; where the next shard's bytes take longer than the present one's
computing, the device stalls. Writing is charged to the shard that caused it; what the last column leaves to
be written has the whole next forward pass for it. Where gradients are clipped by their global norm, all
updates follow as a pass of their own.

**Memory.** Of the arena, a *window* is set aside, in which any unit of any shard fits. A column's rows
overlap where the window also has room for the two neighbours of which one is at work while the other comes
or goes, each of them passed through or updated, not both at once; and, as an update's state comes during the
backward pass before it, for the shard's weights, boundary values, gradients and optimizer state together.
Where it has not, each waits for the other: the column takes the sum. The rest of the arena, C bytes, keeps
what is needed soonest, and so saves transfers. Access goes up and down the chain, so that is:

- at the turn from forward to backward the weights and values of the last shards, as far as C reaches; at the
  turn to the next step the weights of the first shards;
- once C holds all weights, these neither leave nor come; what then remains of C holds optimizer state of the
  last shards, which need not move either.

A device's own memory holds the activations that are kept from forward to backward, and for the shard at work
its gradients and what it needs for a moment.

Nothing here is measured: times of blocks, bandwidths and ``unit_ms`` are given. More arena never makes a step
slower, since C only grows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from plait.errors import UsageError
from plait.spill.intervals import Intervals
from plait.spill.plan import MODES, Forecast, Shard

Real = NDArray[np.float64]
Whole = NDArray[np.intp]
_KEEP = MODES.index("keep")
_Bytes = TypeVar("_Bytes", float, Real)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a job is given to run on."""

    arena_bytes: int
    """The store's memory, which all devices share evenly."""
    private_bytes: int
    """What each device has of its own, beyond what its process takes by itself."""
    read_bytes_per_s: float
    write_bytes_per_s: float
    """Of the disk, which all devices share evenly."""
    devices: int = 1
    """How many jobs run at a time."""
    unit_ms: float = 2.0
    """What handing a unit to a device costs beside its work, while all cores compute."""

    def __post_init__(self) -> None:
        for name, least in (("arena_bytes", 0), ("private_bytes", 0), ("devices", 1), ("unit_ms", 0)):
            if not least <= getattr(self, name) < math.inf:
                raise UsageError(f"{name} is {getattr(self, name)}", setting=name, works=f"{least} or more")
        for name in ("read_bytes_per_s", "write_bytes_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name} is {getattr(self, name)}", setting=name, works="1e9")

    @property
    def share_bytes(self) -> int:
        """What one job can count on of the arena."""
        return self.arena_bytes // self.devices

    def read_ms(self, count_bytes: _Bytes) -> _Bytes:
        """How long reading takes while the other devices read as much."""
        return count_bytes * (1e3 * self.devices / self.read_bytes_per_s)

    def write_ms(self, count_bytes: _Bytes) -> _Bytes:
        """How long writing takes while the other devices write as much."""
        return count_bytes * (1e3 * self.devices / self.write_bytes_per_s)


class Side(NamedTuple):
    """Shards that end where another begins: forward, its writing, what backward reads; and their size."""

    forward_ms: Real
    write_ms: Real
    read_ms: Real
    size: Real


class Model:
    """The page above in numbers: for every shard that there could be, by [first, end] or [mode, first, end].

    ``window_bytes`` of the machine's arena are set aside for the shards at work.
    """

    def __init__(self, intervals: Intervals, machine: Machine, *, window_bytes: float) -> None:
        self.intervals, self.machine, self.window_bytes = intervals, machine, window_bytes
        self.blocks = intervals.blocks
        self.size, self.roomy = arena_size(intervals)
        self.kept, self.own = private_size(intervals)
        self._count_bytes()
        self._count_time()

    def _count_bytes(self) -> None:
        """What crosses the disk, beyond what the rest of the arena holds."""
        of, n = self.intervals, self.blocks
        spare = self.machine.share_bytes - self.window_bytes
        spilled = by_mode(spill=of.spilled, recompute=of.before)
        later = by_mode(spill=of.spilled[:, [n]], recompute=of.before[:, [n]])
        self.weights_stay = of.weights[0, n] <= spare
        moments_stay = of.weights[0, n] + of.moments[:, [n]] <= spare
        at_start = np.arange(n + 1)[:, None] == 0
        at_end = np.arange(n + 1)[None, :] == n
        forward_stays = at_start | (of.weights[[0], :] <= spare)
        backward_stays = at_end | (of.weights[:, [n]] + of.inputs + later <= spare)
        moving = np.where(moments_stay, 0, of.moments)
        changing = of.changed * (not self.weights_stay)

        self.read_forward = np.where(forward_stays, 0, of.weights)
        self.write_forward = np.where(backward_stays, 0, of.inputs + spilled)
        self.read_backward = np.where(backward_stays, 0, of.weights + of.inputs + spilled)
        self.read_backward += of.awaited * (not self.weights_stay)
        self.write_backward = of.lent * (not self.weights_stay)
        if of.clips:
            stay = of.weights[0, n] + of.moments[0, n] + of.gradients[0, n] <= spare
            waiting = of.gradients * (not stay)
            self.write_backward = self.write_backward + waiting
            self.read_update = moving + changing + waiting
            self.write_update = moving + changing
        else:
            self.read_backward += moving
            self.write_backward = self.write_backward + moving + changing
            self.read_update = self.write_update = np.zeros((n + 1, n + 1))
        # The last shard turns at once: what its backward needs must be there with its forward.
        self.read_forward[:, n] += self.read_backward[0, :, n]
        self.read_backward[:, :, n] = 0

    def _count_time(self) -> None:
        """What is computed, and the columns that one shard has to itself."""
        of, n, machine = self.intervals, self.blocks, self.machine
        again = by_mode(thrift=of.thrift_ms, spill=of.thrift_ms, recompute=of.forward_ms)
        again[:, :, n] = 0
        self.forward_ms = of.forward_ms + machine.unit_ms
        self.backward_ms = of.backward_ms + again + machine.unit_ms
        self.backward_ms[:, :, n] += of.forward_ms[:, n] + of.loss_ms
        self.forward_ms[:, n] = 0
        self.update_ms = of.update_ms + machine.unit_ms
        if not of.clips:
            self.backward_ms = self.backward_ms + self.update_ms
            self.update_ms = np.zeros((n + 1, n + 1))
        self.shard_ms = self._column(
            self.update_ms,
            machine.read_ms(self.read_update),
            machine.write_ms(self.write_update),
            self.roomy[_KEEP] <= self.window_bytes,
        )
        """By [first, end], what a shard takes whatever stands beside it: its update, where that is apart."""
        written = np.maximum(machine.write_ms(self.write_backward[0]) - of.forward_ms[0, n], 0)
        read = np.zeros(n + 1)
        read[n] = machine.read_ms(self.read_forward[0, n])
        self.first_ms = self._column(
            self.backward_ms[:, 0], read, written, self.roomy[:, 0] <= self.window_bytes
        )
        """By [mode, end], the last column of a step: backward of shard 0."""

    def side(self, modes: Whole, firsts: Whole, end: int) -> Side:
        """What shards that end at a block mean to one that begins there."""
        return Side(
            forward_ms=self.forward_ms[firsts, end],
            write_ms=self.machine.write_ms(self.write_forward[modes, firsts, end]),
            read_ms=self.machine.read_ms(self.read_backward[modes, firsts, end]),
            size=self.size[modes, firsts, end],
        )

    def between_ms(self, before: Side, first: int, end: int, mode: int) -> Real:
        """Two columns where a shard follows others: their forward, and its own backward."""
        reading = self.machine.read_ms(self.read_forward[first, end])
        writing = self.machine.write_ms(self.write_backward[first, end])
        both = before.size + self.size[mode, first, end] <= self.window_bytes
        up_ms = self._column(before.forward_ms, reading, before.write_ms, both)
        both = both & (self.roomy[mode, first, end] <= self.window_bytes)
        return up_ms + self._column(self.backward_ms[mode, first, end], before.read_ms, writing, both)

    def whole_ms(self) -> float:
        """One shard with all it needs in memory: nothing moves."""
        place = (0, self.blocks)
        return float(self.backward_ms[0, *place] + self.update_ms[place])

    @staticmethod
    def _column(compute_ms: Real, read_ms: Real, write_ms: Real, overlaps: NDArray[np.bool_]) -> Real:
        """How long a column takes."""
        busiest = np.maximum(np.maximum(compute_ms, read_ms), write_ms)
        return np.where(overlaps, busiest, compute_ms + read_ms + write_ms)

    def forecast(self, shards: Sequence[Shard], steps: int) -> Forecast:
        """The forecast of a cut, column by column."""
        places = [(MODES.index(shard.activations), shard.first, shard.end) for shard in shards]
        mode, first, end = places[0]
        if len(places) == 1 and self.roomy[places[0]] <= self.window_bytes:
            return self._forecast(places, 0, 0, self.whole_ms(), steps)
        step_ms = self.first_ms[mode, end] + self.shard_ms[first, end]
        for (before, begin, _), (mode, first, end) in pairwise(places):
            side = self.side(np.array([before]), np.array([begin]), first)
            step_ms += self.between_ms(side, first, end, mode)[0] + self.shard_ms[first, end]
        reads = writes = 0.0
        for mode, first, end in places:
            reads += self.read_forward[first, end] + self.read_backward[mode, first, end]
            reads += self.read_update[first, end]
            writes += self.write_forward[mode, first, end] + self.write_backward[first, end]
            writes += self.write_update[first, end]
        return self._forecast(places, reads, writes, float(step_ms), steps)

    def _forecast(
        self,
        places: Sequence[tuple[int, int, int]],
        read_bytes: float,
        written_bytes: float,
        step_ms: float,
        steps: int,
    ) -> Forecast:
        of, kept, peak = self.intervals, 0.0, 0.0
        for place in places:
            peak = max(peak, kept + self.own[place])
            kept += self.kept[place]
        alone = [float(self.size[place]) for place in places]
        more = [*(float(self.roomy[place]) for place in places), *map(sum, pairwise(alone))]
        window = max([*alone, *(size for size in more if size <= self.window_bytes)])
        stored = 2 * (of.weights[0, of.blocks] + of.moments[0, of.blocks])
        spilled = sum(self.write_forward[place] for place in places)
        waiting = of.gradients[0, of.blocks] if of.clips else 0  # all updates follow all backward passes
        compute = [
            self.forward_ms[f, e] + self.backward_ms[m, f, e] + self.update_ms[f, e] for m, f, e in places
        ]
        return Forecast(
            arena_peak_bytes=int(window),
            private_peak_bytes=int(peak),
            kept_bytes=int(kept),
            disk_bytes=int(stored + spilled + waiting),
            read_bytes=int(read_bytes),
            written_bytes=int(written_bytes),
            compute_ms=float(sum(compute)),
            read_ms=float(self.machine.read_ms(read_bytes)),
            write_ms=float(self.machine.write_ms(written_bytes)),
            step_ms=step_ms,
            steps=steps,
        )


def by_mode(
    *, keep: Real | float = 0, thrift: Real | float = 0, spill: Real | float = 0, recompute: Real | float = 0
) -> Real:
    """Tables in the order of the modes."""
    return np.stack(np.broadcast_arrays(keep, thrift, spill, recompute))


def arena_size(intervals: Intervals) -> tuple[Real, Real]:
    """Bytes of the arena that a shard needs for a unit, and with its next unit's at hand, by mode."""
    of = intervals
    passing = of.weights + of.boundary + by_mode(spill=of.spilled, recompute=of.before)
    size = np.maximum(passing, of.changed + of.moments)
    roomy = passing + of.moments
    if of.clips:  # an update is no neighbour of the backward pass then
        size = roomy = size + of.gradients
    return np.maximum(size, of.created), np.maximum(roomy, of.created)


def private_size(intervals: Intervals) -> tuple[Real, Real]:
    """Bytes of a device's own memory, by mode: kept from forward to backward, and needed while at work."""
    of = intervals
    kept = by_mode(keep=of.saved, thrift=of.thrift)
    passing = by_mode(
        keep=of.transient,
        thrift=of.thrift_transient,
        spill=of.thrift_transient,
        recompute=of.transient + of.saved_once,
    )
    own = kept + passing + of.gradients
    own[:, :, of.blocks] = (np.maximum(of.transient, of.thrift_transient) + of.gradients + of.saved_once)[
        :, of.blocks
    ]
    return kept, own
