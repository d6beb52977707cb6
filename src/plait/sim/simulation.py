"""Time that goes from event to event, and what is kept of it.

An event is a moment and something to call. Events of one moment come in the order in which they were asked
for, so a simulation has one outcome. What is to be judged only when all of a moment is known, as who gets
which share of a link, asks for ``settle``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random

from plait.errors import UsageError
from plait.timeline import Span, Timeline

Action = Callable[[], None]
Wanted = Callable[[float], bool]


class Simulation:
    """A clock in milliseconds, the events that are to come, and the spans noted so far."""

    __slots__ = ("_coming", "_noted", "_order", "_settling", "_spans", "events", "now_ms", "seed")

    def __init__(self, *, seed: int = 0, spans: int = 65_536) -> None:
        if spans < 1:
            raise UsageError(f"a timeline of {spans} spans", setting="spans", works="65536")
        self.seed = seed
        self.now_ms = 0.0
        self.events = 0
        """How many have happened."""
        self._coming: list[tuple[float, int, Action, Wanted | None]] = []
        self._order = 0
        self._settling: list[Action] = []
        self._spans: deque[tuple[str, str, float, float]] = deque(maxlen=spans)
        self._noted = 0

    def at(self, time_ms: float, action: Action, *, wanted: Wanted | None = None) -> None:
        """Call ``action`` at that time; of one time, first come, first served.

        ``wanted`` is asked with the time when it comes, before the clock goes there: where it says no, it is
        as if there had been no such event.
        """
        if not self.now_ms <= time_ms < math.inf:
            raise UsageError(
                f"an event at {time_ms} ms, and it is {self.now_ms} ms",
                setting="time_ms",
                works=f"{self.now_ms} or later, and finite",
            )
        self._order = order = self._order + 1
        heappush(self._coming, (time_ms, order, action, wanted))

    def after(self, delay_ms: float, action: Action) -> None:
        """Call ``action`` so much later than now."""
        self.at(self.now_ms + delay_ms, action)

    def settle(self, action: Action) -> None:
        """Call ``action`` once, when everything that happens at this very moment has happened."""
        self._settling.append(action)

    def run(self, *, until_ms: float = math.inf, most_events: int | None = None) -> None:
        """Let time pass until nothing is to come, or until ``until_ms``, where the clock then stands.

        ``most_events`` is a guard: where more than so many happen in this call, it is an error.
        """
        if until_ms < self.now_ms or math.isnan(until_ms):
            raise UsageError(
                f"run until {until_ms} ms, and it is {self.now_ms} ms", setting="until_ms", works="later"
            )
        coming, settling, pop = self._coming, self._settling, heappop
        last = math.inf if most_events is None else self.events + most_events
        while True:
            if settling and (not coming or coming[0][0] > self.now_ms):
                actions = settling.copy()
                settling.clear()
                for action in actions:
                    action()
                continue
            if not coming:
                break
            event = pop(coming)
            if event[0] > until_ms:
                heappush(coming, event)
                break
            if event[3] is not None and not event[3](event[0]):
                continue
            if self.events >= last:
                raise UsageError(
                    f"{most_events} events until {self.now_ms} ms, and {len(coming) + 1} more are to come",
                    setting="most_events",
                    works="more events, or work that comes to an end",
                )
            self.now_ms = event[0]
            self.events += 1
            event[2]()
        if until_ms < math.inf:
            self.now_ms = until_ms

    @property
    def coming(self) -> int:
        """How many events wait for their time."""
        return len(self._coming)

    def note(self, track: str, name: str, start_ms: float, end_ms: float) -> None:
        """Put a span on the timeline; where it is full, the oldest falls out and counts as dropped."""
        self._noted += 1
        self._spans.append((track, name, start_ms, end_ms))

    @property
    def timeline(self) -> Timeline:
        """What was noted so far."""
        return Timeline.of([Span(*each) for each in self._spans], dropped=self._noted - len(self._spans))

    def jitter(self, name: str) -> Random:
        """Random numbers of one thing: they depend on the seed and the name, and on nobody else's."""
        return Random(f"{self.seed} {name}")


class Alarm:
    """Something to call at a time that may still change.

    Events cannot be taken back. An alarm that is put off lets the event that it has come early and asks for
    another one then; so the events that wait for it do not grow with the number of changes.
    """

    __slots__ = ("_action", "_after", "_next_ms", "_simulation", "due_ms")

    def __init__(self, simulation: Simulation, action: Action) -> None:
        self._simulation, self._action = simulation, action
        self._next_ms = math.inf
        """When the next event comes, and below when those after it do, the last one first."""
        self._after: list[float] | None = None
        self.due_ms = math.inf

    def set(self, time_ms: float) -> None:
        """Call the action at that time, and at no other that was set before; infinity is never."""
        self.due_ms = time_ms
        next_ms = self._next_ms
        if time_ms < next_ms:
            if next_ms < math.inf:
                self._after = self._after or []
                self._after.append(next_ms)
            self._next_ms = time_ms
            self._simulation.at(time_ms, self._action, wanted=self._is_due)

    def clear(self) -> None:
        """Do not call it."""
        self.due_ms = math.inf

    def _is_due(self, time_ms: float) -> bool:
        self._next_ms = self._after.pop() if self._after else math.inf
        if self.due_ms > time_ms:
            self.set(self.due_ms)
            return False
        self.due_ms = math.inf
        return True
