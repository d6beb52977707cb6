"""Background work on the devices of a foreground job, within a bound on what that costs the foreground.

    import plait.burst

    with plait.burst.background(["python", "sweep.py"], max_slowdown=1.05) as work:
        train()                      # a BurstParallel, or any script that `plait launch` started
        print(work.report)

The background runs in processes of its own that only get what nobody else wants
(:mod:`plait.burst.process`). The foreground says its steps and phases in shared memory
(:mod:`plait.burst.phases`). One thread reads them, lets a :mod:`controller <plait.burst.controller>`
decide, and pauses and resumes the background.

J. Park et al., "Efficient Strong Scaling Through Burst Parallel Training" (DeepPool), MLSys 2022, fill the
gaps of one foreground with one fixed background task and slow the launch of its kernels by hand. Here a
bound is declared and held, there may be several works, and they need not know that they are in the
background.
"""

from __future__ import annotations

import bisect
import os
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from plait.burst import leftover
from plait.burst.controller import LADDER, PHASELESS_LADDER, Control, Controller, Decision, Level
from plait.burst.occupancy import Occupancy
from plait.burst.phases import RUN_VARIABLE, Listener, Phase, default_directory, publishing
from plait.burst.process import Background, Work, cores_of
from plait.burst.report import Account, Report, Slowdown
from plait.errors import UsageError, WorkerError

if TYPE_CHECKING:
    from plait.timeline import Timeline

TICK_SECONDS = 0.1
"""Between two looks at the foreground, where nothing asks for a faster one."""
_SCAN_SECONDS = 0.5
"""Between two looks for new foreground processes."""
_SILENT_SECONDS, _SILENT_STEPS, _FIRST_STEP_SECONDS = 2.0, 10, 60.0
"""After so long, and so many times its last step, a foreground that ends no step does something else."""
_SLICE_SECONDS = 0.1
"""A level that allows a share of the time does so in slices of this length."""
_POLL_SECONDS = 0.002
"""Between two looks at the phases of several foreground processes at once: one can wait for one bell only."""
_TOP = len(LADDER) - 1


class _Foreground:
    """One process of a foreground job, and the bound that it is promised."""

    def __init__(self, listener: Listener, control: Control, timeline: Timeline | None) -> None:
        self.listener = listener
        self.controller = Controller(control=control)
        self._heard_ns = time.monotonic_ns()
        self._patience_s = _FIRST_STEP_SECONDS
        self._silent = False
        self.seen = 0
        """How many phases it had entered when it was last decided what may run."""
        self.occupancy = None if timeline is None else Occupancy(timeline, listener.device)

    def allows(self, level: int) -> Level:
        """What a place in the ladder means here: who never says that it waits has no such phases."""
        return (LADDER if self.listener.has_phases else PHASELESS_LADDER)[level]

    @property
    def level(self) -> int:
        """What it bears; everything while it makes no steps that could be slowed down."""
        return self.controller.level if self.makes_steps else _TOP

    @property
    def makes_steps(self) -> bool:
        """Whether there are any to slow down: not before the first, nor while it does something else."""
        return self.listener.step is not None and not self._silent

    def read(self, levels: _Levels) -> None:
        """Take note of what it has done since the last time."""
        self.seen = self.listener.phases_entered
        for step in self.listener.new_steps():
            self._heard_ns = step.end_ns
            self._patience_s = max(_SILENT_SECONDS, _SILENT_STEPS * step.milliseconds / 1e3)
            self.controller.observe(step.number, step.milliseconds, levels.during(step.begin_ns, step.end_ns))
        self._silent = (time.monotonic_ns() - self._heard_ns) / 1e9 > self._patience_s
        if self._silent:
            self.controller.silence()
        if self.occupancy is not None:
            for since_ns, phase in self.listener.new_phases():
                self.occupancy.entered(since_ns, phase)


class _Levels:
    """Which level was in force when."""

    def __init__(self, level: int) -> None:
        self._since: deque[tuple[int, int]] = deque([(0, level)], maxlen=1024)

    @property
    def now(self) -> int:
        return self._since[-1][1]

    def change(self, level: int) -> None:
        self._since.append((time.monotonic_ns(), level))

    def during(self, begin_ns: int, end_ns: int) -> int | None:
        """The level from the one moment to the other; None where there were several."""
        known = list(self._since)
        at = bisect.bisect_right(known, begin_ns, key=lambda entry: entry[0]) - 1
        alone = at >= 0 and (at + 1 == len(known) or known[at + 1][0] >= end_ns)
        return known[at][1] if alone else None


class Multiplexer:
    """Runs background works on this host, and holds one bound for the foreground that shares its cores."""

    def __init__(
        self,
        *,
        max_slowdown: float = 1.05,
        outlive: bool = True,
        timeline: Timeline | None = None,
        control: Control | None = None,
    ) -> None:
        """``outlive``: whether works go on when the foreground has ended; ``timeline``: who had a device.

        ``control`` sets what ``max_slowdown`` leaves open, and replaces it.
        """
        self._control = control or Control(max_slowdown=max_slowdown)
        self._outlive, self._timeline = outlive, timeline
        self._directory, self._run_name = default_directory(), os.environ.get(RUN_VARIABLE)
        self._works: dict[str, Background] = {}
        self._accounts: dict[str, Account] = {}
        self._foregrounds: dict[Path, _Foreground] = {}
        self._ended: list[Controller] = []
        """Of foreground processes that are gone."""
        self._levels = _Levels(_TOP)
        self._seen: dict[str, tuple[float, int]] = {}
        self._looked_ns = time.monotonic_ns()
        self._scanned_s = 0.0
        self._held = False
        self._held_alone: set[str] = set()
        """Labels of works that are paused by hand, apart from the others."""
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="plait-multiplex", daemon=True)
        with suppress(WorkerError):
            leftover.clean()

    def add(self, work: Work) -> Background:
        """Start a work, beside those that there are."""
        if self._stopping.is_set():
            raise UsageError("this multiplexer was stopped", setting="background", works="a new one")
        started = Background(work)
        with self._lock:
            self._works[started.label] = started
            self._accounts[started.label] = Account(threads=work.threads)
            self._seen[started.label] = (0.0, 0)
            self._look()  # it may come at a moment at which the foreground bears nothing
            if not self._thread.is_alive():
                self._thread.start()
        return started

    def hold(self, held: bool, *, only: Background | None = None) -> None:
        """Pause all works, or one, until further notice; or let them run as far as the foreground allows."""
        with self._lock:
            if only is None:
                self._held = held
            elif held:
                self._held_alone.add(only.label)
            else:
                self._held_alone.discard(only.label)
            self._look()

    def promote(self) -> None:
        """Let all works have their share of the cores from now on: no foreground is to come any more."""
        with self._lock:
            for work in self._works.values():
                work.promote()

    def stop(self, grace_seconds: float = 3.0) -> None:
        """End all works, and leave nothing behind."""
        self._stopping.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        left = self._end_all(grace_seconds)
        if self._error is not None:
            error, self._error = self._error, None
            raise WorkerError(f"background work was ended: {error}") from error
        if left is not None:
            raise left

    def _end_all(self, grace_seconds: float = 3.0) -> Exception | None:
        """End every work, though one of them cannot be; why the first of those could not."""
        errors = []
        for work in list(self._works.values()):
            try:
                work.end(grace_seconds)
            except Exception as error:
                errors.append(error)
        return errors[0] if errors else None

    def report(self, work: Background) -> Report:
        """How one of the works and the foreground get along."""
        with self._lock:
            controllers = [*self._ended, *(each.controller for each in self._foregrounds.values())]
            account = self._accounts[work.label]
            ratios = [ratio for each in controllers for ratio in each.ratios]
            measured = [each for each in controllers if each.baseline_ms is not None]
            decisions: list[Decision] = [each for found in controllers for each in found.decisions]
            return Report(
                max_slowdown=self._control.max_slowdown,
                slowdown=Slowdown.of(ratios),
                baseline_ms=measured[-1].baseline_ms if measured else None,
                share=account.share,
                steps=account.steps,
                alone_steps=account.alone_steps,
                processor_seconds=account.processor_seconds,
                seconds=account.seconds,
                paused=account.paused_seconds / account.seconds if account.seconds else 0.0,
                preemptions=max((each.preemptions for each in controllers), default=0),
                level=self._level_name(),
                protection=work.protection,
                decisions=tuple(decisions),
            )

    def _level_name(self) -> str:
        names = {each.allows(self._levels.now).name for each in self._foregrounds.values()}
        return ", ".join(sorted(names)) or LADDER[_TOP].name

    # The thread

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                with self._lock:
                    seconds = self._look()
                self._rest(seconds)
        except BaseException as error:  # nobody holds the works back any more, so they end
            self._error = error
            self._end_all()

    def _look(self) -> float:
        """Read what the foreground did, decide, and pause or resume; how long to rest at most."""
        now_s = time.monotonic()
        if now_s - self._scanned_s >= _SCAN_SECONDS:
            self._scanned_s = now_s
            self._scan()
        for foreground in self._foregrounds.values():
            foreground.read(self._levels)
        level = min((each.level for each in self._foregrounds.values()), default=_TOP)
        level = 0 if self._held else level
        if level != self._levels.now:
            self._levels.change(level)
        self._count()
        allowed = [(each.listener.phase, each.allows(level)) for each in self._foregrounds.values()]
        runs = not self._held and all(phase in bears.phases for phase, bears in allowed)
        share = min((bears.share for _, bears in allowed), default=1.0)
        rest_s = TICK_SECONDS
        if runs and share < 1:
            place = now_s % _SLICE_SECONDS
            runs = place < share * _SLICE_SECONDS
            rest_s = (share * _SLICE_SECONDS if runs else _SLICE_SECONDS) - place
        for label, work in self._works.items():
            work.resume() if runs and label not in self._held_alone else work.pause()
        return rest_s

    def _scan(self) -> None:
        """Meet foreground processes that are new on these cores, and part from those that are gone."""
        cores = {core for work in self._works.values() for core in work.work.cores or os.sched_getaffinity(0)}
        found = set(publishing(self._directory, "foreground", run=self._run_name))
        for path in found - set(self._foregrounds):
            with suppress(OSError):
                listener = Listener(path)
                if cores_of(listener.pid) & cores:
                    self._foregrounds[path] = _Foreground(listener, self._control, self._timeline)
        for path in set(self._foregrounds) - found:
            self._ended.append(self._foregrounds.pop(path).controller)
        for work in self._works.values():
            work.keep_back()
        if self._ended and not self._foregrounds and not self._outlive:
            self._error = self._end_all()
            self._stopping.set()

    def _count(self) -> None:
        """What every work got since the last look."""
        now_ns = time.monotonic_ns()
        passed_s, before_ns = (now_ns - self._looked_ns) / 1e9, self._looked_ns
        self._looked_ns = now_ns
        for label, work in self._works.items():
            account, (seconds, steps) = self._accounts[label], self._seen[label]
            if work.exit_code is not None and seconds == work.seconds():
                continue
            self._seen[label] = (work.seconds(), work.steps())
            used, made = self._seen[label][0] - seconds, self._seen[label][1] - steps
            if self._held or label in self._held_alone:
                continue
            if any(each.makes_steps for each in self._foregrounds.values()):
                account.seconds += passed_s
                account.processor_seconds += used
                account.steps += made
                account.paused_seconds += passed_s if work.paused else 0.0
            elif not self._foregrounds:
                account.alone_seconds += passed_s
                account.alone_processor_seconds += used
                account.alone_steps += made
            for foreground in self._foregrounds.values():
                if foreground.occupancy is not None:
                    foreground.occupancy.used(before_ns, now_ns, used, work.work.threads, work.work.name)

    def _rest(self, seconds: float) -> None:
        """Sleep, but not through a change of phase that matters."""
        foregrounds = list(self._foregrounds.values())
        listeners = [each.listener for each in foregrounds]
        phases = {each.allows(self._levels.now).phases for each in foregrounds}
        gated = bool(phases - {frozenset(), frozenset(Phase)})
        if not listeners or not (gated or self._timeline is not None):
            self._stopping.wait(seconds)
        elif len(listeners) == 1:
            heard = listeners[0].bell
            listeners[0].expect(10 * seconds)
            if listeners[0].phases_entered == foregrounds[0].seen:  # no change before it knew that we listen
                listeners[0].wait(heard, seconds)
        else:
            self._stopping.wait(min(seconds, _POLL_SECONDS))
