"""Error feedback: what rounding lost of a number is added to it the next time.

A worker quantizes each number of a buffer at one of two points: as its own contribution, on the way to the
worker that adds it up, or, where it is that worker itself, as a part of the sum on the way back. So one
fp32 number an element remembers both. Which of the two it is changes when shares do; then what was lost is
carried over, since a contribution counts 1/W of the average over W workers.

What is remembered must not grow by itself. Quantizing to few bits can lose more than there was (a bucket
with one large number and many small ones at 2 bits), and adding that back would lose still more the next
time. So of each bucket at most the share ``KEPT`` of its norm is remembered, which bounds the memory by
``KEPT / (1 - KEPT)`` = 2.4 times the gradients' norm. What is dropped has mean zero where rounding is random.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.compress.codec import Codec, Quantizer

KEPT = 0.5**0.5
"""Of a bucket's norm, what may be remembered of it."""

Stretch = tuple[int, int]
"""From an element up to, without, another."""


@dataclass(kw_only=True)
class Feedback:
    """What quantization lost of a buffer: flat, fp32, one number an element."""

    kept: Tensor
    owned: tuple[Stretch, ...] = ()
    """Where it is of the sums that this worker adds up; elsewhere it is of its own contributions."""

    def settle(self, owned: Sequence[Stretch], divisor: int) -> None:
        """Take notice of which stretches of the buffer this worker adds up now; sums are then divided."""
        now = merged(owned)
        if now != self.owned:
            self._scale(self.owned, divisor)
            self._scale(now, 1 / divisor)
            self.owned = now

    def _scale(self, stretches: Iterable[Stretch], factor: float) -> None:
        if factor != 1:
            for start, stop in stretches:
                self.kept[start:stop] *= factor

    def add_to(self, numbers: Tensor, start: int) -> None:
        """Add what was lost of these numbers of the buffer."""
        numbers += self.kept[start : start + len(numbers)]

    def forget(self, start: int, count: int) -> None:
        """Nothing is lost of numbers that travel as they are."""
        self.kept[start : start + count] = 0

    def compress(
        self, codec: Codec, numbers: Tensor, payload: Tensor, *, key: int, first: int, start: int
    ) -> None:
        """Compress these numbers of the buffer, and remember what is lost."""
        lost = self.kept[start : start + len(numbers)]
        codec.compress(numbers, payload, key=key, first=first, residual=lost)
        # With more bits than that, no bucket can lose more than about this share of its norm.
        if isinstance(codec, Quantizer) and codec.bucket > (2**codec.bits - 1) ** 2:
            whole = len(lost) // codec.bucket * codec.bucket
            _bound(lost[:whole].view(-1, codec.bucket), numbers[:whole].view(-1, codec.bucket))
            _bound(lost[whole:].view(1, -1), numbers[whole:].view(1, -1))


def _bound(lost: Tensor, numbers: Tensor) -> None:
    """Let no row have lost more than a share of its norm."""
    before = torch.linalg.vector_norm(numbers, dim=1, keepdim=True)
    after = torch.linalg.vector_norm(lost, dim=1, keepdim=True)
    # Of a row that is not finite nothing is lost, and nothing is what is kept.
    lost.mul_((KEPT * before / after).nan_to_num_(1.0).clamp_(max=1.0))


def merged(stretches: Iterable[Stretch]) -> tuple[Stretch, ...]:
    """Stretches in order, those that meet as one."""
    found: list[Stretch] = []
    for start, stop in sorted(stretches):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        elif start < stop:
            found.append((start, stop))
    return tuple(found)
