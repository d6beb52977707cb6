"""What changed between two runs of the same questions, and what of it is more than noise.

A case is compared by its ratio to what it was measured against in its own run, where it has one: a slower
machine slows both sides. Where it has none its value is compared, on the same machine only. The rule:

1. *change* = (after - before) / mean of the two, signed so that above zero is better. Swapping the two runs
   swaps the sign.
2. *noise* = the standard deviations of the two runs' rounds, joined as sqrt(a^2 + b^2). It is that of single
   rounds, not of their median: runs on different days differ by more than the rounds of one.
3. A case is worse (or better) where the change is beyond ``DEVIATIONS`` times the noise and beyond ``LEAST``.
4. It is compared *loosely*, beyond ``LOOSE`` in place of ``LEAST``, where the noise is not known well: fewer
   than ``ROUNDS`` rounds in either run.
5. A worse case is a regression if it has a ratio or a bound, and if neither run was disturbed by others. A
   case that only informs is shown, and no more; so is a disturbed one, which should be asked again.

A question that came to its end before and does not now is a regression as well. Cases of a quick run are
not compared with those of a full one, since sizes differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from plait.bench.case import Case
from plait.bench.report import Report
from plait.bench.suite import Suite

DEVIATIONS = 2.0
LEAST = 0.10
LOOSE = 0.25
ROUNDS = 3
_MACHINE = ("cpu", "cores", "cores_usable", "architecture")
"""What makes it the same machine; memory and kernel are told and hinder nothing."""

Verdict = Literal["same", "better", "worse"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One case in both runs."""

    question: str
    case: str
    by: Literal["ratio", "value"]
    unit: str
    """Of the value; empty for a ratio."""
    before: float
    after: float
    change: float
    """As a share of the mean of the two; above zero is better."""
    noise: float | None
    """One joint standard deviation, as such a share; None where neither run repeated the case."""
    loosely: bool
    disturbed: bool
    """Whether others used the machine in either run."""
    informs: bool
    """Whether it has neither a ratio nor a bound."""

    @property
    def verdict(self) -> Verdict:
        """What the rule says."""
        least = LOOSE if self.loosely else LEAST
        if abs(self.change) <= max(least, DEVIATIONS * (self.noise or 0.0)):
            return "same"
        return "better" if self.change > 0 else "worse"

    @property
    def regression(self) -> bool:
        """Whether it is worse, beyond noise, and that is nobody else's doing."""
        return self.verdict == "worse" and not self.disturbed and not self.informs

    def to_json(self) -> dict[str, Any]:
        """As plain data, with what follows from the fields."""
        return {**asdict(self), "verdict": self.verdict, "regression": self.regression}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All that can be said of two runs."""

    before: str
    """When the earlier one began."""
    changes: tuple[Change, ...]
    broken: Mapping[str, str]
    """Questions that came to their end before, and what ends them now."""
    left_out: Mapping[str, str]
    """What stands in one of the two only, or cannot be compared, and why."""
    notes: tuple[str, ...]
    """What else differs: machine, versions, settings."""

    @property
    def regressions(self) -> tuple[Change, ...]:
        """The cases that are worse beyond noise, and do not only inform."""
        return tuple(change for change in self.changes if change.regression)

    @property
    def changed(self) -> tuple[Change, ...]:
        """The cases that are worse or better beyond noise, the worst first."""
        found = (change for change in self.changes if change.verdict != "same")
        return tuple(sorted(found, key=lambda change: change.change))

    @property
    def regressed(self) -> bool:
        """Whether anything is worse than before."""
        return bool(self.regressions or self.broken)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "before": self.before,
            "regressed": self.regressed,
            "changes": [change.to_json() for change in self.changes],
            "broken": dict(self.broken),
            "left_out": dict(self.left_out),
            "notes": list(self.notes),
        }


def compare(before: Suite, after: Suite) -> Comparison:
    """Set two runs side by side; questions that the later one did not ask are not spoken of."""
    earlier = {report.question: report for report in before.reports}
    changes: list[Change] = []
    broken: dict[str, str] = {}
    left_out: dict[str, str] = {}
    notes: list[str] = [] if before.finished else ["the earlier run did not come to its end"]
    for report in after.reports:
        old = earlier.get(report.question)
        if old is None:
            left_out[report.question] = "was not asked before"
            continue
        if old.quick != report.quick:
            left_out[report.question] = f"was asked {'quickly' if old.quick else 'in full'} before"
            continue
        if report.error is not None and old.error is None:
            broken[report.question] = report.error
        notes += _differences(old, report)
        for found in _cases(old, report):
            if isinstance(found, Change):
                changes.append(found)
            else:
                left_out[f"{report.question}: {found[0]}"] = found[1]
    return Comparison(
        before=before.date,
        changes=tuple(changes),
        broken=broken,
        left_out=left_out,
        notes=tuple(dict.fromkeys(notes)),
    )


def _cases(old: Report, new: Report) -> Iterator[Change | tuple[str, str]]:
    """Each case of either: compared, or its name and why it is not."""
    alike = same_machine(old.machine, new.machine)
    disturbed = any(report.activity.get("disturbed") for report in (old, new))
    earlier, later = ({case.name: case for case in report.cases} for report in (old, new))
    for name, case in later.items():
        if name not in earlier:
            yield name, "was not there before"
            continue
        yield _change(new.question, earlier[name], case, alike=alike, disturbed=disturbed)
    for name in earlier:
        if name not in later:
            yield name, f"is not there now: {new.skipped.get(name) or new.error or 'no such case'}"


def _change(question: str, old: Case, new: Case, *, alike: bool, disturbed: bool) -> Change | tuple[str, str]:
    if old.ratio is not None and new.ratio is not None:
        before, after, up = old.ratio, new.ratio, 1.0
        noises = [_ratio_std(old), _ratio_std(new)]
        by: Literal["ratio", "value"] = "ratio"
    elif not alike:
        return new.name, "has no ratio, and the machine is another"
    elif (old.unit, old.better) != (new.unit, new.better):
        return new.name, f"was in {old.unit!r}, {old.better} being better"
    else:
        before, after, up = old.value, new.value, 1.0 if new.better == "higher" else -1.0
        noises = [None if case.spread is None else case.spread.std for case in (old, new)]
        by = "value"
    middle = (abs(before) + abs(after)) / 2
    known = [noise for noise in noises if noise is not None]
    few = min(old.repetitions, new.repetitions) < ROUNDS
    return Change(
        question=question,
        case=new.name,
        by=by,
        unit="" if by == "ratio" else new.unit,
        before=before,
        after=after,
        change=up * (after - before) / middle if middle else 0.0,
        noise=math.hypot(*known) / middle if known and middle else None,
        loosely=few or len(known) < 2,
        disturbed=disturbed or old.disturbed or new.disturbed,
        informs=by == "value" and new.holds is None,
    )


def _ratio_std(case: Case) -> float | None:
    """Of rounds that were paired; else from what is known of the two sides by themselves."""
    if case.ratio_spread is not None:
        return case.ratio_spread.std
    sides = ((case.spread, case.value), (case.against_spread, case.against_value))
    shares = [spread.std / abs(value) for spread, value in sides if spread is not None and value]
    return abs(case.ratio or 0.0) * math.hypot(*shares) if shares else None


def same_machine(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether values measured on the two can be compared."""
    return all(one.get(name) == other.get(name) for name in _MACHINE)


def _differences(old: Report, new: Report) -> list[str]:
    """What else is not the same, as sentences."""
    told = []
    if not same_machine(old.machine, new.machine):
        told.append(f"another machine, so that ratios alone are compared: {_machine(old)} before")
    then, now = ({**report.versions, **_system(report)} for report in (old, new))
    for name in dict.fromkeys([*then, *now]):
        if then.get(name) != now.get(name):
            told.append(f"{name}: {then.get(name) or 'none'} before, {now.get(name) or 'none'} now")
    keys = dict.fromkeys([*old.config, *new.config])
    changed = [key for key in keys if old.config.get(key) != new.config.get(key)]
    if changed:
        told.append(f"{new.question}: other settings: {', '.join(changed)}")
    return told


def _system(report: Report) -> dict[str, Any]:
    return {name: report.machine.get(name) for name in ("kernel", "memory_bytes")}


def _machine(report: Report) -> str:
    return f"{report.machine.get('cpu')}, {report.machine.get('cores')} cores"
