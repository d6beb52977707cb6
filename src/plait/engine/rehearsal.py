"""A job's optimizer and schedule, made before anything starts: the first to make them would be workers.

They are made for one small parameter. What that raises is only told if it is raised again over the job's own
parameters, by their names and shapes: an optimizer may form its groups by these. The parameters have no
memory, so the model may be larger than there is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from plait.engine.diagnosis import OPTIMIZERS, blamed
from plait.errors import PlaitError, UsageError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler

    from plait.factory import Factory
    from plait.job import Job

_WORKS = {"optimizer": OPTIMIZERS, "schedule": "arguments that it takes, such as T_max=100"}


@dataclass(frozen=True)
class _Fault:
    part: str
    error: Exception

    def is_like(self, other: _Fault) -> bool:
        return self.part == other.part and type(self.error) is type(other.error)


def rehearse(job: Job, *, whole: bool = True) -> None:
    """Refuse an optimizer or a schedule that cannot be made, or that ends before a ``whole`` job does."""
    import torch
    from torch import nn

    made = _made(job, [("weight", nn.Parameter(torch.zeros(2, 2)))])
    if not isinstance(made, _Fault):
        if whole and made is not None:
            _check_length(job, made)
        return
    found = _of_its_own(job)
    if found is not None and found.is_like(made):
        if isinstance(found.error, PlaitError):
            raise found.error
        raise blamed(job, found.part, _WORKS[found.part], found.error) from found.error


def _made(job: Job, parameters: Iterable[tuple[str, nn.Parameter]]) -> LRScheduler | _Fault | None:
    """The schedule of an optimizer of these, or which of the two cannot be made."""
    part = "optimizer"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whoever trains with them is warned
            optimizer = job.build_optimizer(parameters)
            part = "schedule"
            return job.build_schedule(optimizer)
    except Exception as error:
        return _Fault(part, error)


def _of_its_own(job: Job) -> _Fault | None:
    """What goes wrong over a job's own parameters; None also where that cannot be told."""
    import torch

    from plait.compat import fake_parameters
    from plait.deferred import construct

    try:
        model = construct(job.make_model, seed=job.seed)
        with fake_parameters(model, torch.device("cpu")):
            made = _made(job, model.named_parameters())
    except Exception:
        return None
    return made if isinstance(made, _Fault) else None


def _check_length(job: Job, schedule: LRScheduler) -> None:
    from torch.optim.lr_scheduler import OneCycleLR

    # By some strategies a schedule moves once less than a job has steps: one that lacks a single step may do.
    if isinstance(schedule, OneCycleLR) and job.steps is not None and job.steps > schedule.total_steps + 1:
        raise UsageError(
            f"its schedule {cast('Factory', job.schedule).target} ends after {schedule.total_steps} steps, "
            f"and the job has {job.steps}",
            setting="schedule, steps",
            works=f"total_steps={job.steps}",
        )
