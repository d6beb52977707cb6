"""Background jobs beside whatever is played: they get what the foreground's devices leave idle.

A background job is a row of units (its steps, say) that devices take one after another, at a lower priority
than anything of the foreground: a unit that is interrupted goes on later from where it was. What priorities
do not protect is said by two figures: the device's ``switch_ms``, which the foreground loses each time that
it interrupts, and a job's ``drag``, by which the foreground's computing becomes longer while the job may run
beside it (caches, memory bandwidth).

Which phases of the foreground it may run in is a level of :mod:`plait.burst.controller`, as in a run: a
share of the time is given in the same slices of the clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from plait.burst.controller import LADDER, Level
from plait.burst.phases import Phase
from plait.errors import UsageError
from plait.sim.device import Device, Work
from plait.sim.simulation import Simulation

PRIORITY = -1
"""Of background work on a device; a foreground's is 0 or more."""
SLICE_MS = 100.0
"""A level that allows a share of the time does so in slices of this length."""
LEAST_UNIT_MS = 1e-3
"""Of shorter units so many fit beside a step that playing them does not come to an end."""


@dataclass(frozen=True, kw_only=True)
class Background:
    """Work that may wait: units that devices of the foreground take when they have nothing else to do."""

    name: str
    unit_ms: float
    """Device time of one unit, alone on a device of speed 1."""
    units: int | None = None
    """How many there are in all; None: as many as fit beside the foreground."""
    devices: tuple[int, ...] | None = None
    """The foreground's devices that it may use, by number; None: all. One device takes its units in order."""
    drag: float = 0.0
    """The foreground computes 1 + drag times as long on a device while this may run beside it there."""

    def __post_init__(self) -> None:
        if not self.name:
            raise UsageError("background work has no name", setting="background.name", works="sweep")
        if not LEAST_UNIT_MS <= self.unit_ms < math.inf:
            works = f"{LEAST_UNIT_MS:g} or more"
            raise UsageError(
                f"a unit of {self.name!r} takes {self.unit_ms} ms", setting="unit_ms", works=works
            )
        if self.units is not None and self.units < 1:
            raise UsageError(f"{self.name!r} has {self.units} units", setting="units", works="1 or more")
        if not 0 <= self.drag < math.inf:
            raise UsageError(f"{self.name!r} drags by {self.drag}", setting="drag", works="0 or more")


class Crew:
    """The background jobs on the devices of one foreground.

    A player calls ``begin`` at its start and ``stop`` when the foreground ends, and reads ``work_ms``. Where
    a level forbids work in some phases it also says each device's ``phase``, and it asks for ``stretch`` when
    it starts to compute.
    """

    def __init__(
        self, simulation: Simulation, devices: Sequence[Device], backgrounds: Sequence[Background] = ()
    ) -> None:
        _check(backgrounds, len(devices))
        self._simulation = simulation
        self._level = LADDER[-1]
        self._phases = [Phase.IDLE] * len(devices)
        self._rows = [_Row(background) for background in backgrounds]
        self._hands: list[list[_Hand]] = [[] for _ in devices]
        """By device."""
        for row in self._rows:
            its = range(len(devices)) if row.job.devices is None else row.job.devices
            for place in its:
                self._hands[place].append(_Hand(row, devices[place]))
        self._stopped = False
        self._changes = 0

    def begin(self) -> None:
        """Let background work run from now on, as the level says."""
        for place in range(len(self._hands)):
            self._apply(place)

    def stop(self) -> None:
        """End it; what was done of a unit under way counts."""
        self._stopped = True
        for hands in self._hands:
            for hand in hands:
                hand.pause()

    def allow(self, level: Level) -> None:
        """From now on, run when this level says."""
        self._level = level
        self._changes += 1
        if 0 < level.share < 1:
            self._slice(self._changes)
        else:
            self.begin()

    def phase(self, place: int, phase: Phase) -> None:
        """The foreground has entered a phase on a device: say it after its work was given to the device, so
        that whoever interrupts pays for it."""
        if self._phases[place] != phase:
            self._phases[place] = phase
            self._apply(place)

    def stretch(self, place: int) -> float:
        """By how much computing of the foreground that begins now on a device becomes longer."""
        if Phase.COMPUTE not in self._level.phases:
            return 1.0
        share = self._level.share
        return 1.0 + sum(share * hand.row.job.drag for hand in self._hands[place] if not hand.idle)

    @property
    def work_ms(self) -> dict[str, float]:
        """By job, the device time of what was done; that of a unit under way is counted as far as it got."""
        found = dict.fromkeys((row.job.name for row in self._rows), 0.0)
        for hands in self._hands:
            for hand in hands:
                found[hand.row.job.name] += hand.done_ms
        return found

    @property
    def units(self) -> Mapping[str, int]:
        """By job, how many units have ended."""
        return {row.job.name: row.ended for row in self._rows}

    def _apply(self, place: int) -> None:
        allowed = self._phases[place] in self._level.phases and self._in_slice and not self._stopped
        for hand in self._hands[place]:
            hand.resume() if allowed else hand.pause()

    @property
    def _in_slice(self) -> bool:
        share = self._level.share
        return share >= 1 or self._simulation.now_ms % SLICE_MS < share * SLICE_MS

    def _slice(self, change: int) -> None:
        """At each border of a slice, run or pause; until the level is changed again."""
        now_ms, share = self._simulation.now_ms, self._level.share
        whole, place = divmod(now_ms, SLICE_MS)
        border_ms = (whole + (share if place < share * SLICE_MS else 1.0)) * SLICE_MS
        later_ms = max(border_ms, math.nextafter(now_ms, math.inf))
        # Where nobody asks for it any more, the clock must not go there.
        self._simulation.at(later_ms, partial(self._slice, change), wanted=lambda _: self._slices(change))
        self.begin()

    def _slices(self, change: int) -> bool:
        return not self._stopped and change == self._changes


class _Row:
    """The units of a job that nobody has taken yet."""

    __slots__ = ("ended", "job", "left")

    def __init__(self, job: Background) -> None:
        self.job = job
        self.left = math.inf if job.units is None else job.units
        self.ended = 0

    def take(self) -> bool:
        """Whether there was one to take."""
        if self.left <= 0:
            return False
        self.left -= 1
        return True


class _Hand:
    """A job on one device: the unit that it has there, if any."""

    __slots__ = ("_before_ms", "_unit_ms", "_work", "device", "row")

    def __init__(self, row: _Row, device: Device) -> None:
        self.row, self.device = row, device
        self._work: Work | None = None
        self._unit_ms = 0.0
        """What is left of the unit, as of its last pause; 0 where none is taken."""
        self._before_ms = 0.0
        """What ended units took."""

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return not self._unit_ms and self.row.left <= 0

    @property
    def done_ms(self) -> float:
        """What it did."""
        return self._before_ms + (self.row.job.unit_ms - self._left_ms if self._unit_ms else 0.0)

    @property
    def _left_ms(self) -> float:
        """Of the unit; a device may take more or less for it than is said."""
        if self._work is None or not self._work.work_ms:
            return self._unit_ms
        return self._unit_ms * self._work.left_ms / self._work.work_ms

    def resume(self) -> None:
        """Go on with the unit, or take one."""
        if self._work is not None:
            return
        if not self._unit_ms:
            if not self.row.take():
                return
            self._unit_ms = self.row.job.unit_ms
        self._work = self.device.run(self.row.job.name, self._unit_ms, self._end, priority=PRIORITY)

    def pause(self) -> None:
        """Leave the device; the unit goes on later."""
        if self._work is None:
            return
        self._unit_ms = self._left_ms
        work, self._work = self._work, None
        work.cancel()
        if self._unit_ms <= 0:
            self._count()

    def _end(self) -> None:
        self._work = None
        self._count()
        self.resume()

    def _count(self) -> None:
        self._unit_ms = 0.0
        self._before_ms += self.row.job.unit_ms
        self.row.ended += 1


def _check(backgrounds: Sequence[Background], devices: int) -> None:
    names = [background.name for background in backgrounds]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(
            f"two background jobs are called {twice!r}", setting="background", works="one name each"
        )
    for background in backgrounds:
        for place in background.devices or ():
            if not 0 <= place < devices:
                raise UsageError(
                    f"background {background.name!r} asks for device {place} of {devices}",
                    setting="background.devices",
                    works=f"0 to {devices - 1}",
                )
