"""A device: it does one thing at a time, and what matters more goes first.

             arrives
                v
priority 1      |== A ==|
priority 0   |B=|       |= B ==|        B goes on from where it was
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from heapq import heappop, heappush

from plait.errors import UsageError
from plait.sim.simulation import Alarm, Simulation
from plait.sim.trace import Trace

MOST_SPEED = 1e6
"""And one over it the least: beyond, work takes no time, or others do theirs beside it without end."""
MOST_JITTER = 10.0
"""Ten times the mean: nearly all works are then much shorter than it, and a few very much longer."""


class Work:
    """Something that a device is to do."""

    __slots__ = ("_device", "_left_ms", "cancelled", "done", "name", "priority", "then", "work_ms")

    def __init__(
        self, device: Device, name: str, work_ms: float, then: Callable[[], None], priority: int
    ) -> None:
        self._device = device
        self.name, self.then, self.priority = name, then, priority
        self.work_ms = work_ms
        """At speed 1, jitter included."""
        self._left_ms = work_ms
        self.done = self.cancelled = False

    @property
    def left_ms(self) -> float:
        """What is left of it, at speed 1."""
        return self._device._left(self)

    def cancel(self) -> None:
        """Do no more of it, and do not call what was to follow; nothing happens where it is done."""
        self._device._cancel(self)


class Device:
    """Runs work by priority, and work of one priority in the order in which it came."""

    __slots__ = (
        "_alarm", "_begun_ms", "_busy", "_choosing", "_mu", "_order", "_queue", "_random", "_running",
        "_sigma", "_since_ms", "_switching_ms", "name", "simulation", "speed", "switch_ms",
    )  # fmt: skip

    def __init__(
        self,
        simulation: Simulation,
        name: str,
        *,
        speed: Trace | float = 1.0,
        jitter: float = 0.0,
        switch_ms: float = 0.0,
    ) -> None:
        """``speed`` 0.5 is a straggler, a trace one that comes and goes.

        ``jitter`` is the relative standard deviation of a lognormal factor with mean 1 on every work, and
        ``switch_ms`` what passes before a work begins that takes the device from another.
        """
        if not isinstance(speed, Trace) and not 1 / MOST_SPEED <= speed <= MOST_SPEED:
            works = f"1.0, or from {1 / MOST_SPEED:g} to {MOST_SPEED:g}"
            raise UsageError(f"device {name!r} has speed {speed}", setting="speed", works=works)
        if not 0 <= jitter <= MOST_JITTER:
            works = f"0.05, {MOST_JITTER:g} at most"
            raise UsageError(f"device {name!r} has jitter {jitter}", setting="jitter", works=works)
        if not 0 <= switch_ms < math.inf:
            raise UsageError(f"device {name!r} switches in {switch_ms} ms", setting="switch_ms", works="0")
        self.simulation, self.name, self.speed, self.switch_ms = simulation, name, speed, switch_ms
        self._random = simulation.jitter(f"device {name}") if jitter else None
        # exp of a normal (mu, sigma) has mean exp(mu + sigma^2 / 2) and variance mean^2 (exp(sigma^2) - 1).
        self._sigma = math.sqrt(math.log1p(jitter**2))
        self._mu = -(self._sigma**2) / 2
        self._alarm = Alarm(simulation, self._finish)
        self._queue: list[tuple[int, int, Work]] = []
        self._order = 0
        self._running: tuple[int, int, Work] | None = None
        self._begun_ms = self._since_ms = 0.0
        """When the running work was given the device, and when it began to get on."""
        self._choosing = False
        """Whether work has just ended, and those who waited for it have not all asked for what follows."""
        self._busy: defaultdict[int, float] = defaultdict(float)
        self._switching_ms = 0.0

    def run(self, name: str, work_ms: float, then: Callable[[], None], *, priority: int = 0) -> Work:
        """Do ``work_ms`` of work (at speed 1), then call ``then``.

        Larger priorities go first. Whoever is running with a smaller one is suspended at once, and goes on
        later from where it was.
        """
        if not 0 <= work_ms < math.inf:
            raise UsageError(f"work {name!r} of {work_ms} ms", setting="work_ms", works="0 or more")
        if self._random is not None:
            work_ms *= math.exp(self._random.gauss(self._mu, self._sigma))
        work = Work(self, name, work_ms, then, priority)
        self._order += 1
        entry, running = (-priority, self._order, work), self._running
        if running is None and not self._choosing:
            self._start(entry)
        elif running is not None and entry < running and self._alarm.due_ms > self.simulation.now_ms:
            # Where the other has not begun, what is left of its own switch remains to be done.
            before_ms = self._since_ms - self.simulation.now_ms
            self._suspend(running[2])
            heappush(self._queue, running)
            self._start(entry, self.switch_ms if before_ms < 0 else before_ms)
        else:
            heappush(self._queue, entry)
        return work

    def busy_ms(self, priority: int | None = None) -> float:
        """How long it has worked, for works of one priority or for all; switching is not work."""
        if self._running is None:
            now = {}
        else:
            now = {self._running[2].priority: max(0.0, self.simulation.now_ms - self._since_ms)}
        if priority is not None:
            return self._busy.get(priority, 0.0) + now.get(priority, 0.0)
        return math.fsum([*self._busy.values(), *now.values()])

    @property
    def switching_ms(self) -> float:
        """How long it has been switching from a work to one that matters more."""
        now_ms = self.simulation.now_ms
        now = 0.0 if self._running is None else min(now_ms, self._since_ms) - self._begun_ms
        return self._switching_ms + now

    @property
    def idle_ms(self) -> float:
        """How long it has had nothing to do, since time 0."""
        return max(0.0, self.simulation.now_ms - self.busy_ms() - self.switching_ms)

    def _start(self, entry: tuple[int, int, Work], delay_ms: float = 0.0) -> None:
        self._running = entry
        self._begun_ms = begun_ms = self.simulation.now_ms
        self._since_ms = since_ms = begun_ms + delay_ms
        left_ms, speed = entry[2]._left_ms, self.speed
        end_ms = speed.reaches(since_ms, left_ms) if isinstance(speed, Trace) else since_ms + left_ms / speed
        self._alarm.set(end_ms)

    def _progress(self) -> float:
        """What the running work has got on since it has the device, at speed 1."""
        now_ms, speed = self.simulation.now_ms, self.speed
        if now_ms <= self._since_ms:
            return 0.0
        if isinstance(speed, Trace):
            return speed.area(self._since_ms, now_ms)
        return (now_ms - self._since_ms) * speed

    def _suspend(self, work: Work) -> None:
        """Take the device from the running work, which may go on later."""
        work._left_ms = max(0.0, work._left_ms - self._progress())
        self._account(work)

    def _account(self, work: Work) -> None:
        """Write down what the running work had of the device, which is free now."""
        now_ms, since_ms = self.simulation.now_ms, self._since_ms
        self._running = None
        if since_ms > self._begun_ms:
            self._switching_ms += min(now_ms, since_ms) - self._begun_ms
        if now_ms > since_ms:
            self._busy[work.priority] += now_ms - since_ms
            self.simulation.note(self.name, work.name, since_ms, now_ms)

    def _finish(self) -> None:
        assert self._running is not None, "only what runs ends"
        work = self._running[2]
        self._account(work)
        work._left_ms = 0.0
        work.done = True
        # Whoever waited for this may have something that matters more than what is in the queue.
        self._choosing = True
        work.then()
        self._choosing = False
        if self._queue:
            self._next()

    def _next(self) -> None:
        while self._queue:
            entry = heappop(self._queue)
            if not entry[2].cancelled:
                self._start(entry)
                return

    def _left(self, work: Work) -> float:
        if self._running is not None and self._running[2] is work:
            return max(0.0, work._left_ms - self._progress())
        return work._left_ms

    def _cancel(self, work: Work) -> None:
        if work.done or work.cancelled:
            return
        work.cancelled = True
        if self._running is not None and self._running[2] is work:
            self._suspend(work)
            self._alarm.clear()
            self._next()
