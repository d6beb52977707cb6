"""The whole of it: a foreground job, a sweep under a memory budget and a background job, in one call.

Two hosts with a core each and an ordinary link between them train all of it; plain PyTorch then does the same
on the same hosts as scripts would: DDP for the job in the foreground, and after it the others, one at a time
on each host.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import TYPE_CHECKING, Any

from plait.demo.chain import CONTEXT, gpt2

if TYPE_CHECKING:
    from plait.engine import Run
    from plait.job import Job
    from plait.lab import Lab
    from plait.spill import Selection

HOSTS, RATE, UNSHAPED = 2, "100mbit", "10gbit"
STEPS, TRIALS, TRIAL_STEPS, BEHIND_STEPS = 40, 4, 12, 40
RATES = (3e-3, 1e-3, 3e-4, 1e-4)
MEMORY = "1GiB"
"""Of each device, for the trials of the sweep with their processes."""


def jobs() -> list[Job | Selection]:
    """A GPT in the foreground; behind it a smaller one, and a sweep over learning rates."""
    from plait.spill import Choice, Grid, Selection, no_halving

    front = _gpt("gpt", width=256, layers=4, steps=STEPS, batch=16)
    behind = replace(_gpt("behind", width=96, layers=3, steps=BEHIND_STEPS, batch=8), priority="background")
    swept = _gpt("swept", width=192, layers=4, steps=TRIAL_STEPS, batch=8)
    swept = replace(swept, memory=MEMORY, priority="background")
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
        optimizer=functools.partial(torch.optim.AdamW, lr=3e-4),
        batch=batch,
        steps=steps,
    )


def act(directory: Path) -> None:
    """Run the workload, then do the same plainly, and compare."""
    from plait.cli.console import console
    from plait.lab import Lab

    show, place = console(), directory / "run"
    shutil.rmtree(place, ignore_errors=True)

    def say(line: str) -> None:
        show.print(line, markup=False, highlight=False)

    usable = sorted(os.sched_getaffinity(0))
    cores = ":".join(map(str, usable[:HOSTS])) if len(usable) >= HOSTS else None
    with Lab(hosts=HOSTS, rate=RATE, cores=cores) as lab:
        wire = "an unshaped loopback" if lab.loopback else f"a link of {RATE}"
        say(f"{HOSTS} hosts over {wire} train a GPT, a sweep of {TRIALS} and a job behind them")
        started = time.perf_counter()
        done = _together(lab, place, say)
        taken_s = time.perf_counter() - started
        failed = [result for result in done.values() if not result.finished]
        if failed:
            raise RuntimeError(str(failed[0]))
        say(f"the same once more in plain PyTorch on the same hosts: DDP, then {TRIALS + 1} jobs by turns")
        started = time.perf_counter()
        plain_loss = _plainly(lab)
        plain_s = time.perf_counter() - started
    trials = [name for name in done if name.startswith("swept")]
    best = min(trials, key=lambda name: done[name].losses[-1])
    ours = done["gpt"]
    say(f"best of {len(trials)} trials: {best}, loss {done[best].losses[-1]:.3f}")
    say(f"the foreground's last loss: {ours.losses[-1]:.4f} by {ours.strategy}, {plain_loss:.4f} plainly")
    say(
        f"plait: {taken_s:.0f} s with planning; plain PyTorch, one after another: {plain_s:.0f} s; "
        f"{plain_s / taken_s:.2f} times as fast"
    )
    say(f"report: {done.report}")


def _together(lab: Lab, place: Path, say: Callable[[str], Any]) -> Run:
    import plait
    from plait.cluster import Cluster
    from plait.engine.lab_launcher import LabLauncher

    rate = UNSHAPED if lab.loopback else RATE
    cluster = Cluster.uniform(hosts=HOSTS, memory="4GiB", bandwidth=rate, latency="50us")
    launcher = LabLauncher(lab, [device.name for device in cluster.devices])
    return plait.run(jobs(), cluster, launcher, directory=place, show=say)


def _plainly(lab: Lab) -> float:
    """The same work as scripts would do it; the foreground's last loss."""
    from plait.job import Job
    from plait.spill import Selection
    from plait.spill.space import derive

    front, behind, sweep = jobs()
    assert isinstance(front, Job), "as it is made"
    assert isinstance(behind, Job), "as it is made"
    assert isinstance(sweep, Selection), "as it is made"
    rates = [{"optimizer.lr": rate} for rate in RATES]
    others = [behind, *(derive(sweep.job, f"swept-{i}", values) for i, values in enumerate(rates))]
    with TemporaryDirectory(prefix="plait-demo-") as name:
        folder, said = Path(name), list[str]()
        words = [sys.executable, "-m", "plait.reference", _saved(front, folder)]
        if lab.run(words, show=said.append).exit_code:
            raise RuntimeError("plain training failed:\n" + "\n".join(said[-20:]))
        files = [_saved(job, folder) for job in others]
        with ThreadPoolExecutor(HOSTS) as pool:
            list(pool.map(lambda host: _train(lab, host, files[host::HOSTS]), range(HOSTS)))
    told = next(line for line in said if '"losses"' in line)
    return float(json.loads(told[told.index("{") :])["losses"][-1])


def _train(lab: Lab, host: int, files: Iterable[str]) -> None:
    """One after another, on a host."""
    for file in files:
        with TemporaryFile() as log:
            words = [sys.executable, "-m", "plait.reference", file]
            if lab.start(host, words, stdout=log, stderr=log).wait():
                log.seek(0)
                raise RuntimeError(f"plain training of {file} failed:\n{log.read()[-2000:].decode()}")


def _saved(job: Job, folder: Path) -> str:
    file = folder / f"{job.name}.json"
    file.write_text(job.to_json())
    return str(file)
