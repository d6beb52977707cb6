"""A case: one figure, what it is measured against, what bounds it, and whether it holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from plait.bench.measured import Better, Spread
from plait.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of a benchmark's result. Ratios are always so that higher is better."""

    name: str
    value: float
    """The median of the repetitions."""
    unit: str
    better: Better
    repetitions: int = 1
    spread: Spread | None = None
    against: str | None = None
    """What it is measured against, in the same run."""
    against_value: float | None = None
    against_spread: Spread | None = None
    ratio_spread: Spread | None = None
    """The spread of the ratios of each round by itself."""
    limit: str | None = None
    """The physical limit there is."""
    limit_value: float | None = None
    at_least: float | None = None
    """The ratio must be this or more; the value itself where there is nothing to be against."""
    at_most: float | None = None
    """The value must be this or less."""
    aim: float | None = None
    """What we would like, in the terms of the bound."""
    published: str | None = None
    """What a paper claims of the same comparison, elsewhere and on other hardware, with its source."""
    steal: float = 0.0
    """Share of processor time that the hypervisor took meanwhile."""
    others: float = 0.0
    """Share of processor time that other processes used meanwhile."""
    disturbed: bool = False
    attempts: int = 1

    def __post_init__(self) -> None:
        for field in ("value", "against_value", "limit_value", "at_least", "at_most", "aim"):
            number = getattr(self, field)
            if number is not None and not math.isfinite(number):
                raise UsageError(
                    f"case {self.name!r}: {field} is {number}", setting=field, works="a finite number"
                )
        if self.aim is not None and self.at_least is None and self.at_most is None:
            raise UsageError(
                f"case {self.name!r} has an aim of {self.aim} and no bound that says what it is of",
                setting="aim",
                works="at_least or at_most beside it",
            )
        if self.at_most is not None and self.better == "higher":
            raise UsageError(
                f"case {self.name!r} may be {self.at_most} {self.unit} at most, but higher is better",
                setting="at_most",
                works="at_least",
            )
        if self.at_least is not None and self.against is None and self.better == "lower":
            raise UsageError(
                f"case {self.name!r} must be {self.at_least} {self.unit} at least, but lower is better",
                setting="at_least",
                works="at_most, or something to be against",
            )

    @property
    def ratio(self) -> float | None:
        """How many times better than what it is measured against."""
        return None if self.against_value is None else self._over(self.against_value)

    @property
    def of_limit(self) -> float | None:
        """The share of the physical limit that is reached: 1 is all of it."""
        return None if self.limit_value is None else self._over(self.limit_value)

    def _over(self, other: float) -> float | None:
        over, under = (self.value, other) if self.better == "higher" else (other, self.value)
        return over / under if under else None

    @property
    def holds(self) -> bool | None:
        """Whether every bound is kept; None for a case that only informs."""
        return self._within(self.at_least, self.at_most)

    @property
    def reaches_aim(self) -> bool | None:
        """Whether the aim is reached too; None where there is none."""
        if self.at_most is not None:
            return self._within(None, self.aim)
        return self._within(self.aim, None)

    def _within(self, least: float | None, most: float | None) -> bool | None:
        if least is None and most is None:
            return None
        judged = self.value if self.against is None else self.ratio
        high_enough = least is None or (judged is not None and judged >= least)
        return high_enough and (most is None or self.value <= most)

    def to_json(self) -> dict[str, Any]:
        """As plain data, with what follows from the fields."""
        data = asdict(self)
        data.update(ratio=self.ratio, of_limit=self.of_limit, holds=self.holds, reaches_aim=self.reaches_aim)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Case:
        """From plain data; what follows from the fields is worked out anew."""
        known = {field.name: data[field.name] for field in fields(cls) if field.name in data}
        for name in ("spread", "against_spread", "ratio_spread"):
            if known.get(name) is not None:
                known[name] = Spread(**known[name])
        return cls(**known)
