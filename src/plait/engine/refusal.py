"""What is refused before anything starts, because it would only be found by workers, or be passed over."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from plait.cluster import Cluster
from plait.engine.diagnosis import cited
from plait.errors import PlaitError, UsageError
from plait.job import Job


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
            job.build_evaluation()
        except PlaitError as error:
            raise type(error)(
                f"job {job.name!r}: {error.what}", setting=error.setting, works=error.works
            ) from None
        except Exception as error:
            raise UsageError(
                f"job {job.name!r}: its evaluation data raised {cited(error)}",
                setting="evaluation.data",
                works="a function of (seed) that returns a data set",
            ) from error


def check_unchanged(resume: str | Path, **given: object) -> None:
    """Refuse what a run that goes on cannot change; None and False say nothing."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise UsageError(
                f"{name} for a run that goes on, which has its jobs, cluster and settings already",
                setting=name,
                works=f"plait.run(resume={str(resume)!r})",
            )
