"""What background work cost the foreground, and what it got: figures of a multiplexer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from plait.burst.controller import Decision
from plait.units import format_seconds


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """Steps of the foreground beside background work, each as a multiple of what it takes alone."""

    mean: float
    std: float
    q1: float
    median: float
    q3: float
    maximum: float
    steps: int

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Slowdown | None:
        """The figures of at least two steps; None of fewer."""
        if len(ratios) < 2:
            return None
        q1, median, q3 = statistics.quantiles(ratios, n=4, method="inclusive")
        return cls(
            mean=statistics.fmean(ratios),
            std=statistics.stdev(ratios),
            q1=q1,
            median=median,
            q3=q3,
            maximum=max(ratios),
            steps=len(ratios),
        )


@dataclass(kw_only=True)
class Account:
    """What one background work got, apart for the time beside a foreground and the time without."""

    threads: int
    seconds: float = 0.0
    """Of the clock."""
    processor_seconds: float = 0.0
    steps: int = 0
    paused_seconds: float = 0.0
    alone_seconds: float = 0.0
    alone_processor_seconds: float = 0.0
    alone_steps: int = 0

    @property
    def share(self) -> float | None:
        """Its throughput beside a foreground, of its throughput alone; None before there is any.

        By its steps where it made some alone, too; else by processor time, of what it used alone or, where it
        never was, of one core a thread.
        """
        if self.seconds < 0.1:
            return None
        if self.steps and self.alone_steps >= _ENOUGH_STEPS:
            return (self.steps / self.seconds) / (self.alone_steps / self.alone_seconds)
        alone = float(self.threads)
        if self.alone_seconds >= _ENOUGH_SECONDS and self.alone_processor_seconds > 0:
            alone = self.alone_processor_seconds / self.alone_seconds
        return self.processor_seconds / self.seconds / alone


_ENOUGH_STEPS, _ENOUGH_SECONDS = 10, 2.0


@dataclass(frozen=True, kw_only=True)
class Report:
    """How background work and foreground have got along so far."""

    max_slowdown: float
    slowdown: Slowdown | None
    """Of the foreground; None before any step beside background work."""
    baseline_ms: float | None
    """What a step of the foreground takes alone."""
    share: float | None
    """The background's throughput beside the foreground, of its throughput alone."""
    steps: int
    """That the background made beside the foreground, where it says so."""
    alone_steps: int = 0
    """That it made without a foreground, where it says so."""
    processor_seconds: float
    """That it used beside the foreground."""
    seconds: float
    """Of the clock, beside a foreground."""
    paused: float
    """The share of that time for which it was paused."""
    preemptions: int
    """How often it was stopped because steps took too long."""
    level: str
    """When it may run now."""
    protection: str
    """What holds it back: its priority, and how it is paused."""
    decisions: tuple[Decision, ...]

    def __str__(self) -> str:
        found = self.slowdown
        if found is None:
            said = "no foreground step was seen beside it"
            if self.seconds and self.paused:  # there was a foreground, and only its steps alone were measured
                seconds = format_seconds(self.seconds)
                said += f"; it was paused {self.paused:.0%} of the {seconds} for which a foreground trained"
            return said
        if self.alone_steps and not self.steps:  # what it took beside the foreground went into starting
            return "it made no step beside the foreground"
        parts = [self._cost(found)]
        if self.share is not None:
            parts.append(f"background at {_of_its_own(self.share)}")
        parts.append(f"preempted {self.preemptions} times, paused {self.paused:.0%} of the time")
        return "; ".join(parts)

    def _cost(self, found: Slowdown) -> str:
        """What it cost the foreground."""
        ratio = f"{found.mean:.3f} times what it takes alone"
        spread = (
            f"std {found.std:.3f}, half of the {found.steps} steps between {found.q1:.3f} and {found.q3:.3f}"
        )
        if found.mean < 1:  # the spread of what was measured: background work makes nothing faster
            return f"a foreground step was no slower than alone ({ratio}, {spread})"
        kept = "within" if found.mean <= self.max_slowdown else "ABOVE"
        return f"a foreground step took {ratio}, {kept} the bound of {self.max_slowdown:g} ({spread})"


def _of_its_own(share: float) -> str:
    """A share of its own throughput; more than all of it is the spread of what was measured, not a gain."""
    if share < 1.005:
        return f"{share:.0%} of its own throughput"
    return f"about 100% of its own throughput ({share:.0%} as measured: its speed alone varies)"
