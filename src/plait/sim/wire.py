"""Gradients of blocks on their way, one reduction after another, which stand still while rows move."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from plait.sim.network import Network
from plait.sim.transfer import Transfer


class Sync(NamedTuple):
    """The reduction of a block's gradients, as ``Network.collective`` takes it."""

    name: str
    devices: Sequence[str]
    edge_bytes: float
    alone_ms: float


class Wire:
    """Syncs in the order in which they were added, one at a time."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._queue: deque[Sync] = deque()
        self._now: Transfer | None = None
        self._held = False
        self._free: Callable[[], None] | None = None

    def add(self, sync: Sync) -> None:
        """Do this after all that were added before."""
        self._queue.append(sync)
        self._next()

    def hold(self) -> None:
        """Stand still until ``release``."""
        self._held = True
        if self._now is not None:
            self._network.pause(self._now)

    def release(self) -> None:
        """Go on."""
        self._held = False
        if self._now is not None:
            self._network.resume(self._now)
        self._next()

    def when_free(self, then: Callable[[], None]) -> None:
        """Call once nothing is left to be synchronised."""
        self._free = then
        self._next()

    def _next(self) -> None:
        if self._held or self._now is not None:
            return
        if self._queue:
            self._now = self._network.collective(*self._queue.popleft(), self._end, track="wire")
        elif self._free is not None:
            then, self._free = self._free, None
            then()

    def _end(self) -> None:
        self._now = None
        self._next()
