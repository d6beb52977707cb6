"""Trains a job plainly, in memory: the oracle of every strand, and under DDP the strategy "data".

It does what a job means (:mod:`plait.job`) with nothing clever in it, deterministically, so that another
way to train the same job can be compared with it bit by bit. Under the torchrun contract with more than
one worker, each rank takes its contiguous rows of the global batch and DistributedDataParallel averages
the gradients. A rank's loss is scaled by its weight, so that shares may be uneven: the sum over ranks is
the loss of the whole batch, to rounding. A rank with no rows runs rank 0's with a loss of zero.

What differs under DDP, as it always does: ranks draw their own dropout masks, and BatchNorm normalises
by each rank's own rows and keeps rank 0's statistics.

Run as a worker:  ``torchrun --nproc-per-node 2 -m plait.reference jobs.py --directory runs/first --resume``
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from plait import checkpoint
from plait.data import Batches, share
from plait.determinism import reproducible, seed_micro_batch
from plait.errors import UsageError
from plait.evaluation import Evaluated, Evaluator
from plait.job import Job
from plait.objective import Objective
from plait.progress import Progress, check_settings, read, unfit
from plait.progress import Result as Result
from plait.progress import Step as Step
from plait.world import World

CHECKPOINT = checkpoint.NAME
"""The name of the checkpoint in a directory."""
_ATTACHED = "attached"
"""Where in a checkpoint the state of what was attached is."""


@runtime_checkable
class Attached(Protocol):
    """What has a part in the gradients and remembers something from step to step; checkpoints hold it."""

    def state_dict(self, *, everyone: bool, to: int | None) -> Mapping[str, Any]:
        """What all ranks remember, on rank ``to``; all call it together."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from that, also where there were more ranks then, or fewer."""


@dataclass(kw_only=True)
class _Run:
    """A job that has been built, and how far it has come."""

    job: Job
    world: World
    model: nn.Module
    forward: nn.Module
    """The model, or DDP around it."""
    progress: Progress
    objective: Objective
    batches: Batches
    evaluator: Evaluator | None
    attached: Attached | None = None

    @property
    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


def train(
    job: Job,
    *,
    resume: str | Path | bool | None = None,
    directory: str | Path | None = None,
    overwrite: bool = False,
    save_every: int | None = None,
    stop_after: int | None = None,
    on_step: Callable[[Step], None] | None = None,
    should_stop: Callable[[int], bool] | None = None,
    attach: Callable[[nn.Module], object] | None = None,
    device: torch.device | str | None = None,
) -> Result:
    """Train a job plainly, whatever its strategy and memory say, and return its result.

    Args:
        resume: A checkpoint, or the directory that holds one, to go on from. True goes on from the one in
            ``directory``, and begins at step 0 where there is none yet: the same call survives restarts.
        directory: Where to write a checkpoint, every ``save_every`` steps and at the end. Workers on several
            hosts resume only from a directory that all of them see.
        overwrite: Replace a checkpoint in ``directory`` that the run does not go on from.
        stop_after: Stop once this many steps of the job are done.
        on_step: Called on every rank after each step.
        should_stop: Asked on every rank after each step, with the number of steps done, before a checkpoint
            is due: True saves one and ends the run there. All ranks must answer alike.
        attach: Called once with the model, wrapped in DDP where there is more than one worker. What it
            returns, if it is :class:`Attached`, is saved and restored with the rest.
        device: None takes this worker's GPU, or the CPU where there is none.
    """
    check_settings(save_every=save_every, stop_after=stop_after, directory=directory)
    with reproducible(job.threads), World.join(device) as world:
        origin = checkpoint.origin(resume=resume, directory=directory, overwrite=overwrite)
        run = _build(job, world)
        remembered = None if origin is None else _restore(run, origin)
        world.agree({"job": job.digest[:12], "step": len(run.progress.losses)})
        total = job.total_steps(run.batches.steps_per_epoch)
        file = None if directory is None else Path(directory) / CHECKPOINT
        started = time.perf_counter()
        with _data_parallel(run):
            if origin is not None:
                _settle(run)
            if attach is not None:  # after that, so that it takes no notice of a step that does not count
                _attach(run, attach, remembered)
            run.progress.advance(
                partial(_step, run),
                total=total,
                stop_after=stop_after,
                evaluate=partial(_evaluate, run),
                save=None if file is None else partial(_save, run, file),
                save_every=save_every,
                on_step=on_step,
                should_stop=should_stop,
            )
        world.take_from_first(run.model.buffers())
        return run.progress.result(
            run.model,
            run.progress.optimizer.state_dict(),
            total=total,
            seconds=time.perf_counter() - started,
        )


@contextmanager
def _data_parallel(run: _Run) -> Iterator[None]:
    """Wrap the model in DDP where there is more than one worker, and see to it that DDP goes first.

    A DDP module that outlives the process group ends it in its own destructor, which holds Python's lock
    while it waits for gloo's threads, which may wait for the lock. So none is left, not even in the
    frames of a traceback.
    """
    if run.world.size == 1:
        yield
        return
    ids = [run.world.device] if run.world.device.type == "cuda" else None
    run.forward = DistributedDataParallel(run.model, device_ids=ids)
    try:
        yield
    except BaseException as error:
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        raise
    finally:
        run.forward, run.attached = run.model, None


def _attach(run: _Run, attach: Callable[[nn.Module], object], remembered: Mapping[str, Any] | None) -> None:
    """Let something have a part in the gradients, and go on with what it remembered."""
    attached = attach(run.forward)
    if isinstance(attached, Attached):
        run.attached = attached
        if remembered is not None:
            attached.load_state_dict(remembered)


def _settle(run: _Run) -> None:
    """Have DDP lay out its buckets as it does after the first step of a run.

    It lays them out anew in the order in which the first step's gradients came, and where a number lies in
    a bucket decides, with three ranks or more, in which order gloo adds it up. A resumed run would sum its
    first step otherwise than a run that went through, so it makes a step's gradients that count for nothing.
    """
    done = len(run.progress.losses)
    if run.world.size < 3 or done == 0:
        return
    before = [buffer.clone() for buffer in run.model.buffers()]
    _gradients(run, done - 1)
    run.progress.optimizer.zero_grad(set_to_none=True)
    for buffer, value in zip(run.model.buffers(), before, strict=True):
        buffer.copy_(value)


def _build(job: Job, world: World) -> _Run:
    batches = job.build_batches()
    model = job.build_model(world.device)
    optimizer = job.build_optimizer(model.named_parameters())
    return _Run(
        job=job,
        world=world,
        model=model,
        forward=model,
        progress=Progress(job=job, optimizer=optimizer, schedule=job.build_schedule(optimizer)),
        objective=job.build_objective(),
        batches=batches,
        evaluator=None if job.evaluation is None else Evaluator(job),
    )


def _step(run: _Run, step: int) -> Step:
    """One training step: gradients, and what every step ends with."""
    started_s = time.perf_counter()
    loss, weight = _gradients(run, step)
    return run.progress.finish(
        loss,
        clip=lambda most: nn.utils.clip_grad_norm_(run.trained, most),
        started_s=started_s,
        weight=weight,
    )


def _gradients(run: _Run, step: int) -> tuple[float, float]:
    """Leave the gradients of the step's loss in the parameters, and return the loss and its weight."""
    world, objective = run.world, run.objective
    micro_batches = _micro_batches(run, step)
    (total,) = world.sum([sum(weight for _, weight in micro_batches)])
    if total == 0:  # nothing counts, on any rank: the mean is undefined
        return math.nan, total
    loss = 0.0
    for number, (batch, weight) in enumerate(micro_batches):
        seed_micro_batch(run.job.seed, step, number, rank=world.rank)
        args, kwargs = objective.model_inputs(batch)
        ddp = run.forward if isinstance(run.forward, DistributedDataParallel) else None
        final = number == len(micro_batches) - 1
        with nullcontext() if ddp is None or final else ddp.no_sync():
            with objective.autocast(world.device.type):
                # The output is not given a name: what it holds beside the loss would stay through backward.
                part, value = objective.share(
                    objective.call(run.forward, args, kwargs),
                    batch,
                    weight=weight,
                    total=total,
                    world=world.size,
                )
            part.backward()  # type: ignore[no-untyped-call]
        loss += value
    if world.size > 1:
        _check_all_used(run.model)
    (loss,) = world.sum([loss])
    return loss, total


def _micro_batches(run: _Run, step: int) -> list[tuple[Any, float]]:
    """This rank's rows of the step, cut into batches, each with its weight.

    The weight of the whole step must be known before the first backward pass, so all are fetched at once.
    """
    rows, world = run.batches.indices(step), run.world
    mine = share(len(rows), world.rank, world.size)
    spare = len(mine) == 0  # more ranks than rows: do as rank 0, and count for nothing
    if spare:
        mine = share(len(rows), 0, world.size)
    parts = min(run.job.accumulate, len(mine))
    cuts = [[rows[mine[i]] for i in share(len(mine), part, parts)] for part in range(parts)]
    batches = [run.batches.fetch(cut, device=world.device) for cut in cuts]
    return [(batch, 0.0 if spare else run.objective.weigh(batch)) for batch in batches]


def _check_all_used(model: nn.Module) -> None:
    """DDP does not reduce the bucket of a parameter that got no gradient, and only says so a step later."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            raise UsageError(
                f"parameter {name} took no part in the loss, which data parallelism does not allow",
                setting="model",
                works=f"requires_grad_(False) on {name}, or a model without it",
            )


def _evaluate(run: _Run, done: int) -> Evaluated:
    """The loss and the metrics over all of the evaluation data; each rank takes its contiguous rows."""
    assert run.evaluator is not None
    run.world.take_from_first(run.model.buffers())  # as DDP does before a step's first forward pass
    run.model.eval()
    try:
        mine = share(run.evaluator.rows, run.world.rank, run.world.size)
        sums = run.evaluator.tally(run.model, mine, device=run.world.device)
    finally:
        run.model.train()
    return run.evaluator.result(done, run.world.sum(sums))


def _save(run: _Run, file: Path) -> None:
    remembered = None if run.attached is None else run.attached.state_dict(everyone=True, to=0)
    if run.world.rank != 0:
        return
    progress = run.progress
    state = progress.state(run.model.state_dict(), progress.optimizer.state_dict())
    checkpoint.save(file, state if remembered is None else {**state, _ATTACHED: remembered})


def _restore(run: _Run, file: Path) -> Mapping[str, Any] | None:
    """Go on from a checkpoint; what was attached then, if anything, has its state returned."""
    state = read(run.job, file, device=run.world.device)
    try:
        run.model.load_state_dict(state["model"])
        run.progress.optimizer.load_state_dict(state["optimizer"])
        run.progress.restore(state)
    except (RuntimeError, ValueError, KeyError) as error:
        raise unfit(file, error) from error
    remembered: Mapping[str, Any] | None = state.get(_ATTACHED)
    return remembered


if __name__ == "__main__":
    from plait.reference_worker import main

    raise SystemExit(main())
