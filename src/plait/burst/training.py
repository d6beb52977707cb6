"""Trains a job under a plan: what a job means (:mod:`plait.job`), with every block as wide as it pays.

Losses, weights and the optimizer's state are those of :mod:`plait.reference`, to rounding, and checkpoints
are the same: a run can go on from a plain one, under another plan, or plainly again. Every rank fetches the
whole batch of a step; evaluation runs on rank 0, which holds the whole model.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from plait import checkpoint, deferred
from plait.burst.burst_plan import BurstPlan
from plait.burst.runtime import BatchNorm, BurstParallel
from plait.chain import Chain
from plait.collective import Collective
from plait.determinism import reproducible, seed_micro_batch
from plait.errors import FileError, NonfiniteError, PlaitError, UsageError
from plait.evaluation import Evaluated, Evaluator
from plait.job import Job
from plait.reference import Result, Step
from plait.timeline import Timeline
from plait.world import World


@dataclass(kw_only=True)
class _Run:
    """A job that has been built, and how far it has come."""

    job: Job
    world: World
    parallel: BurstParallel
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler | None
    evaluator: Evaluator | None
    losses: list[float] = field(default_factory=list)
    evaluations: list[Evaluated] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)


def train(
    job: Job,
    plan: BurstPlan,
    *,
    resume: str | Path | bool | None = None,
    directory: str | Path | None = None,
    overwrite: bool = False,
    save_every: int | None = None,
    stop_after: int | None = None,
    on_step: Callable[[Step], None] | None = None,
    collective: Collective | None = None,
    batch_norm: BatchNorm = "local",
    timeline: Timeline | None = None,
    timeout_s: float = 30.0,
    device: torch.device | str | None = None,
) -> Result:
    """Train a job under a plan, in every process of the torchrun contract; the plan is for the job's chain.

    The first arguments are those of :func:`plait.reference.train`, the others those of
    :class:`plait.burst.BurstParallel`. Rank 0 alone reads and writes checkpoints. On the other ranks the
    result's model is in part on the meta device, and the optimizer's state is that of the blocks which the
    rank runs.
    """
    for name, value in (("save_every", save_every), ("stop_after", stop_after)):
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}", setting=name, works="1 or more")
    if save_every is not None and directory is None:
        raise UsageError("save_every has no directory to save in", setting="directory", works="runs/first")
    if plan.batch != job.batch:
        raise UsageError(
            f"the plan is for a batch of {plan.batch} rows, and the job's has {job.batch}",
            setting="plan",
            works=f"plan(..., batch={job.batch})",
        )
    with reproducible(job.threads), World.join(device) as world:
        origin = checkpoint.origin(resume=resume, directory=directory, overwrite=overwrite)
        world.agree({"job": job.digest[:12]})
        model = deferred.construct(job.make_model, seed=job.seed)
        chain = Chain.of_job(job, model=(model.double() if job.precision == "fp64" else model).train())
        objective = job.build_objective()
        parallel = BurstParallel(
            chain,
            plan,
            loss=objective.loss,
            weight=objective.weight,
            inputs=objective.inputs,
            bf16=objective.bf16,
            collective=collective,
            batch_norm=batch_norm,
            seed=job.seed,
            device=world.device,
            timeline=timeline,
            timeout_s=timeout_s,
        )
        try:
            with parallel.telling("in training"):
                run = _build(job, world, parallel)
                if parallel.tell(origin is not None):
                    _restore(run, origin)
                file = None if directory is None else Path(directory) / checkpoint.NAME
                return _train(run, file, save_every, stop_after, on_step)
        finally:
            parallel.close()


def _build(job: Job, world: World, parallel: BurstParallel) -> _Run:
    named = list(parallel.named_parameters())
    optimizer = job.build_optimizer(named)
    parallel.align(optimizer)
    return _Run(
        job=job,
        world=world,
        parallel=parallel,
        optimizer=optimizer,
        schedule=job.build_schedule(optimizer),
        evaluator=None if job.evaluation is None or world.rank else Evaluator(job),
    )


def _train(
    run: _Run,
    file: Path | None,
    save_every: int | None,
    stop_after: int | None,
    on_step: Callable[[Step], None] | None,
) -> Result:
    job, batches = run.job, run.job.build_batches()
    total = job.total_steps(batches.steps_per_epoch)
    last = total if stop_after is None else min(total, stop_after)
    started = time.perf_counter()
    for step in range(len(run.losses), last):
        report = _step(run, step, batches.fetch(batches.indices(step), device=run.world.device))
        if job.evaluation is not None and _due(step + 1, job.evaluation.every, total):
            run.evaluations.append(_evaluate(run, step + 1))
        if file is not None and _due(step + 1, save_every, last):
            _save(run, file)
        if on_step is not None:
            on_step(report)
    run.parallel.tell(None)  # when one rank returns, the last checkpoint is there
    return Result(
        model=run.parallel.chain.model,
        optimizer=run.optimizer.state_dict(),
        losses=tuple(run.losses),
        evaluations=tuple(run.evaluations),
        skipped=tuple(run.skipped),
        steps=len(run.losses),
        finished=len(run.losses) == total,
        seconds=time.perf_counter() - started,
    )


def _due(done: int, every: int | None, last: int) -> bool:
    return done == last or (every is not None and done % every == 0)


def _step(run: _Run, step: int, batch: Any) -> Step:
    """One training step: gradients, clipping, update, schedule."""
    started = time.perf_counter()
    job, rate = run.job, run.optimizer.param_groups[0]["lr"]
    loss = run.parallel.step(
        batch,
        micro_batches=job.accumulate,
        before_each=lambda number: seed_micro_batch(job.seed, step, number, rank=run.world.rank),
    )
    norm = None
    if job.clip_norm is not None and math.isfinite(loss):
        norm = float(run.parallel.clip_grad_norm_(job.clip_norm))
    finite = math.isfinite(loss) and (norm is None or math.isfinite(norm))
    if not finite and job.nonfinite == "stop":
        lost = f"a loss of {loss}" if norm is None else f"gradients of norm {norm}"
        raise NonfiniteError(
            f"job {job.name!r} has {lost} at step {step}",
            setting="nonfinite",
            works="'skip' to leave such steps out, or a lower learning rate",
        )
    if finite:
        run.optimizer.step()
    else:
        run.skipped.append(step)
    run.optimizer.zero_grad(set_to_none=True)
    if run.schedule is not None:
        with warnings.catch_warnings():
            if run.skipped:  # torch warns of a schedule that moves before the optimizer's first step
                warnings.simplefilter("ignore", UserWarning)
            run.schedule.step()
    run.losses.append(loss)
    seconds = time.perf_counter() - started
    return Step(
        step=step, loss=loss, norm=norm, skipped=not finite, learning_rate=float(rate), seconds=seconds
    )


def _evaluate(run: _Run, done: int) -> Evaluated:
    """The loss and the metrics over all of the evaluation data, found by rank 0 and known to all."""
    chain, found = run.parallel.chain, None
    if run.evaluator is not None:
        chain.eval()
        try:
            sums = run.evaluator.tally(chain.model, range(run.evaluator.rows), device=run.world.device)
        finally:
            chain.train()
        found = asdict(run.evaluator.result(done, sums))
    return Evaluated(**run.parallel.tell(found))


def _save(run: _Run, file: Path) -> None:
    if run.world.rank != 0:
        return
    state = {
        "job": run.job.to_json(),
        "model": run.parallel.state_dict(),
        "optimizer": run.parallel.optimizer_state(run.optimizer),
        "schedule": None if run.schedule is None else run.schedule.state_dict(),
        "losses": run.losses,
        "evaluations": [asdict(evaluated) for evaluated in run.evaluations],
        "skipped": run.skipped,
    }
    checkpoint.save(file, state)


def _restore(run: _Run, file: Path | None) -> None:
    """Go on from a checkpoint, which rank 0 reads."""
    state = None
    if run.world.rank == 0:
        assert file is not None, "it was told to be there"
        state = _read(run.job, file)
    try:
        run.parallel.load_state_dict(state and state["model"])
        run.parallel.load_optimizer_state(run.optimizer, state and state["optimizer"])
        names = ("schedule", "losses", "evaluations", "skipped")
        told = run.parallel.tell(state and {name: state[name] for name in names})
        if run.schedule is not None:
            run.schedule.load_state_dict(told["schedule"])
    except PlaitError:
        raise
    except (RuntimeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise FileError(
            f"checkpoint {file} does not fit what the job builds now: {reason}",
            setting="resume",
            works="the code that it was written with",
        ) from error
    run.losses = list(told["losses"])
    run.evaluations = [Evaluated(**evaluated) for evaluated in told["evaluations"]]
    run.skipped = list(told["skipped"])


def _read(job: Job, file: Path) -> dict[str, Any]:
    """A checkpoint of this job."""
    state = checkpoint.load(file, device="cpu")
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
    return state
