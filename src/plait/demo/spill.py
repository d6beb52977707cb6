"""The third act: four GPT-2s that do not fit into memory together train in it, and end with the same bits."""

from __future__ import annotations

import functools
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from plait.demo.chain import CONTEXT, gpt2

if TYPE_CHECKING:
    from plait.job import Job

JOBS = 4
STEPS = 2
MEMORY = "1.5GiB"
"""Of all processes, the demo's own with what the acts before have left in it included."""
WIDTH, LAYERS = 512, 8
"""So that the four hold more than the processes leave of the budget, and come back from disk."""


def jobs() -> list[Job]:
    """Four of a kind, each with its own learning rate; jobs of one seed are traced once."""
    import torch

    from plait.english import english
    from plait.job import Job

    return [
        Job(
            name=f"demo-spill-{i}",
            model=functools.partial(gpt2, width=WIDTH, layers=LAYERS),
            data=functools.partial(english, context=CONTEXT),
            loss="plait.losses:model_loss",
            weight="plait.losses:next_tokens",
            optimizer=functools.partial(torch.optim.AdamW, lr=1e-3 / 2**i),
            batch=8,
            steps=STEPS,
        )
        for i in range(JOBS)
    ]


def act(directory: Path) -> None:
    """Train them within the budget, then one of them plainly, and compare."""
    import torch
    from safetensors.torch import load_file

    from plait import reference
    from plait.cli.console import console, status
    from plait.cluster.machine import usable_cores
    from plait.spill import fit
    from plait.timeline import Timeline
    from plait.units import format_bytes

    show, run = console(), directory / "spill"
    shutil.rmtree(run, ignore_errors=True)
    devices, timeline = min(2, len(usable_cores())), Timeline()
    outcomes = fit(
        jobs(),
        memory=MEMORY,
        devices=devices,
        directory=run,
        timeline=timeline,
        show=lambda line: show.print(line),
    )
    failed = [outcome for outcome in outcomes if not outcome.finished]
    if failed:
        raise RuntimeError(str(failed[0]))
    with status("the first of them once more, in memory, for comparison"):
        plain = reference.train(jobs()[0])
    first = outcomes[0]
    assert first.weights is not None, "a job that has finished has weights"
    trained, state = load_file(first.weights), plain.model.state_dict()
    same = first.losses == plain.losses and all(torch.equal(t, state[name]) for name, t in trained.items())
    held = JOBS * sum(4 * math.prod(p.shape) * 4 for p in plain.model.parameters())
    timeline.export(run / "timeline.html")
    show.print(
        f"{JOBS} GPT-2s with {format_bytes(held)} of weights, gradients and Adam state took turns on "
        f"{devices} devices; all {devices + 1} processes together, with their interpreters, held "
        f"{format_bytes(outcomes.measured.memory_bytes)} at most"
    )
    moved = outcomes.measured
    show.print(
        f"{format_bytes(moved.read_bytes)} read and {format_bytes(moved.written_bytes)} written meanwhile, "
        "commits included; "
        f"timeline of computing and transfers: {run / 'timeline.html'}"
    )
    show.print(f"losses and weights of the first bit-identical to plain training in memory: {same}")
