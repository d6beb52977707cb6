"""What a user wants trained: jobs and sweeps, from Python or from a file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from plait.errors import FileError, UsageError
from plait.factory import load_file
from plait.job import LONGEST_NAME, Job, read_jobs
from plait.spill.selection import Selection

_SWEEP = "sweep"
_SUFFIX = 10
"""Characters that the names of a sweep's trials add to its job's."""
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
        items = list(given) if isinstance(given, Iterable) else [given]
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
        for sweep in sweeps.values():
            others = [item.job for item in sweeps.values() if item is not sweep]
            _check_apart(sweep.job.name, [job.name for job in (*jobs, *others)])
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


def _check_apart(sweep: str, others: Sequence[str]) -> None:
    """Refuse names by which a sweep and another job would write to the same files.

    A sweep of job ``j`` is the task ``j-sweep``, its trials are the jobs ``j-0``, ``j-1`` and so on, and its
    attempts are counted in the folder of ``j``.
    """
    if len(sweep) > LONGEST_NAME - _SUFFIX:
        raise UsageError(
            f"a sweep's job has a name of {len(sweep)} characters, and its trials longer ones",
            setting="jobs.name",
            works=f"at most {LONGEST_NAME - _SUFFIX} characters",
        )
    for name in others:
        if name == sweep:
            raise UsageError(
                f"a job and the job of a sweep are both named {name!r}, and would share its files",
                setting="jobs.name",
                works=f"another name for one of them: {_free(f'{name}-alone', others)}",
            )
        found = re.fullmatch(rf"{re.escape(sweep)}-(0|[1-9][0-9]*|{_SWEEP})", name)
        if found is not None:
            whose = "the sweep" if found[1] == _SWEEP else "a trial of the sweep"
            raise UsageError(
                f"job {name!r} has the name of {whose} of job {sweep!r}, which would overwrite it",
                setting="jobs.name",
                works=_free(f"{sweep}.{found[1]}", others),
            )


def _free(name: str, taken: Sequence[str]) -> str:
    while name in taken:
        name += "x"
    return name
