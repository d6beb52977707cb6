"""Gradients of blocks on their way, one reduction after another, which stand still while rows move.

A reduction may take the devices that compute too (``busy_ms``, as of a codec): it has them first, from its
beginning on, and is through when both the wire and all its devices are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from plait.sim.device import Device, Work
from plait.sim.network import Network
from plait.sim.transfer import Transfer

_CODEC = 1
"""The priority of packing: what the device computes has 0."""


class Sync(NamedTuple):
    """The reduction of a block's gradients: what ``Network.collective`` takes, and the devices' part."""

    name: str
    devices: Sequence[str]
    edge_bytes: float
    alone_ms: float
    busy_ms: float = 0.0
    """Of a device's own time, at speed 1."""


class Wire:
    """Syncs in the order in which they were added, one at a time."""

    def __init__(self, network: Network, devices: Mapping[str, Device]) -> None:
        self._network, self._devices = network, devices
        self._queue: deque[Sync] = deque()
        self._sync: Sync | None = None
        """Under way, and below what is left of it: on the wire, and by device."""
        self._now: Transfer | None = None
        self._codecs: dict[str, Work] = {}
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
        for work in self._codecs.values():
            work.cancel()

    def release(self) -> None:
        """Go on."""
        self._held = False
        if self._now is not None:
            self._network.resume(self._now)
        for name, work in self._codecs.items():
            self._pack(name, work.left_ms)
        self._next()

    def when_free(self, then: Callable[[], None]) -> None:
        """Call once nothing is left to be synchronised."""
        self._free = then
        self._next()

    def _next(self) -> None:
        if self._held or self._sync is not None:
            return
        if self._queue:
            self._sync = sync = self._queue.popleft()
            if sync.busy_ms:
                for name in sync.devices:
                    self._pack(name, sync.busy_ms)
            self._now = self._network.collective(
                sync.name, sync.devices, sync.edge_bytes, sync.alone_ms, self._sent, track="wire"
            )
        elif self._free is not None:
            then, self._free = self._free, None
            then()

    def _pack(self, name: str, work_ms: float) -> None:
        assert self._sync is not None, "only what is under way is packed"
        self._codecs[name] = self._devices[name].run(
            f"codec {self._sync.name}", work_ms, partial(self._packed, name), priority=_CODEC
        )

    def _packed(self, name: str) -> None:
        del self._codecs[name]
        self._end()

    def _sent(self) -> None:
        self._now = None
        self._end()

    def _end(self) -> None:
        """A part of the sync is through."""
        if self._now is None and not self._codecs:
            self._sync = None
            self._next()
