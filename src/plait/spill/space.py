"""What is searched over: values for fields of a job and arguments of its functions, by dotted name.

    {"optimizer.lr": Real(1e-5, 1e-2, log=True), "model.layers": Whole(2, 6), "batch": Choice([8, 16])}

``optimizer.lr`` is the argument ``lr`` of the job's optimizer, ``batch`` the job's own field, and
``evaluation.every`` a field of its evaluation. Every trial is a job of its own, made with `derive`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from plait.errors import UsageError
from plait.factory import Factory
from plait.job import Job

_NOT_SEARCHED = ("name", "steps", "epochs")
"""A trial's name is the selection's, and how long it runs is what the selection decides."""


@dataclass(frozen=True)
class Choice:
    """One of some values, as JSON holds them."""

    values: Sequence[Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))
        if not self.values:
            raise UsageError("a choice of nothing", setting="space", works="Choice([1, 2])")

    def sample(self, source: random.Random) -> Any:
        """One of them, each as likely."""
        return source.choice(self.values)

    def grid(self) -> tuple[Any, ...]:
        """All of them."""
        return tuple(self.values)


@dataclass(frozen=True)
class Real:
    """A number in a range, both ends included."""

    low: float
    high: float
    log: bool = False
    """Whether small ones are as likely as large ones: for learning rates."""

    def __post_init__(self) -> None:
        _check_range(self.low, self.high, self.log, "Real(1e-5, 1e-2, log=True)")

    def sample(self, source: random.Random) -> float:
        """One in the range."""
        if not self.log:
            return source.uniform(self.low, self.high)
        drawn = math.exp(source.uniform(math.log(self.low), math.log(self.high)))
        return min(max(drawn, self.low), self.high)

    def grid(self) -> tuple[Any, ...]:
        """There is none: a range has no steps."""
        raise UsageError(
            f"a grid has no steps for the range {self.low:g} to {self.high:g}",
            setting="space",
            works=f"Choice([{self.low:g}, {self.high:g}])",
        )


@dataclass(frozen=True)
class Whole:
    """A whole number in a range, both ends included."""

    low: int
    high: int
    log: bool = False

    def __post_init__(self) -> None:
        _check_range(self.low, self.high, self.log, "Whole(2, 6)")

    def sample(self, source: random.Random) -> int:
        """One in the range."""
        if not self.log:
            return source.randint(self.low, self.high)
        drawn = round(math.exp(source.uniform(math.log(self.low), math.log(self.high))))
        return min(max(drawn, self.low), self.high)

    def grid(self) -> tuple[Any, ...]:
        """All of the range."""
        return tuple(range(self.low, self.high + 1))


Domain = Choice | Real | Whole
Space = Mapping[str, Domain]


def _check_range(low: float, high: float, log: bool, works: str) -> None:
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise UsageError(f"a range from {low} to {high}", setting="space", works=works)
    if log and low <= 0:
        raise UsageError(f"a logarithmic range from {low}", setting="space", works=works)


def check_space(job: Job, space: Space) -> None:
    """Refuse names that the job does not have."""
    if not space:
        raise UsageError(
            "there is nothing to search over", setting="space", works='{"optimizer.lr": Real(...)}'
        )
    for name, domain in space.items():
        if not isinstance(domain, (Choice, Real, Whole)):
            raise UsageError(
                f"{name!r} is to be {domain!r}", setting="space", works="a Choice, a Real or a Whole"
            )
        derive(job, job.name, {name: domain.sample(random.Random(0))})


def derive(job: Job, name: str, values: Mapping[str, Any]) -> Job:
    """The job under another name and with other values; one that does not fit it is refused."""
    changed: dict[str, Any] = {}
    known = {field.name for field in fields(job)}
    for dotted, value in values.items():
        field, _, inner = dotted.partition(".")
        if field not in known or field in _NOT_SEARCHED:
            works = ", ".join(sorted(known - set(_NOT_SEARCHED)))
            raise UsageError(f"{dotted!r} cannot be searched over", setting="space", works=f"one of {works}")
        present = changed.get(field, getattr(job, field))
        changed[field] = _set(present, inner, value, dotted) if inner else value
    return replace(job, name=name, **changed)


def _set(present: Any, inner: str, value: Any, dotted: str) -> Any:
    if isinstance(present, Factory):
        return Factory(present.target, **{**present.arguments, inner: value})
    if is_dataclass(present) and not isinstance(present, type):
        names = [field.name for field in fields(present)]
        if inner in names:
            return replace(present, **{inner: value})
        raise UsageError(f"there is no {dotted!r}", setting="space", works=", ".join(names))
    what = "nothing" if present is None else f"a {type(present).__name__}"
    raise UsageError(
        f"{dotted!r} would be an argument of {what}",
        setting="space",
        works="a function of the job: optimizer.lr",
    )
