"""How much background work a foreground job bears: step times in, a level out; no clock and no process.

The bound is on the foreground's step time: with background work, a step may take ``max_slowdown`` times
what it takes alone. What it takes alone is measured by pausing the background for a few steps: at first,
when a bound seems broken, when steps become faster than the baseline, and rarely otherwise (1% of the
steps).

    level      off   1/4   1/2   idle   not in compute   always          (the ladder, from left to right)
                        <- one step down when the bound is broken, and the pause shows that it is our fault
                        -> one step up after a while without that; a level that failed is tried again later
                           and later (16, 32, 64 ... steps), so that there is no flapping

Broken is decided by cumulative sums (E. S. Page, "Continuous inspection schemes", Biometrika 41, 1954) of
the excess over the bound, in units of the baseline: a fast one, in which a single step counts a quarter at
most so that one slow step of the foreground's own does no harm, and a slow one that sees rare steps that
are far too slow. A step that is twice too slow is so noticed within three, one that is 1% too slow within
fifty.

A foreground on several hosts has a multiplexer on each, and they do not talk. They see the same steps with
the same numbers, so they measure at the same places, every ``align`` steps: each while the others do, too.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from plait.burst.phases import Phase
from plait.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Level:
    """When background work may run."""

    name: str
    phases: frozenset[Phase]
    """The foreground's phases in which it may."""
    share: float = 1.0
    """Of the time in them."""


_EVERY = frozenset(Phase)
LADDER = (
    Level(name="off", phases=frozenset(), share=0.0),
    Level(name="a quarter of idle time", phases=frozenset({Phase.IDLE}), share=0.25),
    Level(name="half of idle time", phases=frozenset({Phase.IDLE}), share=0.5),
    Level(name="idle time", phases=frozenset({Phase.IDLE})),
    Level(name="not while computing", phases=frozenset({Phase.IDLE, Phase.COLLECTIVE})),
    Level(name="always", phases=_EVERY),
)
"""Where the foreground publishes its phases."""
PHASELESS_LADDER = (
    LADDER[0],
    *(Level(name=f"{share:.0%} of the time", phases=_EVERY, share=share) for share in (0.1, 0.25, 0.5, 0.75)),
    LADDER[-1],
)
"""Where only its steps are known."""


@dataclass(frozen=True, kw_only=True)
class Control:
    """How the bound is held."""

    max_slowdown: float = 1.05
    """Of the foreground's steps, on average."""
    window: int = 6
    """Steps of a measurement without background work."""
    settle: int = 1
    """Steps that do not count after a change of level."""
    align: int = 8
    """Measurements begin at step number 2, and every so many after it, on all hosts."""
    retry_steps: int = 16
    """After which a level that failed is tried again the first time."""
    most_retry_steps: int = 4096
    upkeep: float = 0.01
    """The share of steps that measurements may take while nothing is wrong."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_slowdown) and self.max_slowdown > 1):
            raise UsageError(
                f"no background work leaves a step at {self.max_slowdown:g} times its length",
                setting="max_slowdown",
                works="1.05, or any number above 1",
            )
        least = {"window": 2, "settle": 0, "align": 1, "retry_steps": 1, "most_retry_steps": self.retry_steps}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise UsageError(
                    f"{name} is {getattr(self, name)}",
                    setting=name,
                    works=f"{low} or more, such as {max(low, 8)}",
                )
        if not 0 < self.upkeep < 1:
            raise UsageError(f"upkeep is {self.upkeep}", setting="upkeep", works="0.01")

    @property
    def period(self) -> int:
        """Steps between two measurements that all hosts make, whatever else they do."""
        return self.align * math.ceil((self.window + self.settle) / self.upkeep / self.align)


@dataclass(frozen=True, slots=True)
class Decision:
    """A change of level."""

    step: int
    level: int
    """Its place in the ladder; 0 is off."""
    reason: str


@dataclass(kw_only=True)
class _Suspicion:
    """Steps that broke the bound, until a measurement says whose fault it was."""

    milliseconds: float
    """What they took, on average."""


_FAST_LIMIT, _FAST_STEP = 0.5, 0.25
_SLOW_LIMIT, _SLOW_STEP = 8.0, 2.0
"""Of the cumulative sums, and what a single step may add to them; in baselines."""
_CALM = 0.1
"""A level is left for the next only while the fast sum is below this."""
_OUTLIER = 1.5
"""A step of a measurement that takes this many medians is left out of the baseline."""
_POOLED, _AGREEMENT = 48, 0.02
"""Measurements that agree so well are taken together, up to so many steps."""
_FASTER, _FASTER_STEPS = 0.97, 12
"""Steps beside the background that are this much faster than the baseline, on average, question it."""
_WARM_UP = 2
"""The first steps of a foreground make connections and buffers."""
_KEPT = 8192


@dataclass(kw_only=True)
class Controller:
    """Holds one bound for one foreground job; give it every step, and do as ``level`` says."""

    control: Control = field(default_factory=Control)
    ladder: Sequence[Level] = LADDER
    level: int = 0
    """What is to be in force from now on, as a place in the ladder."""
    baseline_ms: float | None = None
    """What a step takes alone; None before it was measured."""
    preemptions: int = 0
    """How often background work was stopped or held back."""
    decisions: deque[Decision] = field(default_factory=lambda: deque(maxlen=1024))
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """Of steps beside background work, by what they take alone."""

    def __post_init__(self) -> None:
        top = len(self.ladder) - 1
        self._target = top  # the level to return to after a measurement
        self._measuring = True
        self._samples: list[float] = []
        self._error = math.inf
        self._alone: deque[float] = deque(maxlen=_POOLED)
        self._suspicion: _Suspicion | None = None
        self._doubt_ms: float | None = None
        self._faster = _FASTER
        self._together = False
        self._settling = self.control.settle
        self._count = 0
        self._wait = [self.control.retry_steps] * (top + 1)
        self._retry_at = [0] * (top + 1)
        self._aimed_at = 0
        self._fast = self._slow = 0.0
        self._fast_run: list[float] = []
        self._slow_run: list[float] = []
        self._last: deque[float] = deque(maxlen=_FASTER_STEPS)

    @property
    def measuring(self) -> bool:
        """Whether the background is paused to see what a step takes alone."""
        return self._measuring

    @property
    def error(self) -> float:
        """The standard error of the baseline, as a share of it; infinite before there is one."""
        return self._error

    def observe(self, number: int, milliseconds: float, level: int | None) -> int:
        """Take note of a step, and of the level in force all through it (None: more than one); what next."""
        self._count += 1
        if level != self.level:
            return self.level
        if self._settling > 0:
            self._settling -= 1
            return self.level
        if self._measuring:
            self._measure(number, milliseconds)
        else:
            self._watch(number, milliseconds)
        return self.level

    def silence(self) -> int:
        """No step has ended for long: what was to be measured must wait, and the background need not."""
        if self._measuring and self.baseline_ms is not None:
            self._measuring = False
            self._go(self._count, self._target, "no steps to measure")
        return self.level

    # Alone

    def _measure(self, number: int, milliseconds: float) -> None:
        if not self._samples and (number < _WARM_UP or (number - _WARM_UP) % self.control.align):
            return
        self._samples.append(milliseconds)
        if len(self._samples) < self.control.window:
            return
        samples, self._samples, self._measuring = self._samples, [], False
        middle = statistics.median(samples)
        kept = [sample for sample in samples if sample < _OUTLIER * middle]
        mean = statistics.fmean(kept)
        if self._believes(kept):
            if self.baseline_ms is None or abs(mean / self.baseline_ms - 1) > max(_AGREEMENT, 3 * self.error):
                self._alone.clear()
            self._alone.extend(kept)
            self.baseline_ms = statistics.fmean(self._alone)
            self._error = _standard_error(self._alone) / self.baseline_ms
        if self._doubt_ms is not None:
            assert self.baseline_ms is not None
            # A busy core wakes faster than one that sleeps: if that is all, it is not to be asked again.
            self._faster = _FASTER * min(1.0, self._doubt_ms / self.baseline_ms)
            self._doubt_ms = None
        self._judge(number)

    def _believes(self, samples: Sequence[float]) -> bool:
        """Whether a measurement may be the new baseline.

        Background work on another host, whose multiplexer does not measure now, can make it up to
        ``max_slowdown`` too long. So one that is a little longer is only believed where all hosts measure.
        """
        if self.baseline_ms is None or self._together:
            return True
        longer = statistics.fmean(samples) / self.baseline_ms
        chance = math.hypot(self.error, _standard_error(samples) / self.baseline_ms)
        return longer <= 1 + chance or longer > self.control.max_slowdown

    def _judge(self, number: int) -> None:
        """Whose fault it was, now that it is known what a step takes alone."""
        assert self.baseline_ms is not None
        suspicion, self._suspicion = self._suspicion, None
        reason = f"alone, a step takes {self.baseline_ms:.3g} ms"
        if suspicion is not None and self._target > 0:
            slowdown = suspicion.milliseconds / self.baseline_ms
            if slowdown > self.control.max_slowdown:
                failed = self._target
                longer = min(2 * self._wait[failed], self.control.most_retry_steps)
                self._retry_at[failed] = self._count + self._wait[failed]
                # What lies above takes more still: it need not be tried sooner.
                self._wait[failed:] = [max(wait, longer) for wait in self._wait[failed:]]
                self._aim_at(failed - 1)
                reason = f"steps took {slowdown:.3f} times what they take alone"
            else:
                reason = f"the foreground itself had become slower: {reason}"
        self._go(number, self._target, reason)

    # Beside background work

    def _watch(self, number: int, milliseconds: float) -> None:
        assert self.baseline_ms is not None
        ratio = milliseconds / self.baseline_ms
        if self.level > 0:
            self.ratios.append(ratio)
        excess = ratio - self._limit()
        self._fast = max(0.0, self._fast + min(excess, _FAST_STEP))
        self._slow = max(0.0, self._slow + min(excess, _SLOW_STEP))
        for run, total in ((self._fast_run, self._fast), (self._slow_run, self._slow)):
            run.append(milliseconds) if total > 0 else run.clear()
        self._last.append(ratio)
        if self._fast > _FAST_LIMIT:
            self._suspect(number, self._fast_run)
        elif self._slow > _SLOW_LIMIT:
            self._suspect(number, self._slow_run)
        elif (number + 1 + self.control.settle - _WARM_UP) % self.control.period == 0:
            self._pause(number, "what a step takes alone is measured anew", together=True)
        elif len(self._last) == _FASTER_STEPS and statistics.fmean(self._last) < self._faster:
            self._doubt_ms = statistics.fmean(self._last) * self.baseline_ms
            self._pause(number, "steps are faster than the baseline")
        else:
            self._rise(number)

    def _limit(self) -> float:
        """What is held to be too slow: the bound, less what the baseline may be wrong by."""
        bound = self.control.max_slowdown
        return max((1 + bound) / 2, bound - 2 * self.error)

    def _suspect(self, number: int, steps: Sequence[float]) -> None:
        self._suspicion = _Suspicion(milliseconds=statistics.fmean(steps))
        if self.level > 0:
            self.preemptions += 1
        assert self.baseline_ms is not None
        self._pause(number, f"steps take {self._suspicion.milliseconds / self.baseline_ms:.3f} baselines")

    def _rise(self, number: int) -> None:
        survived = self._count - self._aimed_at
        if survived > 2 * self._wait[self._target]:  # it bears this level: what failed once is forgiven
            self._wait[self._target] = self.control.retry_steps
        above = self._target + 1
        calm = survived >= 2 * self.control.align and self._fast < _CALM
        if calm and above < len(self.ladder) and self._count >= self._retry_at[above]:
            self._aim_at(above)
            self._go(number, above, "the bound is kept: a level more")

    # Changes

    def _aim_at(self, target: int) -> None:
        self._target, self._aimed_at = target, self._count

    def _pause(self, number: int, reason: str, *, together: bool = False) -> None:
        self._measuring, self._together = True, together
        self._samples = []
        self._go(number, 0, reason)

    def _go(self, number: int, level: int, reason: str) -> None:
        if level != self.level:
            self.level = level
            self._settling = self.control.settle
            self.decisions.append(Decision(number, level, reason))
        self._fast = self._slow = 0.0
        self._fast_run, self._slow_run = [], []
        self._last.clear()


def _standard_error(samples: Sequence[float]) -> float:
    """Of their mean; those of the library are exact, and far slower."""
    mean = statistics.fmean(samples)
    variance = sum((sample - mean) ** 2 for sample in samples) / max(1, len(samples) - 1)
    return math.sqrt(variance / len(samples))
