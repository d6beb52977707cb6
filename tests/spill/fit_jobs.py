"""Small jobs that are fitted, a run of two that can be killed, and what must have come of them."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from plait import Factory, Job, reference
from plait.spill import fit

SMALL_JOBS = Path(__file__).parent / "small_jobs.py"
MEMORY = "1200MiB"
"""Enough for three processes that hold torch, with room for models as small as these."""
STEP_S = 0.02


def part(name, **arguments):
    return Factory(f"{SMALL_JOBS}:{name}", **arguments)


def job(name, **changes):
    given = {
        "name": name,
        "model": part("mlp"),
        "data": part("rows"),
        "loss": "plait.losses:mean_squared_error",
        "optimizer": Factory("torch.optim:AdamW", lr=1e-2),
        "batch": 16,
        "steps": 6,
    }
    return Job(**(given | changes))


def assert_equal_to_plain(outcome, of):
    whole = reference.train(of)
    assert outcome.error is None, outcome.error
    assert outcome.finished
    assert outcome.losses == whole.losses
    assert outcome.evaluations == whole.evaluations
    assert outcome.skipped == whole.skipped
    trained = load_file(outcome.weights)
    state = whole.model.state_dict()
    for name, tensor in trained.items():
        assert torch.equal(tensor, state[name]), name
    for name, tensor in state.items():
        if name not in trained:  # tied: under one name only
            assert any(torch.equal(tensor, other) for other in trained.values()), name


def files(directory):
    return sorted(str(path.relative_to(directory)) for path in Path(directory).rglob("*") if path.is_file())


def pair(steps):
    """Two jobs that are not done at once: on one device, a step of both takes longer than ``STEP_S``."""
    slow = part("slow_loss", seconds=STEP_S / 2)
    return [job(name, loss=slow, steps=steps, seed=seed) for seed, name in enumerate(["one", "two"])]


def fit_pair(steps, directory, told):
    """Begin them, or go on with them; what is shown is told over a connection."""
    fit(pair(steps), memory=MEMORY, directory=directory, commit_every=2, resume=True, show=told.send)
