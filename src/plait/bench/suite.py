"""The answers to several questions from one run, format ``plait.bench.report/1``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plait.bench import report as single
from plait.bench.report import Report
from plait.document import fields_of, read_json
from plait.errors import FileError

FORMAT = "plait.bench.report/1"
FILE = "report.json"
"""Its name in a folder."""
_HEADER = ("quick", "seed", "date", "machine", "versions", "minutes", "finished")


@dataclass(frozen=True, kw_only=True)
class Suite:
    """All that one run of several questions found, and what it did not ask."""

    quick: bool
    seed: int
    date: str
    """When the run began, ISO 8601, UTC."""
    machine: Mapping[str, Any]
    versions: Mapping[str, str | None]
    minutes: float | None = None
    """The time it was given; None is as long as it takes."""
    finished: bool = False
    """Whether the run came to its end; until then a report says what it has."""
    reports: tuple[Report, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    """How long each question took, the start of its process included; of one not asked, in a run before."""
    not_asked: Mapping[str, str] = field(default_factory=dict)
    """Questions, and why they were not asked."""

    @property
    def holds(self) -> bool:
        """Whether every question that was asked came to its end, and no case falls short."""
        return all(report.holds for report in self.reports)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "format": FORMAT,
            "quick": self.quick,
            "seed": self.seed,
            "date": self.date,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "minutes": self.minutes,
            "finished": self.finished,
            "holds": self.holds,
            "seconds": dict(self.seconds),
            "not_asked": dict(self.not_asked),
            "reports": [report.to_json() for report in self.reports],
        }

    @classmethod
    def from_json(cls, data: Any, *, source: str = "report") -> Suite:
        """From plain data: of a suite, of one question's report, or of a list of those."""
        if isinstance(data, list) or (isinstance(data, Mapping) and data.get("format") == single.FORMAT):
            return _of_reports(data if isinstance(data, list) else [data], source)
        fields = fields_of(data, format=FORMAT, source=source)
        try:
            return cls(
                **{name: fields[name] for name in _HEADER},
                seconds={str(name): float(value) for name, value in fields["seconds"].items()},
                not_asked=dict(fields["not_asked"]),
                reports=tuple(Report.from_json(one, source=source) for one in fields["reports"]),
            )
        except KeyError as missing:
            name = str(missing.args[0])
            raise FileError(
                f"{source}: {name} is missing", setting=name, works=f"a file of {FORMAT}"
            ) from None
        except (TypeError, ValueError, AttributeError) as wrong:
            if isinstance(wrong, FileError):
                raise
            raise FileError(f"{source}: {wrong}", setting="format", works=f"a file of {FORMAT}") from None

    @classmethod
    def load(cls, path: str | Path, *, setting: str = "path") -> Suite:
        """From a file, or from the ``report.json`` of a folder; errors name the setting."""
        file = Path(path) / FILE if Path(path).is_dir() else Path(path)
        works = "the report.json of an earlier plait bench, or its folder"
        data = read_json(file, works=works, setting=setting)
        return cls.from_json(data, source=str(file))


def _of_reports(data: list[Any], source: str) -> Suite:
    """Single reports, as ``plait bench QUESTION --out`` writes them."""
    reports = tuple(Report.from_json(one, source=source) for one in data)
    if not reports:
        raise FileError(f"{source}: there is no report in it", setting="format", works=f"a file of {FORMAT}")
    first = reports[0]
    return Suite(
        quick=first.quick,
        seed=int(first.config.get("seed", 0)),
        date=first.date,
        machine=first.machine,
        versions=first.versions,
        finished=True,
        reports=reports,
        seconds={one.question: one.activity["seconds"] for one in reports if "seconds" in one.activity},
    )
