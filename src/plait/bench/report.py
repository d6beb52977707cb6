"""The result of a benchmark, format ``plait.bench/1``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.bench.case import Case
from plait.errors import FileError

FORMAT = "plait.bench/1"


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that a run of one question found, and on what."""

    question: str
    title: str
    quick: bool
    date: str
    """When the run began, ISO 8601, UTC."""
    machine: Mapping[str, Any]
    versions: Mapping[str, str | None]
    activity: Mapping[str, Any]
    """Load averages before and after; steal and other processes' share of processor time; disturbed."""
    config: Mapping[str, Any]
    cases: tuple[Case, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Cases that this machine could not run, and why."""
    error: str | None = None
    """What ended the run before its end."""

    @property
    def holds(self) -> bool:
        """Whether the run came to its end and no case falls short."""
        return self.error is None and all(case.holds is not False for case in self.cases)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "format": FORMAT,
            "question": self.question,
            "title": self.title,
            "quick": self.quick,
            "date": self.date,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "activity": dict(self.activity),
            "config": dict(self.config),
            "cases": [case.to_json() for case in self.cases],
            "skipped": dict(self.skipped),
            "error": self.error,
            "holds": self.holds,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, source: str = "report") -> Report:
        """From plain data; ``source`` names it in errors."""
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
            raise FileError(f"{source}: the format is {found!r}", setting="format", works=FORMAT)
        names = ("question", "title", "quick", "date", "machine", "versions", "activity", "config")
        try:
            return cls(
                **{name: data[name] for name in names},
                cases=tuple(Case.from_json(case) for case in data["cases"]),
                skipped=data["skipped"],
                error=data["error"],
            )
        except KeyError as missing:
            name = str(missing.args[0])
            raise FileError(
                f"{source}: {name} is missing", setting=name, works=f"a file of {FORMAT}"
            ) from None
        except TypeError as wrong:
            raise FileError(
                f"{source}: cases: {wrong}", setting="cases", works=f"a file of {FORMAT}"
            ) from None
