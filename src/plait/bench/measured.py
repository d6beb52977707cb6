"""Figures measured by turns, and what is said of them."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from plait.bench.machine import Activity, Moment
from plait.errors import UsageError

Better = Literal["higher", "lower"]
"""Which way a figure improves."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How far the repetitions of a figure lie apart."""

    std: float
    minimum: float
    q1: float
    """A quarter of the repetitions are at or below this."""
    q3: float
    maximum: float
    mean: float | None = None
    """None in files that are older than this field."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        quarters = (
            statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        )
        return cls(
            std=statistics.stdev(values) if len(values) > 1 else 0.0,
            minimum=min(values),
            q1=quarters[0],
            q3=quarters[2],
            maximum=max(values),
            mean=statistics.fmean(values),
        )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One side's figures, one a round; its value is their median."""

    name: str
    values: tuple[float, ...]
    better: Better
    activity: Activity
    """What else the machine did while this was measured."""
    attempts: int = 1
    """How often all rounds were run, until the machine was calm enough or patience ended."""
    together: int = 0
    """Figures with the same number were measured by turns: their rounds can be paired."""

    @property
    def value(self) -> float:
        """The median."""
        return statistics.median(self.values)

    @property
    def spread(self) -> Spread:
        """The spread of the rounds."""
        return Spread.of(self.values)

    def scaled(self, factor: float) -> Measured:
        """In another unit: ``seconds.scaled(1e6)`` is in microseconds."""
        return replace(self, values=tuple(value * factor for value in self.values))

    def rate(self, amount: float) -> Measured:
        """So much in the measured time: ``seconds.rate(gigabytes)`` is in GB/s, and higher is better."""
        if self.better == "higher":
            raise UsageError(
                f"{self.name!r} is no time, so there is no rate to make of it",
                setting="better",
                works="figures of an interleave that times its sides",
            )
        return replace(self, values=tuple(amount / value for value in self.values), better="higher")


def interleave(
    sides: Mapping[str, Callable[[], object]],
    *,
    repetitions: int,
    warmup: int = 1,
    better: Better | None = None,
    retries: int = 0,
    seed: int = 0,
    together: int = 0,
    moment: Callable[[], Moment] = Moment.now,
) -> tuple[Measured, ...]:
    """Measure the sides by turns, so that noise hits all of them; one result a side, in their order.

    Each round calls every side once, in an order drawn from ``seed``. A call's figure is the seconds
    it took, lower being better; with ``better`` given, it is the number that the call returns. Where
    the machine was disturbed, all rounds are run again, up to ``retries`` times, and the calmest
    attempt is kept: it is chosen by what others did, never by the figures.
    """
    if not sides:
        raise UsageError("nothing to measure", setting="sides", works="one side or more")
    if repetitions < 1:
        raise UsageError(f"{repetitions} repetitions", setting="repetitions", works="5")
    for side in sides.values():
        for _ in range(warmup):
            side()
    order = random.Random(seed)
    kept: tuple[Activity, dict[str, list[float]]] | None = None
    attempts = 0
    for _ in range(1 + retries):
        attempts += 1
        before = moment()
        figures = _rounds(sides, repetitions, better, order)
        activity = moment().since(before)
        if kept is None or _noise(activity) < _noise(kept[0]):
            kept = activity, figures
        if not activity.disturbed:
            break
    assert kept is not None
    return tuple(
        Measured(
            name=name,
            values=tuple(kept[1][name]),
            better=better or "lower",
            activity=kept[0],
            attempts=attempts,
            together=together,
        )
        for name in sides
    )


def _noise(activity: Activity) -> float:
    return activity.steal + activity.others


def _rounds(
    sides: Mapping[str, Callable[[], object]], repetitions: int, better: Better | None, order: random.Random
) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {name: [] for name in sides}
    gc.collect()
    gc.freeze()
    try:
        for _ in range(repetitions):
            for name in order.sample(list(sides), len(sides)):
                # Rubbish that one side left is cleared outside the time of the next; with what was there
                # before frozen, this takes microseconds.
                gc.collect()
                start = time.perf_counter()
                returned = sides[name]()
                seconds = time.perf_counter() - start
                figures[name].append(seconds if better is None else _number(name, returned))
    finally:
        gc.unfreeze()
    return figures


def _number(name: str, returned: object) -> float:
    if isinstance(returned, (int, float)) and not isinstance(returned, bool) and math.isfinite(returned):
        return float(returned)
    raise UsageError(
        f"side {name!r} returned {returned!r} where it should return its figure",
        setting="better",
        works="a finite number, or no `better` to have the call timed",
    )
