"""Something that is on its way through a network, at a rate that may change."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from plait.sim.simulation import Alarm, Simulation

if TYPE_CHECKING:
    from plait.sim.route import Route

_DUST = 1e-12
"""The share of a transfer that rounding may leave: it has left, and waits for no link that comes back."""


class Transfer:
    """Bytes that flow along a route; what became of them until ``since_ms`` is in ``left_bytes``."""

    __slots__ = (
        "_depart", "alarm", "begun_ms", "cap", "channel", "kind", "left_bytes", "moving", "name", "rate",
        "route", "seen", "simulation", "since_ms", "size_bytes", "then", "track",
    )  # fmt: skip

    def __init__(
        self,
        simulation: Simulation,
        name: str,
        route: Route,
        size_bytes: float,
        then: Callable[[], None],
        depart: Callable[[Transfer], None],
        *,
        cap: float = math.inf,
        channel: Hashable = None,
        track: str | None = None,
    ) -> None:
        self.simulation, self.name, self.route, self.then = simulation, name, route, then
        self.size_bytes = self.left_bytes = size_bytes
        self.cap, self.channel, self.track = cap, channel, track
        self.kind = 0
        """Equal for transfers that have the same route and cap, and so the same share."""
        self.seen = 0
        """When shares were settled last with this transfer among them."""
        self.rate = -1.0
        """Bytes a second; below 0 until it is known."""
        self.begun_ms = self.since_ms = 0.0
        self.moving = False
        """Whether it is on its way now: not where it waits for its turn, is paused, or has left."""
        self._depart = depart
        self.alarm = Alarm(simulation, self._end)

    def begin(self) -> None:
        """Be on the way from now on, at a rate that is not known yet."""
        self.begun_ms = self.since_ms = self.simulation.now_ms
        self.rate = -1.0
        self.moving = True

    def stop(self) -> bool:
        """Stand still, and be noted up to here; not where nothing is left that could."""
        self._get_on()
        if self._through:
            self.alarm.set(self.simulation.now_ms)
            return False
        self.alarm.clear()
        self.moving = False
        if self.simulation.now_ms > self.begun_ms:
            self._note()
        return True

    def change(self, rate: float) -> None:
        """Go on at another rate."""
        if rate == self.rate:
            return
        self._get_on()
        self.rate, now_ms = rate, self.simulation.now_ms
        if self._through:
            self.alarm.set(now_ms)
        elif rate > 0:
            self.alarm.set(now_ms + 1e3 * self.left_bytes / rate if rate < math.inf else now_ms)
        else:
            self.alarm.clear()

    def arrive(self) -> None:
        """Tell whoever waits for it."""
        self._note()
        self.then()

    def _get_on(self) -> None:
        now_ms = self.simulation.now_ms
        if now_ms > self.since_ms:
            self.left_bytes -= self.rate * (now_ms - self.since_ms) / 1e3
            self.since_ms = now_ms

    @property
    def _through(self) -> bool:
        return self.left_bytes <= _DUST * self.size_bytes < math.inf

    def _end(self) -> None:
        self.moving = False
        self._depart(self)

    def _note(self) -> None:
        if self.track is not None:
            self.simulation.note(self.track, self.name, self.begun_ms, self.simulation.now_ms)
