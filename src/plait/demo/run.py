"""The whole of it: a foreground job, a sweep under a memory budget and a background job, in one call.

Plain PyTorch then does the same work in the same process order that a script would have: one after another,
with all cores for each.
"""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.demo.chain import CONTEXT, gpt2

if TYPE_CHECKING:
    from plait.engine import Run
    from plait.job import Job
    from plait.spill import Selection

STEPS, TRIALS, TRIAL_STEPS, BEHIND_STEPS = 30, 4, 8, 30
RATES = (3e-3, 1e-3, 3e-4, 1e-4)
MEMORY = "1GiB"
"""Of each device, for the trials of the sweep with their processes."""


def jobs() -> list[Job | Selection]:
    """A GPT in the foreground, a smaller one behind it, and a sweep over learning rates."""
    from plait.spill import Choice, Grid, Selection, no_halving

    front = _gpt("gpt", width=256, layers=4, steps=STEPS, batch=16)
    behind = replace(_gpt("behind", width=96, layers=3, steps=BEHIND_STEPS, batch=8), priority="background")
    swept = replace(_gpt("swept", width=192, layers=4, steps=TRIAL_STEPS, batch=8), memory=MEMORY)
    space = {"optimizer.lr": Choice(RATES)}
    sweep = Selection(swept, space, no_halving(trials=TRIALS, most_steps=TRIAL_STEPS), sampler=Grid(space))
    return [front, behind, sweep]


def _gpt(name: str, *, width: int, layers: int, steps: int, batch: int) -> Job:
    import torch

    from plait.english import english
    from plait.job import Job

    return Job(
        name=name,
        model=functools.partial(gpt2, width=width, layers=layers),
        data=functools.partial(english, context=CONTEXT),
        loss="plait.losses:model_loss",
        weight="plait.losses:next_tokens",
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
        batch=batch,
        steps=steps,
    )


def act(directory: Path) -> None:
    """Run the workload, then do the same plainly, and compare."""
    import plait
    from plait.cli.console import console

    show, place = console(), directory / "run"
    shutil.rmtree(place, ignore_errors=True)
    started = time.perf_counter()

    def say(line: str) -> None:
        show.print(line, markup=False, highlight=False)

    done = plait.run(jobs(), directory=place, show=say)
    taken_s = time.perf_counter() - started
    failed = [result for result in done.values() if not result.finished]
    if failed:
        raise RuntimeError(str(failed[0]))
    plain_s, losses = _plainly(say)
    trials = [name for name in done if name.startswith("swept")]
    best = min(trials, key=lambda name: done[name].losses[-1])
    show.print(f"best of {len(trials)} trials: {best}, loss {done[best].losses[-1]:.3f}")
    show.print(_compared(done, losses))
    show.print(
        f"plait: {taken_s:.0f} s with planning and starting of processes; plain PyTorch, one after another "
        f"with {os.cpu_count()} threads: {plain_s:.0f} s; {plain_s / taken_s:.2f} times as fast"
    )
    show.print(
        f"{_starting_s(done):.0f} s of plait's passed between a process's start and its first step: jobs "
        "of seconds, which fit into memory and have no wire between them, gain little from several processes"
    )
    show.print(f"report: {done.report}")


def _plainly(say: Callable[[str], Any]) -> tuple[float, dict[str, tuple[float, ...]]]:
    """The same work as a script would do it; how long it took, and the losses by job."""
    from plait import reference
    from plait.job import Job
    from plait.spill import Selection
    from plait.spill.space import derive

    front, behind, sweep = jobs()
    assert isinstance(front, Job), "as it is made"
    assert isinstance(behind, Job), "as it is made"
    assert isinstance(sweep, Selection), "as it is made"
    rates = [{"optimizer.lr": rate} for rate in RATES]
    work = [front, behind, *(derive(sweep.job, f"swept-{i}", values) for i, values in enumerate(rates))]
    say(f"the same once more in plain PyTorch: {len(work)} trainings, one after another")
    started = time.perf_counter()
    losses = {}
    for each in work:
        losses[each.name] = reference.train(replace(each, threads=os.cpu_count() or 1)).losses
    return time.perf_counter() - started, losses


def _starting_s(done: Run) -> float:
    """How long processes took to start, one after another; background work, which may wait, left out."""
    from plait.engine.record import Record

    record = Record.read(done.directory)
    begun = {event["job"]: event["time"] for event in record.events() if event["kind"] == "started"}
    first: dict[str, float] = {}
    for row in record.history():
        task = "swept-sweep" if row["job"].startswith("swept") else row["job"]
        first.setdefault(task, row["time"])
    waits = [first[task] - at for task, at in begun.items() if task in first and task != "behind"]
    return float(sum(waits))


def _compared(done: Run, losses: dict[str, tuple[float, ...]]) -> str:
    """How far the losses of the foreground are from those of plain training."""
    ours, plain = done["gpt"].losses[-1], losses["gpt"][-1]
    return f"the foreground's last loss: {ours:.4f} by {done['gpt'].strategy}, {plain:.4f} plainly"
