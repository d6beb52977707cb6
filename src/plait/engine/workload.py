"""What a user wants trained: jobs and sweeps, from Python or from a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from plait.errors import FileError, UsageError
from plait.factory import load_file
from plait.job import Job, read_jobs
from plait.spill.selection import Selection

_SWEEP = "sweep"
being_read: ContextVar[Path | None] = ContextVar("being_read", default=None)
"""The jobs file that this process is reading; a run that it starts meanwhile is not the one asked for."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a user wants trained."""

    jobs: tuple[Job, ...]
    sweeps: Mapping[str, Selection]

    @classmethod
    def of(cls, given: Job | Selection | Iterable[Job | Selection]) -> Workload:
        """Jobs and sweeps, told apart; names are used once."""
        items = [given] if isinstance(given, (Job, Selection)) else list(given)
        jobs = tuple(item for item in items if isinstance(item, Job))
        sweeps = {f"{item.job.name}-{_SWEEP}": item for item in items if isinstance(item, Selection)}
        for item in items:
            if not isinstance(item, (Job, Selection)):
                raise UsageError(
                    f"{item!r} is neither a job nor a sweep",
                    setting="jobs",
                    works="plait.Job(...) or plait.spill.Selection(...), or a list of them",
                )
        names = [*(job.name for job in jobs), *sweeps]
        if not names:
            raise UsageError("there are no jobs to run", setting="jobs", works="at least one")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None or len(names) < len(items):
            name = twice or next(iter(sweeps))
            raise UsageError(f"two jobs are named {name!r}", setting="jobs.name", works=f"{name}-2")
        return cls(jobs=jobs, sweeps=sweeps)

    @classmethod
    def read(cls, file: Path) -> Workload:
        """That of a jobs file: a .json that holds one job, or a .py whose ``jobs`` may hold sweeps, too."""
        if file.suffix != ".py" or not file.is_file():
            return cls.of(read_jobs(file))
        before = being_read.set(file)
        try:
            module = load_file(file)
        finally:
            being_read.reset(before)
        found = getattr(module, "jobs", None) or getattr(module, "job", None)
        if found is None:
            raise FileError(
                f"{file} defines neither jobs nor a job", setting="path", works="jobs = [Job(...)]"
            )
        return cls.of(found)
