"""How much of the gradients' reduction backward hides, where reducing may take the device's own core too.

Backward runs piece by piece. What a piece makes ready is reduced after what was ready before it, one
reduction at a time, while backward goes on. On a CPU the same core packs, adds and feeds the network: it does
that first, when a reduction begins, and then goes on with backward. Moving rows between devices takes the
device and the wire; reductions rest meanwhile.

    device   | B3    | pack 3 | B2    | pack 2 | B2 | move | B1  | pack 1 | wait |
    wire             | 3              | 2           |      | 2   | 1             |

With nothing to pack this is the model of :mod:`plait.burst.costs`:  wait = max over j of (sum of sync of the
pieces from j on) - (sum of backward after j). :func:`plait.sim.data.play_data` comes to the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class Piece(NamedTuple):
    """A part of backward, and what follows from it."""

    compute_ms: float
    sync_ms: float = 0.0
    """The reduction of what it makes ready, with the wire for itself."""
    busy_ms: float = 0.0
    """Of this, what the device's core does."""
    move_ms: float = 0.0
    """What is moved before the next piece."""


class Overlap(NamedTuple):
    """What came of it."""

    end_ms: float
    """When everything is computed, moved and reduced."""
    wait_ms: float
    """Since the last piece: the device has nothing to compute."""
    slowed_ms: float
    """By how much packing delayed computing."""


def overlap(pieces: Iterable[Piece]) -> Overlap:
    """Run pieces one after another, with their reductions beside them."""
    queue: deque[tuple[float, float]] = (
        deque()
    )  # of each reduction: the core's part that is left, and the rest
    now_ms = slowed_ms = 0.0
    for piece in pieces:
        left_ms = piece.compute_ms
        while left_ms > 0 and queue:
            busy_ms, rest_ms = queue.popleft()
            done_ms = min(rest_ms, left_ms)
            now_ms, slowed_ms, left_ms = now_ms + busy_ms + done_ms, slowed_ms + busy_ms, left_ms - done_ms
            if rest_ms > done_ms:
                queue.appendleft((0.0, rest_ms - done_ms))
        now_ms += left_ms
        if piece.sync_ms > 0:
            busy_ms = min(piece.busy_ms, piece.sync_ms)
            queue.append((busy_ms, piece.sync_ms - busy_ms))
        now_ms += piece.move_ms
    wait_ms = sum(busy_ms + rest_ms for busy_ms, rest_ms in queue)
    return Overlap(now_ms + wait_ms, wait_ms, slowed_ms)
