"""A task carried out by one worker: the strategy's own trainer, which tells its steps and can be stopped."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.doing import heard_by
from plait.engine.recording import Recording
from plait.engine.result import JobResult
from plait.engine.task import SELECTION, Task
from plait.engine.telling import Teller, resident_bytes
from plait.engine.trials import save_trials
from plait.job import Job

if TYPE_CHECKING:
    from plait.evaluation import Evaluated
    from plait.progress import Result, Step
    from plait.spill.outcome import Outcome, Outcomes
    from plait.spill.selection import Selection

_REFERENCE_BITS = 4
_SILENCE_S = 30.0
"""How long ranks of a pipeline or a burst wait for a sign of life of another; longer if a run does."""
SPILL_FOLDER = "spill"
"""Where in a task's folder jobs live that take turns."""


def carry_out(task: Task, folder: Path, teller: Teller, recording: Recording) -> bool:
    """Do a task's work, or what is left of it; whether it is done, and not stopped before the end."""
    if task.kind != "train":
        return _take_turns(task, folder, teller, recording)
    (job,) = task.read_jobs()
    if (
        teller.rank == 0
    ):  # who saves: importing takes a second, which the first checkpoint would take from a step
        import plait.checkpoint_data  # noqa: F401
    with heard_by(partial(teller.doing, task.names)):
        result = _train(task, job, teller, recording)
    if result.finished and teller.rank == 0:
        _finish(task, job, result, teller)
    return result.finished


# --- one job -------------------------------------------------------------------------------------------


def _train(task: Task, job: Job, teller: Teller, recording: Recording) -> Result:
    def common(facts: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What every trainer is given; ``facts`` are what the strategy adds to a step."""
        asked = partial(_should_stop, job.name, task.workers, teller)
        should_stop, on_step = recording.follow(job, asked, _on_step(job, teller, facts))
        return {
            "resume": True,
            "directory": teller.folder(job.name),
            "save_every": task.save_every,
            "should_stop": should_stop,
            "on_step": on_step,
        }

    timeout_s = max(_SILENCE_S, teller.silence_s)
    if task.strategy == "pipeline":
        from plait.pipeline.plan import PipelinePlan
        from plait.pipeline.training import train as train_in_stages

        pipeline_plan = PipelinePlan.from_json(task.plan)
        facts = {} if pipeline_plan.order.k is None else {"k": pipeline_plan.order.k}
        return train_in_stages(
            job, pipeline_plan, **common(lambda: facts), timeline=recording.details, timeout_s=timeout_s
        )
    if task.strategy == "burst":
        from plait.burst.burst_plan import BurstPlan
        from plait.burst.training import train as train_in_widths

        burst_plan = BurstPlan.from_json(task.plan)
        collective = None
        if task.compress is not None:
            from plait.compress import CompressedCollective
            from plait.sim.reduction import codec_of

            # As the plan prices it. Bits of single blocks are not chosen here: "auto" is the reference bits.
            bits = _REFERENCE_BITS if task.compress == "auto" else task.compress
            collective = CompressedCollective(codec=codec_of(bits))
        wide: dict[str, Any] = {"width": max(burst_plan.widths)}
        if isinstance(task.compress, int):
            wide["bits"] = task.compress
        return train_in_widths(
            job,
            burst_plan,
            **common(lambda: wide),
            collective=collective,
            timeline=recording.details,
            timeout_s=timeout_s,
        )
    return _train_plainly(task, job, common, recording)


def _train_plainly(
    task: Task,
    job: Job,
    common: Callable[[Callable[[], dict[str, Any]]], dict[str, Any]],
    recording: Recording,
) -> Result:
    from plait import reference

    if task.compress is None or task.workers == 1:
        return reference.train(job, **common(dict))
    from plait import compress

    attached: list[Any] = []
    sent_bytes = 0

    def attach(model: Any) -> Any:
        # What was planned, or asked for, is done; only "auto" may find that it does not pay.
        attached.append(
            compress.attach(
                model, bits=task.compress, decline=task.compress == "auto", timeline=recording.details
            )
        )
        return attached[0]

    def facts() -> dict[str, Any]:
        nonlocal sent_bytes
        total = attached[0].report().total  # of the whole attempt so far
        if not total.operations:  # declined: what DDP sends by itself is not counted
            return {}
        step_bytes, sent_bytes = total.sent_bytes - sent_bytes, total.sent_bytes
        return {"bits": 32 / total.ratio, "sent_bytes": sent_bytes, "wire_bytes": step_bytes}

    return reference.train(job, **common(facts), attach=attach)


def _on_step(job: Job, teller: Teller, facts: Callable[[], dict[str, Any]]) -> Callable[[Step], None] | None:
    """What tells of a step; only one rank does."""
    if teller.rank != 0:
        return None

    def told(step: Step) -> None:
        row = {
            "step": step.step,
            "loss": step.loss if step.loss - step.loss == 0 else None,
            "seconds": step.seconds,
            "learning_rate": step.learning_rate,
            "samples_per_s": job.batch / step.seconds if step.seconds else None,
            "memory_bytes": resident_bytes(),
            **facts(),
        }
        if step.wire_bytes is not None:
            row["wire_bytes"] = step.wire_bytes
        if step.norm is not None:
            row["norm"] = step.norm if step.norm - step.norm == 0 else None
        if step.skipped:
            row["skipped"] = True
        teller.step(job.name, row)
        if step.evaluated is not None:
            teller.evaluation(job.name, step.evaluated)

    return told


def _should_stop(job: str, workers: int, teller: Teller, done: int) -> bool:
    """Whether any rank was asked to stop: all must leave after the same step."""
    if teller.rank == 0:
        teller.check_fence(job)  # before a checkpoint is written
    if workers == 1:
        return teller.should_stop
    import torch
    import torch.distributed as dist

    where = "cuda" if dist.get_backend() == "nccl" else "cpu"
    asked = torch.tensor([float(teller.should_stop)], device=where)
    dist.all_reduce(asked)
    return bool(asked.item())


def _finish(task: Task, job: Job, result: Result, teller: Teller) -> None:
    """Leave weights that others can read, and what came of the job."""
    from plait.engine.export import NAME, save_weights

    weights = save_weights(result.model.state_dict(), teller.folder(job.name) / NAME)
    teller.result(
        JobResult(
            name=job.name,
            end="finished",
            strategy=task.strategy,
            losses=result.losses,
            evaluations=result.evaluations,
            skipped=result.skipped,
            weights=weights,
        )
    )


# --- jobs that take turns ------------------------------------------------------------------------------


def _take_turns(task: Task, folder: Path, teller: Teller, recording: Recording) -> bool:
    from plait.spill import fit, search

    told: dict[str, int] = {}
    # A trial may be paused for as long as others take, so the time between its steps is not theirs.
    pace = _Pace({} if task.kind == "search" else {job.name: job.batch for job in task.read_jobs()})
    selection: Selection | None = None
    if task.kind == "search":
        selection = pickle.loads((folder / SELECTION).read_bytes())

    def on_step(job: str, done: int, loss: float) -> None:
        if done > told.get(job, 0):
            if selection is not None and job not in told:
                save_trials(folder, {name: trial.values for name, trial in dict(selection.trials).items()})
            told[job] = done
            row = {"step": done - 1, "loss": loss if loss - loss == 0 else None}
            teller.step(job, row | pace.after(job, done))

    judged: dict[str, int] = {}

    def on_evaluation(job: str, evaluated: Evaluated) -> None:
        if evaluated.step > judged.get(job, 0):
            judged[job] = evaluated.step
            teller.evaluation(job, evaluated)

    settings: dict[str, Any] = {
        "memory": task.memory_bytes,
        "devices": len(task.devices),
        "directory": folder / SPILL_FOLDER,
        "resume": True,
        "commit_every": task.save_every,
        "show": partial(print, flush=True),
        "on_step": on_step,
        "on_evaluation": on_evaluation,
        "timeline": recording.details,
    }
    best: str | None = None
    over = threading.Event()
    threading.Thread(target=_interrupt, args=(teller, over), name="plait-stop", daemon=True).start()
    try:
        if selection is not None:
            outcomes: Outcomes = search(selection, **settings)
            if (found := selection.best) is not None:
                best = found.job.name
                chosen = ", ".join(f"{name} {value}" for name, value in found.values.items())
                text = f"the best trial is {best}, {found.value:.6g}, with {chosen}"
                teller.tell(event={"kind": "decision", "text": text})
        else:
            outcomes = fit(task.read_jobs(), **settings)
    except KeyboardInterrupt:
        return False
    finally:
        over.set()
    for outcome in outcomes:
        _settle(outcome, outcomes, teller, best=best)
    return True


class _Pace:
    """How fast jobs go that take turns: the time between two steps of a job, others' turns included."""

    def __init__(self, batches: Mapping[str, int], clock: Callable[[], float] = time.perf_counter) -> None:
        """``batches`` has the jobs that are timed."""
        self._batches, self._clock = batches, clock
        self._last: dict[str, tuple[int, float]] = {}

    def after(self, job: str, done: int) -> dict[str, float]:
        """What a row tells of the step that a job has done; of its first one nothing is known."""
        if job not in self._batches:
            return {}
        now_s, last = self._clock(), self._last.get(job)
        self._last[job] = done, now_s
        if last is None or now_s <= last[1]:
            return {}
        seconds = (now_s - last[1]) / (done - last[0])
        return {"seconds": seconds, "samples_per_s": self._batches[job] / seconds}


def _interrupt(teller: Teller, over: threading.Event) -> None:
    """Spill ends at a commit where Ctrl-C asks it to; so that is how it is asked."""
    if teller.wait_for_stop(over):
        os.kill(os.getpid(), signal.SIGINT)


def _settle(outcome: Outcome, among: Outcomes, teller: Teller, *, best: str | None) -> None:
    """Put what came of a job where that of every job is."""
    from plait.engine.export import NAME

    folder = teller.folder(outcome.name)
    folder.mkdir(parents=True, exist_ok=True)
    weights = None
    facts: dict[str, Any] = {"foretold": asdict(among.forecast), "measured": asdict(among.measured)}
    if outcome.end == "stopped":  # Ctrl-C interrupts
        facts["given_up"] = True
    if outcome.name == best:
        facts["best"] = True
    if outcome.weights is not None:
        weights = folder / NAME
        weights.unlink(missing_ok=True)
        os.link(outcome.weights, weights)
    teller.result(
        JobResult(
            name=outcome.name,
            end="finished" if outcome.finished else "failed" if outcome.end == "failed" else "stopped",
            strategy="spill",
            losses=outcome.losses,
            evaluations=outcome.evaluations,
            skipped=outcome.skipped,
            error=outcome.error,
            weights=weights,
            facts=facts,
        )
    )
