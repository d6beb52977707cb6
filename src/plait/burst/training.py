"""Trains a job under a plan: what a job means (:mod:`plait.job`), with every block as wide as it pays.

Losses, weights and the optimizer's state are those of :mod:`plait.reference`, to rounding, and checkpoints
are the same: a run can go on from a plain one, under another plan, or plainly again. Every rank fetches the
whole batch of a step; evaluation runs on rank 0, which holds the whole model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from plait import checkpoint
from plait.burst.burst_plan import BurstPlan
from plait.burst.runtime import BatchNorm, BurstParallel
from plait.chain import Chain
from plait.collective import Collective
from plait.determinism import reproducible, seed_micro_batch
from plait.errors import PlaitError, UsageError
from plait.evaluation import Evaluated, Evaluator
from plait.job import Job
from plait.progress import Progress, Result, Step, check_settings, read, unfit
from plait.timeline import Timeline
from plait.world import World


@dataclass(kw_only=True)
class _Run:
    """A job that has been built, and how far it has come."""

    job: Job
    world: World
    parallel: BurstParallel
    progress: Progress
    evaluator: Evaluator | None


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
    should_stop: Callable[[int], bool] | None = None,
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
    check_settings(save_every=save_every, stop_after=stop_after, directory=directory)
    if plan.batch != job.batch:
        raise UsageError(
            f"the plan is for a batch of {plan.batch} rows, and the job's has {job.batch}",
            setting="plan",
            works=f"plan(..., batch={job.batch})",
        )
    with reproducible(job.threads), World.join(device) as world:
        origin = checkpoint.origin(resume=resume, directory=directory, overwrite=overwrite)
        world.agree({"job": job.digest[:12]})
        chain = Chain.of_job(job)
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
                return _train(run, file, save_every, stop_after, on_step, should_stop)
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
        progress=Progress(job=job, optimizer=optimizer, schedule=job.build_schedule(optimizer)),
        evaluator=None if job.evaluation is None or world.rank else Evaluator(job),
    )


def _train(
    run: _Run,
    file: Path | None,
    save_every: int | None,
    stop_after: int | None,
    on_step: Callable[[Step], None] | None,
    should_stop: Callable[[int], bool] | None,
) -> Result:
    batches = run.job.build_batches()
    total = run.job.total_steps(batches.steps_per_epoch)
    started = time.perf_counter()
    run.progress.advance(
        lambda step: _step(run, step, batches.fetch(batches.indices(step), device=run.world.device)),
        total=total,
        stop_after=stop_after,
        evaluate=partial(_evaluate, run),
        save=None if file is None else partial(_save, run, file),
        save_every=save_every,
        on_step=on_step,
        should_stop=should_stop,
    )
    run.parallel.tell(None)  # when one rank returns, the last checkpoint is there
    return run.progress.result(
        run.parallel.chain.model,
        run.progress.optimizer.state_dict(),
        total=total,
        seconds=time.perf_counter() - started,
    )


def _step(run: _Run, step: int, batch: Any) -> Step:
    """One training step: gradients, and what every step ends with."""
    started_s = time.perf_counter()
    job = run.job
    loss = run.parallel.step(
        batch,
        micro_batches=job.accumulate,
        before_each=lambda number: seed_micro_batch(job.seed, step, number, rank=run.world.rank),
        number=step,
    )
    done = run.progress.finish(loss, clip=run.parallel.clip_grad_norm_, started_s=started_s)
    assert run.parallel.record is not None, "a step has ended"
    return replace(done, wire_bytes=run.parallel.record.wire_bytes)


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
    parallel, progress = run.parallel, run.progress
    checkpoint.save(file, progress.state(parallel.state_dict(), parallel.optimizer_state(progress.optimizer)))


def _restore(run: _Run, file: Path | None) -> None:
    """Go on from a checkpoint, which rank 0 reads."""
    state = None
    if run.world.rank == 0:
        assert file is not None, "it was told to be there"
        state = read(run.job, file, device="cpu")
    try:
        run.parallel.load_state_dict(state and state["model"])
        run.parallel.load_optimizer_state(run.progress.optimizer, state and state["optimizer"])
        names = ("schedule", "losses", "evaluations", "skipped")
        run.progress.restore(run.parallel.tell(state and {name: state[name] for name in names}))
    except PlaitError:
        raise
    except (RuntimeError, ValueError, KeyError) as error:
        raise unfit(file, error) from error
