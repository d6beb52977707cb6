"""What is refused before anything starts, because it would only be found by workers, or be passed over."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from plait.cluster import Cluster
from plait.engine.course import Limits
from plait.engine.diagnosis import cited
from plait.engine.rehearsal import rehearse
from plait.errors import PlaitError, UsageError
from plait.job import Job
from plait.units import parse_whole


def check_cores(cluster: Cluster) -> None:
    """Refuse devices of this machine on cores that a process here may not use."""
    if not hasattr(os, "sched_getaffinity"):  # where there is none, workers are not pinned either
        return
    usable = sorted(os.sched_getaffinity(0))
    for device in cluster.devices:
        for core in device.cores:
            if core not in usable:
                raise UsageError(
                    f"device {device.name} is on core {core}, and this process may use cores "
                    f"{', '.join(map(str, usable))}",
                    setting="cluster, devices.cores",
                    works=f"cores = [{usable[0]}], or none to use any",
                )


def check_evaluations(jobs: Iterable[Job]) -> None:
    """Refuse evaluation data that cannot be made, or has no rows: the first to ask would be a worker."""
    for job in jobs:
        if job.evaluation is None:
            continue
        try:
            with _named(job):
                job.build_evaluation()
        except PlaitError:
            raise
        except Exception as error:
            raise UsageError(
                f"job {job.name!r}: its evaluation data raised {cited(error)}",
                setting="evaluation.data",
                works="a function of (seed) that returns a data set",
            ) from error


def check_functions(job: Job, searched: Collection[str] = ()) -> None:
    """Refuse functions that cannot be imported or called as they will be, and a schedule that cannot be made.

    What a loss or a metric makes of a model's output only a model can tell, so they are not called. Fields
    that are ``searched`` over are the trials' own.
    """
    with _named(job):
        if not {"loss", "weight", "inputs"}.intersection(searched):
            job.build_objective()
        if job.evaluation is not None and "evaluation" not in searched:
            for name in job.evaluation.metrics:
                job.evaluation.metric(name)
        if not {"model", "optimizer", "schedule"}.intersection(searched):
            rehearse(job, whole="steps" not in searched)


@contextmanager
def _named(job: Job) -> Iterator[None]:
    """Say which job an error is about."""
    try:
        yield
    except PlaitError as error:
        name = f"job {job.name!r}: "
        if error.what.startswith(name):
            raise
        raise type(error)(f"{name}{error.what}", setting=error.setting, works=error.works) from None


def check_unchanged(resume: str | Path, **given: object) -> None:
    """Refuse what a run that goes on cannot change; None and False say nothing."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise UsageError(
                f"{name} for a run that goes on, which has its jobs, cluster and settings already",
                setting=name,
                works=f"plait.run(resume={str(resume)!r})",
            )


def check_kinds(**given: object) -> None:
    """Refuse arguments of `plait.run` of a type that nothing can be made of."""
    kinds: dict[str, tuple[tuple[type, ...], str]] = {
        "cluster": ((Cluster,), 'Cluster.load("cluster.toml")'),
        "limits": ((Limits,), "Limits(restarts=3)"),
        "max_slowdown": ((int, float), "1.05"),
        "directory": ((str, Path), '"runs/first"'),
        "profiles": ((str, Path), '"runs/profiles"'),
        "sinks": ((list, tuple), '("tensorboard",)'),
    }
    if (devices := given.pop("devices", None)) is not None:
        parse_whole(devices, setting="devices")
    for name, value in given.items():
        types, works = kinds[name]
        if value is None and name not in ("sinks", "max_slowdown"):
            continue
        if not isinstance(value, types) or isinstance(value, bool) or value == "":
            raise UsageError(f"{name} is {value!r:.60}", setting=name, works=works)
