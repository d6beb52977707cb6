"""Trains a job in stages: what a job means (:mod:`plait.job`), with a part of the model on each rank.

    first rank    fetches the rows of a step, tells the others what they weigh, and feeds its stage
    last rank     fetches the same rows for the loss
    all           a step of the schedule; then the loss and the norm of all gradients, which all must know
                  before any of them steps its optimizer

Losses, weights and the optimizer's state are those of :mod:`plait.reference`, to rounding, and checkpoints
are the same: a run can go on from a plain one, under another plan, or plainly again. The plan's micro-batches
take the place of the job's ``accumulate``: BatchNorm sees them, and each stage draws its own dropout masks.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plait import checkpoint
from plait.chain import Chain
from plait.data import Batches
from plait.determinism import reproducible, seed_micro_batch
from plait.errors import NonfiniteError, PlaitError, UsageError
from plait.evaluation import Evaluated
from plait.job import Job
from plait.pipeline import compat
from plait.pipeline.council import Council
from plait.pipeline.evaluating import Judge
from plait.pipeline.fed import FedAdaptiveSchedule, FedSchedule, Feed
from plait.pipeline.holding import Holding
from plait.pipeline.plan import PipelinePlan
from plait.pipeline.portion import Portion
from plait.pipeline.stage import Stages
from plait.pipeline.wire import Wire, wire_of
from plait.progress import Progress, Result, Step, check_settings, read, unfit
from plait.timeline import Timeline
from plait.world import World

_TIMES = (4, 2, 8, 1)
"""Micro-batches for each stage that an adaptive run may try, beside as many as the plan has."""


@dataclass(kw_only=True)
class _Run:
    """A job that has been built, on one rank, and how far it has come."""

    job: Job
    stage: Any
    wire: Wire
    council: Council
    schedule: FedSchedule
    holding: Holding
    portion: Portion
    progress: Progress
    batches: Batches
    judge: Judge | None


def train(
    job: Job,
    plan: PipelinePlan,
    *,
    adaptive: bool = False,
    memory_limit: int | str | None = None,
    resume: str | Path | bool | None = None,
    directory: str | Path | None = None,
    overwrite: bool = False,
    save_every: int | None = None,
    stop_after: int | None = None,
    on_step: Callable[[Step], None] | None = None,
    should_stop: Callable[[int], bool] | None = None,
    timeline: Timeline | None = None,
    timeout_s: float = 30.0,
    device: torch.device | str | None = None,
) -> Result:
    """Train a job under a plan, in every process of the torchrun contract; the plan is for the job's chain.

    The arguments from ``resume`` to ``should_stop`` are those of :func:`plait.reference.train`. Rank 0 alone
    reads and writes checkpoints, for which it needs host memory for the whole state, as it does at the end:
    its result is whole. On the other ranks the result's model is on the meta device but for the stage's own
    part, and the optimizer's state is that part's.

    Args:
        adaptive: Choose order and micro-batches while training, as :class:`plait.pipeline.AdaptiveSchedule`
            does; the plan's number of micro-batches is the first that is tried.
        memory_limit: Bytes that this rank may hold in an adaptive run's steps.
        timeline: Gets a span for each forward and backward.
        timeout_s: How long a rank may show no sign of life.
    """
    check_settings(save_every=save_every, stop_after=stop_after, directory=directory)
    _check(job, plan, adaptive, memory_limit)
    with reproducible(job.threads), World.join(device) as world, _group(world) as group:
        _check_world(plan, world)
        origin = checkpoint.origin(resume=resume, directory=directory, overwrite=overwrite)
        world.agree({"job": job.digest[:12], "plan": _digest(plan), "adaptive": adaptive})
        stages = _stages(job, plan)
        holding = Holding(stages, world.rank, seed=job.seed, device=world.device)
        stage = stages.stage(device=world.device, group=group)
        wire = wire_of(stage, timeout_s=timeout_s)
        try:
            council = Council(wire, place=world.rank, stages=len(stages))
            wire.belong(council.tell(uuid.uuid4().hex, "the pipeline's name"))
            with _telling(wire):
                limited = {"memory_limit": memory_limit} if adaptive else None
                schedule = _schedule(job, plan, stage, limited, timeline, timeout_s)
                run = _build(job, stage, wire, council, schedule, holding, timeout_s)
                if council.tell(origin is not None, "where to begin"):
                    _restore(run, origin)
                file = None if directory is None else Path(directory) / checkpoint.NAME
                result = _train(run, file, save_every, stop_after, on_step, should_stop)
                wire.flush()
                return result
        finally:
            wire.close()


# --- before anything runs ---------------------------------------------------------------------------


def _check(job: Job, plan: PipelinePlan, adaptive: bool, memory_limit: int | str | None) -> None:
    if plan.global_batch != job.batch:
        raise UsageError(
            f"the plan is for a batch of {plan.global_batch} rows, and the job's has {job.batch}",
            setting="plan",
            works=f"plan(..., global_batch={job.batch})",
        )
    if memory_limit is not None and not adaptive:
        raise UsageError(
            f"a memory limit of {memory_limit} for an order that is the plan's",
            setting="memory_limit",
            works="adaptive=True, or a plan within the limit: plan(..., memory_bytes=...)",
        )


def _check_world(plan: PipelinePlan, world: World) -> None:
    if len(plan.stages) != world.size:
        raise UsageError(
            f"the plan has {len(plan.stages)} stages, and there are {world.size} ranks",
            setting="plan",
            works=f"a plan of {world.size} stages, or {len(plan.stages)} ranks",
        )


@contextmanager
def _group(world: World) -> Iterator[Any]:
    """A group in which gloo carries what is in host memory: None is the group of all."""
    if dist.is_initialized():
        has_gloo = compat.cpu_backend(None) == "gloo"
        yield None if has_gloo else dist.new_group(backend="gloo")
        return
    assert world.size == 1, "several ranks have met"
    torch_distributed: Any = dist  # whose stub does not export its stores
    dist.init_process_group("gloo", store=torch_distributed.HashStore(), rank=0, world_size=1)
    try:
        yield None
    finally:
        dist.destroy_process_group()


def _digest(plan: PipelinePlan) -> str:
    return hashlib.sha256(json.dumps(plan.to_json(), sort_keys=True).encode()).hexdigest()[:12]


@contextmanager
def _telling(wire: Wire) -> Iterator[None]:
    """Around what may fail on this rank alone: the others then raise, too, rather than wait for it."""
    try:
        yield
    except NonfiniteError:  # which all ranks raise, once they have heard the loss
        with suppress(PlaitError):
            wire.flush()
        raise
    except BaseException as error:
        wire.give_up(error)
        raise


# --- building ---------------------------------------------------------------------------------------


def _stages(job: Job, plan: PipelinePlan) -> Stages:
    """The stages of the job's chain, with no parameters yet."""
    chain = Chain.of_job(job)
    if plan.stages[-1].end != len(chain):
        raise UsageError(
            f"the plan is for {plan.stages[-1].end} blocks, and the job's chain has {len(chain)}",
            setting="plan",
            works="a plan of a profile of this job",
        )
    return Stages(chain, plan.cuts)


def _schedule(
    job: Job,
    plan: PipelinePlan,
    stage: Any,
    limited: dict[str, Any] | None,
    timeline: Timeline | None,
    timeout_s: float,
) -> FedSchedule:
    """Runs the plan's order, or one that it chooses itself, where ``limited`` has an adaptive run's limit."""
    feed = Feed(job.build_batches(), job.build_objective(), stage.device)
    common: dict[str, Any] = {
        "loss_fn": feed.loss,
        "weight": feed.weigh,
        "timeline": timeline,
        "timeout_s": timeout_s,
    }
    schedule: FedSchedule
    if limited is None:
        schedule = FedSchedule(stage, plan.order.micro_batches, order=plan.order, **common)
    else:
        usual = [len(plan.stages) * times for times in _TIMES]
        counts = dict.fromkeys([plan.order.micro_batches, *(n for n in usual if n <= job.batch)])
        schedule = FedAdaptiveSchedule(stage, job.batch, micro_batches=tuple(counts), **limited, **common)
    schedule.feed = feed
    return schedule


def _build(
    job: Job,
    stage: Any,
    wire: Wire,
    council: Council,
    schedule: FedSchedule,
    holding: Holding,
    timeout_s: float,
) -> _Run:
    portion = Portion(job, holding)
    optimizer = portion.optimizer
    return _Run(
        job=job,
        stage=stage,
        wire=wire,
        council=council,
        schedule=schedule,
        holding=holding,
        portion=portion,
        progress=Progress(job=job, optimizer=optimizer, schedule=job.build_schedule(optimizer)),
        batches=job.build_batches(),
        judge=None if job.evaluation is None else Judge(job, stage, council, timeout_s=timeout_s),
    )


# --- training ---------------------------------------------------------------------------------------


def _train(
    run: _Run,
    file: Path | None,
    save_every: int | None,
    stop_after: int | None,
    on_step: Callable[[Step], None] | None,
    should_stop: Callable[[int], bool] | None,
) -> Result:
    progress = run.progress
    total = run.job.total_steps(run.batches.steps_per_epoch)
    last = total if stop_after is None else min(total, stop_after)
    states: list[dict[str, Any] | None] = []

    def save() -> None:
        found = _gather(run)
        if found is not None and file is not None:
            checkpoint.save(file, progress.state(found["model"], found["optimizer"]))
        if len(progress.losses) == last:
            states.append(found)

    started = time.perf_counter()
    progress.advance(
        partial(_step, run),
        total=total,
        stop_after=stop_after,
        evaluate=partial(_evaluate, run),
        save=None if file is None else save,
        save_every=save_every,
        on_step=on_step,
        should_stop=should_stop,
    )
    seconds = time.perf_counter() - started
    state = states[0] if states else _gather(run)
    run.council.tell(None, "the end")  # when one rank returns, the last checkpoint is there
    if state is None:
        model, optimizer = run.holding.model, progress.optimizer.state_dict()
    else:
        model, optimizer = run.holding.complete(state["model"]), state["optimizer"]
    return progress.result(model, optimizer, total=total, seconds=seconds)


def _step(run: _Run, step: int) -> Step:
    """One training step: gradients, and what every step ends with."""
    started_s, sent_bytes = time.perf_counter(), run.wire.sent_bytes
    rows, schedule = torch.tensor(run.batches.indices(step)), run.schedule
    schedule.feed.clear()
    weight = None
    if run.stage.is_first:
        weight = _weight(run, rows, schedule.order.micro_batches)
    weight = run.council.tell(weight, f"the weight of step {step}")
    loss, norm = math.nan, None
    if weight:  # else nothing counts: the mean is undefined
        loss, norm = _gradients(run, step, rows, weight)

    def clip(most: float) -> float:
        assert norm is not None, "it was gathered"
        run.holding.clip(most, norm)
        return norm

    done = run.progress.finish(loss, clip=clip, started_s=started_s, weight=weight)
    return replace(done, wire_bytes=run.wire.sent_bytes - sent_bytes)


def _weight(run: _Run, rows: torch.Tensor, micro_batches: int) -> float:
    return sum(run.schedule.feed.weigh(piece) for piece in torch.tensor_split(rows, micro_batches))


def _gradients(run: _Run, step: int, rows: torch.Tensor, total: float) -> tuple[float, float | None]:
    """Leave the gradients of the step's loss in the parameters; return the loss and, to clip, their norm."""
    stage, schedule, holding = run.stage, run.schedule, run.holding
    schedule.before = partial(seed_micro_batch, run.job.seed, step, rank=stage.stage_index)
    means: list[torch.Tensor] = []
    schedule.step(
        *([rows] if stage.is_first else []),
        target=rows if stage.is_last else None,
        losses=means,
        return_outputs=False,
    )
    pieces = torch.tensor_split(rows, len(means)) if means else ()
    loss = 0.0
    for mean, piece in zip(means, pieces, strict=True):
        if weight := schedule.feed.weigh(piece):
            loss += float(mean) * (weight / total)
    norms = {} if run.job.clip_norm is None else holding.norms()
    words = run.council.gather((loss, norms), f"the loss of step {step}")
    settled = None
    if words is not None:
        whole = {name: norm for _, some in words for name, norm in some.items()}
        settled = words[-1][0], None if run.job.clip_norm is None else holding.total_norm(whole)
    found: tuple[float, float | None] = run.council.tell(settled, f"the loss of step {step}")
    return found


def _evaluate(run: _Run, done: int) -> Evaluated:
    assert run.judge is not None, "the job has an evaluation"
    return run.judge.evaluate(done)


# --- checkpoints ------------------------------------------------------------------------------------


def _gather(run: _Run) -> dict[str, Any] | None:
    """The states of the whole model and the whole optimizer, on the first rank."""
    parts = run.council.gather((run.holding.state(), run.portion.state()), "the state of a stage")
    if parts is None:
        return None
    return {
        "model": run.holding.whole(model for model, _ in parts),
        "optimizer": run.portion.whole(optimizer for _, optimizer in parts),
    }


def _restore(run: _Run, file: Path | None) -> None:
    """Go on from a checkpoint, which the first rank reads."""
    parts = None
    try:
        if run.stage.is_first:
            assert file is not None, "it was told to be there"
            parts = _split(run, read(run.job, file, device="cpu"))
        model, optimizer, progress = run.council.hand_out(parts, "the state of a stage")
        run.holding.load(model)
        run.portion.load(optimizer)
        run.progress.restore(progress)
    except PlaitError:
        raise
    except (RuntimeError, ValueError, KeyError) as error:
        raise unfit(file, error) from error


def _split(run: _Run, state: dict[str, Any]) -> list[tuple[Any, Any, Any]]:
    """By stage, its part of the model's state and of the optimizer's, and how far the job has come."""
    count = run.stage.num_stages
    models = run.holding.split(state["model"], count)
    optimizers = run.portion.split(state["optimizer"], [run.holding.names(n) for n in range(count)])
    told = {name: state[name] for name in ("schedule", "losses", "evaluations", "skipped")}
    return [(model, optimizer, told) for model, optimizer in zip(models, optimizers, strict=True)]
