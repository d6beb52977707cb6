"""Runs that tests of the run directory share, made by hand; they import this file by name."""

import functools

from chains import CODECS, chain, cluster, demand

from plait.engine.record import Record
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
