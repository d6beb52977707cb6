"""The plans worth having: the faster one is, the more device time it takes.

device time
  |*            fastest
  | *
  |   *    *    (this one is not on the frontier)
  |       *
  |            *    cheapest
  +---------------- step time
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from plait.burst.burst_plan import BurstPlan, Forecast
from plait.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Plans of which none is better than another in both step time and device time, fastest first."""

    plans: tuple[BurstPlan, ...]
    gap: float = 0.0
    """0: no other plan is better. Else no plan has both figures below those of each of these over 1 + gap."""
    choice: tuple[str, float] | None = None
    """What was asked for: ``limit``, ``deadline_ms`` or ``background_value``, and its figure."""
    remarks: tuple[str, ...] = ()
    """What the figures rest on that was not measured."""

    def __post_init__(self) -> None:
        if not self.plans:
            raise UsageError("a frontier needs a plan", setting="plans", works="plait.burst.plan(...)")

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[BurstPlan]:
        return iter(self.plans)

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """Step and device time of each plan, in milliseconds."""
        return tuple((_of(plan).step_ms, _of(plan).device_ms) for plan in self.plans)

    @property
    def fastest(self) -> BurstPlan:
        """The plan with the shortest step."""
        return self.plans[0]

    @property
    def cheapest(self) -> BurstPlan:
        """The plan with the least device time."""
        return self.plans[-1]

    @property
    def chosen(self) -> BurstPlan:
        """The plan that was asked for; the fastest if nothing was."""
        if self.choice is None:
            return self.fastest
        what, figure = self.choice
        choose = {"limit": self.within, "deadline_ms": self.before, "background_value": self.best}
        return choose[what](figure)

    def within(self, limit: float) -> BurstPlan:
        """The fastest plan whose device time is at most ``limit`` times that of one device alone."""
        if not limit >= 1:
            raise UsageError(
                f"a limit of {limit} allows less device time than one device alone takes",
                setting="limit",
                works="1",
            )
        for plan in self.plans:
            # A plan that takes one device's time, added up in another order, is within a limit of 1.
            if _of(plan).amplification <= limit * (1 + 1e-12):
                return plan
        least = _of(self.cheapest).amplification
        raise UsageError(
            f"no plan takes {limit} times the device time of one device or less; the least is {least:.4g}",
            setting="limit",
            works=_at_least(least),
        )

    def before(self, deadline_ms: float) -> BurstPlan:
        """The cheapest plan whose step takes ``deadline_ms`` at most."""
        for plan in reversed(self.plans):
            if _of(plan).step_ms <= deadline_ms:
                return plan
        fastest_ms = _of(self.fastest).step_ms
        raise UsageError(
            f"no step takes {deadline_ms:g} ms or less; the fastest takes {fastest_ms:.6g} ms",
            setting="deadline_ms",
            works=_at_least(fastest_ms),
        )

    def best(self, background_value: float) -> BurstPlan:
        """The plan with the largest total, with background work on whatever the step leaves idle.

        ``background_value`` is what a device is worth that does background work, 1 being a device that does
        nothing else than this job, alone. Per millisecond of a step of s, on G devices with device time d,
        one device's step taking t:  t / s + background_value * (G - d / s).
        """
        if not 0 <= background_value < math.inf:
            raise UsageError(
                f"background work of value {background_value}", setting="background_value", works="0 to 1"
            )

        def total(plan: BurstPlan) -> float:
            its = _of(plan)
            if not its.step_ms:
                return 0.0
            return (its.single_ms - background_value * its.device_ms) / its.step_ms

        return max(self.plans, key=total)

    def choosing(self, what: str, figure: float) -> Frontier:
        """The same frontier with something asked for; an error where it cannot be had."""
        asked = replace(self, choice=(what, figure))
        asked.chosen  # noqa: B018 - raises where there is no such plan
        return asked


def _of(plan: BurstPlan) -> Forecast:
    assert plan.forecast is not None, "a planner's plans have a forecast"
    return plan.forecast


def _at_least(figure: float) -> str:
    """A figure in four digits, rounded up: what is named in an error must work."""
    unit = 10.0 ** (math.floor(math.log10(figure)) - 3) if figure > 0 else 1.0
    return f"{math.ceil(figure / unit) * unit:.4g}"
