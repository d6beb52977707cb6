"""Jobs for whole runs, which workers import by name; some break on purpose."""

import ctypes
import functools
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from plait import losses
from reference_jobs import BASE, job, points


def wide(*, width=32):
    return nn.Sequential(
        nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)
    )


def slow_points(seed, *, count=40, seconds=0.0):
    return Slow(points(seed, count=count), seconds)


def narrow_points(seed):
    """Rows with a number less than the model takes."""
    return [(x[:5], y) for x, y in points(seed)]


def holding_points(seed, *, flag, seconds):
    """Rows of which one, once, lets no other thread run for so long."""
    return Holding(points(seed), Path(flag), seconds)


class Holding:
    def __init__(self, rows, flag, seconds):
        self.rows, self.flag, self.seconds = rows, flag, seconds

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if self.flag.exists():
            self.flag.unlink()
            ctypes.PyDLL(None).usleep(int(1e6 * self.seconds))  # keeps Python's lock, as a PyDLL does
        return self.rows[index]


class Slow:
    """Rows that take their time, so that something can happen meanwhile."""

    def __init__(self, rows, seconds):
        self.rows, self.seconds = rows, seconds

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return self.rows[index]


def breaking_loss(output, batch, *, at, flag, how):
    """The loss, until the ``at``-th call of all workers; then, once or always, what ``how`` says."""
    if "RANK" not in os.environ:  # no worker: it is only measured
        return losses.cross_entropy(output, batch)
    with Path(flag).open("ab", buffering=0) as file:
        file.write(b"x")
        call = file.tell()  # the end of what was appended here, whatever others append meanwhile
    if call == at or (how == "always" and call >= at):
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "exits":
            sys.exit()
        if how == "leaves":
            os._exit(0)
        raise RuntimeError("the data is broken")
    return losses.cross_entropy(output, batch)


breaking_loss.weight = losses.rows

SMALL = job(BASE, name="small", model=wide, precision="fp64", steps=6)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)


def breaking(flag, *, at, how, **changes):
    loss = functools.partial(breaking_loss, at=at, flag=str(flag), how=how)
    return job(SMALL, loss=loss, weight=losses.rows, **changes)


def slow(seconds, **changes):
    return job(SMALL, data=functools.partial(slow_points, seconds=seconds), **changes)


def workers_of(directory):
    """The numbers of the workers of a run that live."""
    found = []
    for folder in os.listdir("/proc"):
        if folder.isdecimal():
            try:
                words = Path(f"/proc/{folder}/cmdline").read_text().split("\0")
            except OSError:
                continue
            if "plait.engine.worker" in words and any(str(directory) in word for word in words):
                found.append(int(folder))
    return found
