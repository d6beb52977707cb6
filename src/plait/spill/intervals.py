"""What every run of consecutive blocks would cost as a shard: the figures of blocks, added up; no torch here.

A shard's figures are not the sums of its blocks': a value between two blocks of it is no boundary value but
something that is saved, a weight that two of them use is there once, and segments are whole pages. The last
shard goes forward and back in one turn, micro-batch by micro-batch, so nothing of it is kept in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.errors import UsageError
from plait.spill.description import BlockCost, Costs, Description
from plait.spill.segment import ALIGNMENT_BYTES, PAGE_BYTES, padded

Real = NDArray[np.float64]

_SAVED_SLACK_BYTES = 1024 * ALIGNMENT_BYTES
"""In a segment of saved tensors, for what lies between them."""


class Intervals(NamedTuple):
    """Tables by [first, end], in bytes or milliseconds; of a whole step where they follow micro-batches."""

    blocks: int
    clips: bool
    """Gradients wait until all are there before any weight is updated."""
    weights: Real
    """All that forward needs: weights, frozen weights, buffers, tied weights of other shards."""
    changed: Real
    """Of these, what a step changes."""
    moments: Real
    """State of the optimizer."""
    created: Real
    """What is needed at once to create it, if that is more."""
    inputs: Real
    """Values that come in from shards before."""
    boundary: Real
    """Values in and out, and the gradients for them and for tied weights."""
    lent: Real
    """Gradients of tied weights that go to the shard whose weights they are."""
    awaited: Real
    """Gradients of tied weights that come in from other shards."""
    before: Real
    """Buffers as they were before a forward that may run again."""
    saved: Real
    """What is kept for backward."""
    thrift: Real
    """The same, but for what is cheap to compute again."""
    spilled: Real
    """This as segments of the store."""
    saved_once: Real
    """What is kept for backward, of one micro-batch."""
    gradients: Real
    """Of parameters."""
    transient: Real
    """What a pass needs for a moment."""
    thrift_transient: Real
    """The same, where what is cheap is computed again."""
    forward_ms: Real
    backward_ms: Real
    thrift_ms: Real
    """What thrift adds to backward."""
    update_ms: Real
    loss_ms: float

    @classmethod
    def of(cls, description: Description, costs: Costs) -> Intervals:
        """Of a job, from what was measured of its blocks."""
        n = len(description.blocks)
        if not n or len(costs.blocks) != n:
            raise UsageError(
                f"job {description.job!r} has {n} blocks, and costs are given of {len(costs.blocks)}",
                setting="costs",
                works="those that were measured of this job",
            )
        return _Tables(description, costs).intervals()

    def shard_bytes(self, first: int, end: int) -> dict[str, int]:
        """What a shard takes, by what it is."""
        place = (first, end)
        return {
            "weights": int(self.weights[place]),
            "optimizer state": int(self.moments[place]),
            "inputs, outputs and their gradients": int(self.boundary[place]),
        }


class _Tables:
    """Adds up the figures of blocks."""

    def __init__(self, description: Description, costs: Costs) -> None:
        self.description, self.costs = description, costs
        self.n = n = len(description.blocks)
        self.first, self.end = np.meshgrid(np.arange(n + 1), np.arange(n + 1), indexing="ij")
        self.count = len(description.micro_batches)
        self.share = sum(description.micro_batches) / costs.rows
        """How many times the rows that were measured a step has."""
        users = [block for p in description.parameters if p.trained for block in p.blocks]
        self.trained = min(users, default=n)
        """The first block that is trained: nothing goes back beyond it."""

    def intervals(self) -> Intervals:
        weights, frozen, moments, borrowed, lent, awaited, gradients = self._parameters()
        buffers, foreign, before = self._buffers()
        inputs, outputs, back, inner = self._values()
        last = self.end == self.n
        returns = self.end > self.trained
        blocks, back_blocks = self.costs.blocks, [*self.costs.blocks]
        nothing = BlockCost(
            forward_ms=0,
            backward_ms=0,
            thrift_ms=0,
            update_ms=0,
            saved_bytes=0,
            thrift_bytes=0,
            transient_bytes=0,
            thrift_transient_bytes=0,
        )
        back_blocks[: self.trained] = [nothing] * self.trained
        saved = self._sum(b.saved_bytes for b in back_blocks) + inner
        thrift = self._sum(b.thrift_bytes for b in back_blocks) + inner
        kept = returns & ~last
        # The outputs, their gradients and what the loss saves are there for one micro-batch at a time.
        turning = np.where(last, float(self.costs.output_bytes), 0.0)
        # Values are made in a device's own memory, one micro-batch at a time, before they go to segments.
        beside = turning + np.maximum(outputs, back) / self.count
        return Intervals(
            blocks=self.n,
            clips=self.description.clips,
            weights=weights + frozen + buffers + foreign + borrowed,
            changed=weights + buffers,
            moments=moments,
            created=weights + frozen + buffers + moments
            if self.description.eager
            else np.zeros_like(weights),
            inputs=inputs,
            boundary=inputs + outputs + back + lent + awaited,
            lent=lent,
            awaited=awaited,
            before=self.count * before * kept,
            saved=self.count * saved * kept,
            thrift=self.count * thrift * kept,
            spilled=self.count * _pages(thrift + _SAVED_SLACK_BYTES) * kept,
            saved_once=saved,
            gradients=gradients,
            transient=self._largest(b.transient_bytes for b in blocks) + beside,
            thrift_transient=self._largest(b.thrift_transient_bytes for b in blocks) + beside,
            forward_ms=self.share * self._sum(b.forward_ms for b in blocks),
            backward_ms=self.share * self._sum(b.backward_ms for b in back_blocks),
            thrift_ms=self.share * self._sum(b.thrift_ms for b in back_blocks),
            update_ms=self._sum(b.update_ms for b in back_blocks),
            loss_ms=self.share * self.costs.loss_ms,
        )

    def _parameters(self) -> tuple[Real, ...]:
        own, frozen, moments = ([0] * self.n for _ in range(3))
        borrowed, lent, awaited, gradients, extra = (np.zeros((self.n + 1, self.n + 1)) for _ in range(5))
        for parameter in self.description.parameters:
            if not parameter.blocks:
                continue
            size = padded(parameter.nbytes, ALIGNMENT_BYTES)
            home = min(parameter.blocks)
            (own if parameter.trained else frozen)[home] += size
            if parameter.trained:
                moments[home] += parameter.state_bytes + ALIGNMENT_BYTES * len(parameter.state)
            if len(set(parameter.blocks)) == 1:
                continue
            uses, at_home, elsewhere = self._users(parameter.blocks)
            away = uses & ~at_home
            borrowed += padded(size) * away
            extra += 2 * PAGE_BYTES * (at_home & elsewhere)  # a tied weight is a segment to itself
            if parameter.trained:
                gradients += size * away
                lent += self.count * padded(size) * away
                awaited += self.count * padded(size) * (at_home & elsewhere)
        weights = _pages(self._sum(own))
        return (
            weights + extra,
            _pages(self._sum(frozen)),
            _pages(self._sum(moments)),
            borrowed,
            lent,
            awaited,
            weights + gradients,
        )

    def _buffers(self) -> tuple[Real, Real, Real]:
        sizes = [0] * self.n
        changing = [0] * self.n
        foreign = np.zeros((self.n + 1, self.n + 1))
        for buffer in self.description.buffers:
            if not buffer.blocks:
                continue
            sizes[min(buffer.blocks)] += padded(buffer.nbytes, ALIGNMENT_BYTES)
            for block in buffer.changes:
                changing[block] += padded(buffer.nbytes, ALIGNMENT_BYTES)
        total = _pages(self._sum(sizes))
        for buffer in self.description.buffers:
            if len(set(buffer.blocks)) > 1:
                # Whoever needs one of another shard brings in all that this has: it may be any.
                uses, at_home, _ = self._users(buffer.blocks)
                foreign = np.maximum(foreign, total[0, self.n] * (uses & ~at_home))
        return total, foreign, _pages(self._sum(changing))

    def _values(self) -> tuple[Real, Real, Real, Real]:
        description = self.description
        inputs, outputs, back, inner = (np.zeros((self.n + 1, self.n + 1)) for _ in range(4))
        made = {value.name: value for value in description.values}
        for producer, block in enumerate(description.blocks):
            for name in block.writes:
                value = made[name]
                readers = [i for i, other in enumerate(description.blocks) if name in other.reads]
                readers += [self.n - 1] * (name in description.outputs)
                inside = (self.first <= producer) & (producer < self.end)
                used = [(self.first <= reader) & (reader < self.end) for reader in readers]
                read = (producer < self.first) & np.any([inside & False, *used], axis=0)
                sent = inside & (max(readers, default=-1) >= self.end)
                size = sum(padded(value.nbytes(rows)) for rows in description.micro_batches)
                inputs += size * read
                outputs += size * sent
                back += size * (read | sent) * value.differentiable
                within = inside & ~sent & (name not in description.outputs)
                inner += value.nbytes(self.costs.rows) * within * (producer >= self.trained)
        return inputs, outputs, back, inner

    def _users(self, blocks: Iterable[int]) -> tuple[NDArray[np.bool_], ...]:
        """Which shards use what these blocks do, are its home, and share it with others."""
        places = sorted(set(blocks))
        inside = [(self.first <= block) & (block < self.end) for block in places]
        return np.any(inside, axis=0), inside[0], ~np.all(inside, axis=0)

    def _sum(self, figures: Iterable[float]) -> Real:
        sums = np.concatenate([[0.0], np.cumsum(list(figures))])
        table: Real = np.maximum(sums[None, :] - sums[:, None], 0)
        return table

    def _largest(self, figures: Iterable[float]) -> Real:
        by_block = np.array(list(figures), dtype=float)
        table = np.zeros((self.n + 1, self.n + 1))
        for first in range(self.n):
            table[first, first + 1 :] = np.maximum.accumulate(by_block[first:])
        return table


def _pages(sizes: Real) -> Real:
    return PAGE_BYTES * np.ceil(sizes / PAGE_BYTES)
