"""Trials of a small job, and a search over them in a process that can be killed."""

from pathlib import Path

from plait import Factory, Job
from plait.spill import Choice, Grid, Selection, asha, search

SMALL_JOBS = Path(__file__).parent / "small_jobs.py"
RATES = [0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001]


def selection(rates=RATES):
    job = Job(
        name="trial",
        model=Factory(f"{SMALL_JOBS}:mlp"),
        data=Factory(f"{SMALL_JOBS}:rows"),
        loss=Factory(f"{SMALL_JOBS}:slow_loss", seconds=0.01),
        optimizer=Factory("torch.optim:AdamW", lr=0.1),
        batch=16,
        steps=8,
    )
    space = {"optimizer.lr": Choice(rates)}
    rules = asha(trials=len(rates), least_steps=2, most_steps=8, eta=2)
    return Selection(job, space, rules, sampler=Grid(space))


def search_trials(directory):
    """Begin the search, or go on with it."""
    search(selection(), memory="1200MiB", directory=directory, resume=True, commit_every=1, show=False)
