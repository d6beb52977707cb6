"""What the FILE of a command holds: a profile, or jobs whose profiles are measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from plait.errors import UsageError

if TYPE_CHECKING:
    from plait.job import Job
    from plait.profile import Profile
    from plait.strategy import Demand


def profile_in(file: Path) -> Profile | None:
    """The profile in a file that is one; None for a jobs file."""
    from plait.profile import FORMAT, Profile

    if file.suffix == ".py":
        return None
    if file.suffix == ".toml":
        raise UsageError(
            f"{file} is a cluster, if anything, and no job", setting="FILE", works=f"JOBS --cluster {file}"
        )
    if file.suffix != ".json" or not file.is_file():
        return Profile.load(file)  # says what is wrong
    try:
        head = json.loads(file.read_text())
    except (ValueError, RecursionError, OSError):
        return Profile.load(file)
    is_job = isinstance(head, dict) and str(head.get("format", FORMAT)).startswith("plait.job/")
    return None if is_job else Profile.load(file)


def kind_of(file: Path) -> str | None:
    """The kind of device that a file's profile was measured on, if it is one that says so."""
    profile = profile_in(file)
    return profile.device if profile is not None and profile.device in ("cpu", "cuda") else None


def jobs_in(file: Path, name: str | None, batch: int | None) -> list[Job]:
    """The jobs of a file, or the one of that name; with another batch where one is given."""
    from dataclasses import replace

    from plait.job import read_job, read_jobs

    jobs = read_jobs(file) if name is None else [read_job(file, name)]
    return jobs if batch is None else [replace(job, batch=batch) for job in jobs]


def several(file: Path) -> bool:
    """Whether a file holds several jobs."""
    return profile_in(file) is None and len(jobs_in(file, None, None)) > 1


def demand_of(
    file: Path,
    *,
    job: str | None,
    batch: int | None,
    optimizer: str | None,
    devices: int,
    cache: Path | None = None,
) -> Demand:
    """What planning needs of the one job of a file; a job that was not measured on this machine is now."""
    from plait.strategy import Demand

    profile = profile_in(file)
    if profile is None:
        from plait.cli.console import status
        from plait.engine.diagnosis import explaining
        from plait.strategy.measuring import profile_of, steps_of

        jobs = jobs_in(file, job, batch)
        if len(jobs) > 1:
            names = ", ".join(one.name for one in jobs)
            raise UsageError(f"{file} has {len(jobs)} jobs", setting="--job", works=f"one of {names}")
        with explaining(jobs), status(f"looking for a profile of {jobs[0].name}") as say:
            measured = profile_of(jobs[0], devices=devices, directory=cache, progress=say)
            steps = steps_of(jobs[0])
        return Demand.of(jobs[0], measured, steps=steps).assuming(optimizer)
    if job is not None:
        raise UsageError(f"{file} is a profile, with no jobs", setting="--job", works="a jobs file")
    made = Demand(name=profile.model or "job", profile=profile, batch=32 if batch is None else batch)
    return made.assuming(optimizer)
