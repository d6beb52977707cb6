"""How far a job has come, for every way to train it: the steps, how each ends, and what a checkpoint holds.

A strand finds gradients in its own way. What follows is the same for all: the gradients are clipped, a step
that is not finite is refused or left out, the optimizer and the schedule step; now and then the model is
evaluated and the state saved. So it is here once, and checkpoints of all strands are alike.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait import checkpoint
from plait.doing import say
from plait.errors import FileError, NonfiniteError, UsageError
from plait.evaluation import Evaluated
from plait.job import Job


@dataclass(frozen=True, kw_only=True)
class Step:
    """What came of one step."""

    step: int
    """Counted from 0 over the whole job."""
    loss: float
    norm: float | None
    """Global norm of the gradients before clipping, where the job clips."""
    skipped: bool
    """Not finite, and so not applied."""
    learning_rate: float
    """Of the first parameter group."""
    seconds: float
    wire_bytes: int | None = None
    """What this rank handed to the wire for it, where the way to train counts that."""
    evaluated: Evaluated | None = None
    """How the model did on other data after it, where that was due."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A trained model and how it got there; the histories go back to the first step, also after a resume."""

    model: nn.Module
    optimizer: dict[str, Any]
    """The optimizer's ``state_dict``."""
    losses: tuple[float, ...]
    """One for each step."""
    evaluations: tuple[Evaluated, ...]
    skipped: tuple[int, ...]
    """The steps that were not finite, where the job skips them."""
    steps: int
    """How many steps were done."""
    finished: bool
    """Whether these were all steps of the job."""
    seconds: float
    """Of this call, without building the job."""


@dataclass(kw_only=True)
class Progress:
    """A job's optimizer and schedule, and what has come of its steps so far."""

    job: Job
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler | None
    losses: list[float] = field(default_factory=list)
    evaluations: list[Evaluated] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)

    # --- steps --------------------------------------------------------------------------------------

    def advance(
        self,
        take: Callable[[int], Step],
        *,
        total: int,
        stop_after: int | None,
        evaluate: Callable[[int], Evaluated],
        save: Callable[[], object] | None,
        save_every: int | None,
        on_step: Callable[[Step], object] | None,
        should_stop: Callable[[int], bool] | None = None,
    ) -> None:
        """Take the steps that are left of ``total``, or until ``stop_after`` of them are done.

        ``take(step)`` trains one and ends it with :meth:`finish`; ``evaluate(done)`` and ``save()`` are
        called when they are due, before ``on_step``. ``should_stop(done)`` is asked after each step, and
        answers alike on all ranks: where it says so, the state is saved and no further step begins.
        """
        last = total if stop_after is None else min(total, stop_after)
        judged = self.job.evaluation
        say(f"taking step {len(self.losses) + 1}")
        for step in range(len(self.losses), last):
            report = take(step)
            stops = should_stop is not None and should_stop(step + 1)
            if judged is not None and _due(step + 1, judged.every, total):
                self.evaluations.append(evaluate(step + 1))
                report = replace(report, evaluated=self.evaluations[-1])
            if save is not None and (stops or _due(step + 1, save_every, last)):
                save()
            if on_step is not None:
                on_step(report)
            if stops:
                return

    def finish(
        self,
        loss: float,
        *,
        clip: Callable[[float], float | torch.Tensor],
        started_s: float,
        weight: float | None = None,
    ) -> Step:
        """End the next step, whose gradients are in the parameters: clip them, then refuse or apply them.

        ``clip(norm)`` scales all gradients down to this global norm and returns what it was; ``started_s`` is
        when the step began, by ``time.perf_counter()``; ``weight`` is the loss's, for the error's message.
        """
        job, step, rate = self.job, len(self.losses), self.optimizer.param_groups[0]["lr"]
        norm = None
        if job.clip_norm is not None and math.isfinite(loss):
            norm = float(clip(job.clip_norm))
        finite = math.isfinite(loss) and (norm is None or math.isfinite(norm))
        if not finite and job.nonfinite == "stop":
            over = "" if weight is None else f" over a weight of {weight:g}"
            lost = f"a loss of {loss}{over}" if norm is None else f"gradients of norm {norm}"
            raise NonfiniteError(
                f"job {job.name!r} has {lost} at step {step}",
                setting="nonfinite",
                works="'skip' to leave such steps out, or a lower learning rate",
            )
        if finite:
            self.optimizer.step()
        else:
            self.skipped.append(step)
        self.optimizer.zero_grad(set_to_none=True)
        if self.schedule is not None:
            with warnings.catch_warnings():
                if self.skipped:  # torch warns of a schedule that moves before the optimizer's first step
                    warnings.simplefilter("ignore", UserWarning)
                self.schedule.step()
        self.losses.append(loss)
        return Step(
            step=step,
            loss=loss,
            norm=norm,
            skipped=not finite,
            learning_rate=float(rate),
            seconds=time.perf_counter() - started_s,
        )

    def result(self, model: nn.Module, optimizer: dict[str, Any], *, total: int, seconds: float) -> Result:
        """What has come of the job, with its model and the optimizer's state."""
        return Result(
            model=model,
            optimizer=optimizer,
            losses=tuple(self.losses),
            evaluations=tuple(self.evaluations),
            skipped=tuple(self.skipped),
            steps=len(self.losses),
            finished=len(self.losses) == total,
            seconds=seconds,
        )

    # --- checkpoints --------------------------------------------------------------------------------

    def state(self, model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> dict[str, Any]:
        """What a checkpoint holds, with the states of the whole model and the whole optimizer."""
        return {
            "job": self.job.to_json(),
            "model": model,
            "optimizer": optimizer,
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "losses": self.losses,
            "evaluations": [asdict(evaluated) for evaluated in self.evaluations],
            "skipped": self.skipped,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, model and optimizer aside."""
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        self.losses = list(state["losses"])
        self.evaluations = [Evaluated(**evaluated) for evaluated in state["evaluations"]]
        self.skipped = list(state["skipped"])


def check_settings(*, save_every: int | None, stop_after: int | None, directory: str | Path | None) -> None:
    """Refuse what cannot be meant, before anything is built."""
    for name, value in (("save_every", save_every), ("stop_after", stop_after)):
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}", setting=name, works="1 or more")
    if save_every is not None and directory is None:
        raise UsageError("save_every has no directory to save in", setting="directory", works="runs/first")


def read(job: Job, file: Path, *, device: torch.device | str) -> dict[str, Any]:
    """The state in a checkpoint of this job, its tensors on a device."""
    say("reading the checkpoint")
    state = checkpoint.load(file, device=device)
    lacking = [name for name in ("job", "model", "optimizer", "losses") if name not in state]
    if lacking:
        raise FileError(
            f"checkpoint {file} has no {lacking[0]}: it is not one of a job",
            setting="resume",
            works="a checkpoint that train() wrote",
        )
    other = job.differs(state["job"])
    if other is not None:
        name, then, now = other
        raise FileError(
            f"checkpoint {file} is of another job: its {name} is {then!r}, and this job's is {now!r}",
            setting=name,
            works=repr(then),
        )
    say(f"restoring the checkpoint at step {len(state['losses'])}")
    return state


def unfit(file: Path | None, error: Exception) -> FileError:
    """The error that a checkpoint's model or optimizer is not what the job builds now."""
    reason = " ".join(str(error).split())[:300]
    return FileError(
        f"checkpoint {file} does not fit what the job builds now: {reason}",
        setting="resume",
        works="the code that it was written with",
    )


def _due(done: int, every: int | None, last: int) -> bool:
    return done == last or (every is not None and done % every == 0)
