"""Jobs larger than memory, for real and simulated."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

JOBS, DEVICES, MEMORY = 6, 2, "1.25GiB"
WIDTH, LAYERS, ROWS = 384, 6, 8


def jobs(steps: int) -> list[Any]:
    """Of a kind, each with its own learning rate."""
    import torch

    from plait.demo.chain import CONTEXT, gpt2
    from plait.english import english
    from plait.job import Job

    return [
        Job(
            name=f"spill-{i}",
            model=functools.partial(gpt2, width=WIDTH, layers=LAYERS),
            data=functools.partial(english, context=CONTEXT),
            loss="plait.losses:model_loss",
            weight="plait.losses:next_tokens",
            optimizer=functools.partial(torch.optim.AdamW, lr=1e-3 / 2**i),
            batch=ROWS,
            steps=steps,
        )
        for i in range(JOBS)
    ]


def ask(directory: Path, *, steps: int) -> tuple[float, float, dict[str, Any]]:
    """Milliseconds from the first unit to the last, measured and simulated; and what they rest on."""
    from plait.bench.machine import Moment
    from plait.sim import play_spill
    from plait.spill import fit
    from plait.spill.policies import policy

    before = Moment.now()
    outcomes = fit(jobs(steps), memory=MEMORY, devices=DEVICES, directory=directory)
    left = Moment.now().left(before)
    # The run's own plans, from what its devices had measured before the first unit.
    speeds = dict.fromkeys(range(DEVICES), left)
    played = play_spill(outcomes.loads, DEVICES, policy("sticky"), outcomes.below, speeds=speeds)
    told = {
        "jobs": JOBS,
        "memory": MEMORY,
        "measured_read_bytes": outcomes.measured.read_bytes,
        "simulated_read_bytes": played.disk_bytes[0],
        "measured_busy_s": outcomes.measured.busy_seconds,
        "simulated_busy_s": sum(played.busy_ms.values()) / 1e3,
        "shards": len(outcomes.loads[0].shards),
        "left": left,
    }
    return 1e3 * outcomes.measured.seconds, played.makespan_ms, told
