"""Runs that tests of the run directory share, made by hand; they import this file by name."""

import functools
import math
from pathlib import Path

from chains import CODECS, chain, cluster, demand

from plait.engine.record import Record
from plait.engine.result import JobResult
from plait.job import Job
from plait.strategy import plan

BEGIN = 1_700_000_000.0


def job(name="gpt", **settings):
    return Job(
        **{
            "name": name,
            "model": "models:gpt",
            "data": "texts:english",
            "loss": "plait.losses:cross_entropy",
            "optimizer": "torch.optim:SGD",
            "batch": 16,
            "steps": 10,
            **settings,
        }
    )


@functools.cache
def planned(*names):
    """A real plan of alike jobs on four devices."""
    return plan([demand(name, chain(4), steps=10) for name in names], cluster(4), codecs=CODECS)


def create(directory, *names, config=None):
    return Record.create(
        directory, config=config or {}, plan=planned(*names).to_json(), jobs=[job(name) for name in names]
    )


def row(name, step, *, attempt=0, loss=None, seconds=0.1, at_s=None, **more):
    return {
        "time": BEGIN + (step + 1) * seconds if at_s is None else at_s,
        "job": name,
        "step": step,
        "attempt": attempt,
        "loss": 4.0 / (step + 1) if loss is None else loss,
        "seconds": seconds,
        "samples_per_s": 16 / seconds,
        **more,
    }


def full_run(directory):
    """A run in which all sorts of things happened."""
    config = {"strategy": "auto", "compress": 4, "engine": "local", "command": ["plait", "run", "my jobs.py"]}
    with create(directory, "gpt", "small", config=config) as made:
        made.event("planned", "side by side: 2 jobs end after 1 s", time=BEGIN)
        made.event("started", "on 2 devices", job="gpt", time=BEGIN)
        for step in range(6):
            made.step(row("gpt", step, wire_bytes=1 << 20, memory_bytes=3 << 20, bits=4))
        made.event("failed", "worker 1 was killed by signal 9", job="gpt", time=BEGIN + 0.7, rank=1)
        made.event("restarted", "from step 4", job="gpt", time=BEGIN + 1.0)
        for step in range(4, 10):
            loss = math.nan if step == 7 else None
            made.step(
                row("gpt", step, attempt=1, loss=loss, at_s=BEGIN + 1.2 + step / 10, wire_bytes=1 << 20)
            )
        made.step({"job": "gpt", "step": 9, "attempt": 1, "time": BEGIN + 2.2, "evaluation": {"loss": 0.3}})
        made.event("decision", "2 bits: the wire is slow", job="gpt", time=BEGIN + 1.5, bits=2)
        made.event("finished", "after 1 restart", job="gpt", time=BEGIN + 2.3)
        JobResult(name="gpt", end="finished", strategy="data", losses=(1.0,) * 10).save(made.folder("gpt"))
    return directory


def made_folder(*parts):
    folder = Path(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
