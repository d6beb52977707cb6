"""What a benchmark script is handed: it measures, and keeps the cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from plait.bench.case import Case
from plait.bench.machine import Activity
from plait.bench.measured import Better, Measured, Spread, interleave
from plait.errors import UsageError

_T = TypeVar("_T")


class Bench:
    """One run of a question; ``run(bench)`` in the question's folder fills it."""

    def __init__(self, *, quick: bool = False, seed: int = 0) -> None:
        self.quick = quick
        """Whether a rough answer in seconds is wanted rather than a good one."""
        self.seed = seed
        self.config: dict[str, object] = {"seed": seed}
        self.cases: list[Case] = []
        self.skipped: dict[str, str] = {}
        self._interleaved = 0

    def pick(self, *, quick: _T, full: _T) -> _T:
        """The one of the two that belongs to this run."""
        return quick if self.quick else full

    def configure(self, **settings: object) -> None:
        """Note settings (JSON values) that the figures depend on; they stand in the result."""
        self.config.update(settings)

    def skip(self, name: str, why: str) -> None:
        """Say that a case cannot run here, and why; the result shows it."""
        self.skipped[name] = why

    def interleave(
        self,
        sides: Mapping[str, Callable[[], object]],
        *,
        repetitions: int,
        warmup: int = 1,
        better: Better | None = None,
        retries: int = 0,
    ) -> tuple[Measured, ...]:
        """Measure the sides by turns; one result a side, in the order given.

        The figure of a call is the seconds it took, or, with ``better``, the number it returns. Where
        the machine was disturbed by others, all rounds are run again up to ``retries`` times.
        """
        self._interleaved += 1
        return interleave(
            sides,
            repetitions=repetitions,
            warmup=warmup,
            better=better,
            retries=retries,
            seed=self.seed + self._interleaved,
            together=self._interleaved,
        )

    def case(
        self,
        name: str,
        value: Measured | float,
        *,
        unit: str,
        against: tuple[str, Measured | float] | None = None,
        limit: tuple[str, Measured | float] | None = None,
        at_least: float | None = None,
        at_most: float | None = None,
        aim: float | None = None,
        better: Better | None = None,
        published: str | None = None,
    ) -> Case:
        """Add a case. A bare number as value needs ``better``; one that was measured knows it.

        ``at_least`` bounds the ratio to ``against`` (the value, where there is none), ``at_most`` the
        value. A case without either informs. ``published`` is a paper's claim of the same comparison.
        """
        if any(case.name == name for case in self.cases):
            raise UsageError(f"there is a case {name!r} already", setting="name", works="a name of its own")
        if isinstance(value, Measured):
            better = value.better
        elif better is None:
            raise UsageError(
                f"case {name!r} is the bare number {value}, of which nobody knows whether higher is better",
                setting="better",
                works='"higher" or "lower"',
            )
        activity = value.activity if isinstance(value, Measured) else Activity(seconds=0, steal=0, others=0)
        other = None if against is None else against[1]
        case = Case(
            name=name,
            value=_value(value),
            unit=unit,
            better=better,
            repetitions=len(value.values) if isinstance(value, Measured) else 1,
            spread=value.spread if isinstance(value, Measured) else None,
            against=None if against is None else against[0],
            against_value=None if other is None else _value(other),
            against_spread=other.spread if isinstance(other, Measured) else None,
            ratio_spread=_paired(name, value, other),
            limit=None if limit is None else limit[0],
            limit_value=None if limit is None else _value(limit[1]),
            at_least=at_least,
            at_most=at_most,
            aim=aim,
            published=published,
            steal=activity.steal,
            others=activity.others,
            disturbed=activity.disturbed,
            attempts=value.attempts if isinstance(value, Measured) else 1,
        )
        self.cases.append(case)
        return case


def _value(figure: Measured | float) -> float:
    return figure.value if isinstance(figure, Measured) else float(figure)


def _paired(name: str, value: Measured | float, other: Measured | float | None) -> Spread | None:
    """The spread of the ratio over the rounds, each round's two figures taken together."""
    if not isinstance(value, Measured) or not isinstance(other, Measured):
        return None
    if value.together != other.together or value.better != other.better:
        raise UsageError(
            f"case {name!r}: {value.name!r} and {other.name!r} were not measured by turns, in one unit",
            setting="against",
            works="two sides of one interleave, scaled alike",
        )
    pairs = list(zip(value.values, other.values, strict=True))
    if value.better == "lower":
        pairs = [(b, a) for a, b in pairs]
    return Spread.of([over / under for over, under in pairs]) if all(under for _, under in pairs) else None
