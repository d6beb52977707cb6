"""The second act: two hosts train a small GPT over a slow link, plainly and with gradients in 4 bits.

Run as a module it is the worker on each host, under the torchrun contract.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.demo.chain import CONTEXT, gpt2

if TYPE_CHECKING:
    from torch import nn

    from plait.job import Job

RATE = "100mbit"
STEPS = 12
UNCOUNTED = 2
"""The first steps, in which connections and buckets are made."""
MARK = "plait demo:"


def job() -> Job:
    """What both hosts train together."""
    import torch

    from plait.english import english
    from plait.job import Job

    return Job(
        name="demo-compress",
        model=functools.partial(gpt2, width=160),
        data=functools.partial(english, context=CONTEXT),
        loss="plait.losses:model_loss",
        weight="plait.losses:next_tokens",
        optimizer=functools.partial(torch.optim.AdamW, lr=3e-3),
        batch=8,
        steps=STEPS,
    )


def act(directory: Path) -> None:
    """Train twice in a lab, and compare."""
    from plait.cli.console import console, status
    from plait.errors import LabError
    from plait.lab import Lab

    show = console()
    lines: list[str] = []
    with Lab(hosts=2, rate=RATE) as lab, status(f"two hosts train over {RATE}, with and without compression"):
        wire = "an unshaped loopback" if lab.loopback else f"a link of {RATE}"
        outcome = lab.run([sys.executable, "-m", __name__], show=lines.append, timeout_seconds=300)
    found = [line.split(MARK, 1)[1] for line in lines if MARK in line]
    if outcome.exit_code or not found:
        raise LabError("the workers failed:\n" + "\n".join(lines[-20:]))
    result = json.loads(found[0])
    plain, compressed = result["plain"], result["4 bits"]
    show.print(
        f"GPT-2 with {result['parameters']:,} parameters on two hosts over {wire}, {STEPS} steps each:"
    )
    show.print(f"  DDP in fp32   {plain['ms']:6.0f} ms a step, loss {plain['losses'][-1]:.3f}")
    show.print(f"  in 4 bits     {compressed['ms']:6.0f} ms a step, loss {compressed['losses'][-1]:.3f}")
    show.print(f"{plain['ms'] / compressed['ms']:.1f} times faster; {result['report']}")


def work() -> None:
    """One host's worker: both runs, one after the other; rank 0 tells what came of them."""
    import torch.distributed as dist

    from plait import compress, reference

    dist.init_process_group("gloo")
    task = job()
    attached: list[Any] = []
    result: dict[str, Any] = {}

    def attach(ddp: nn.Module) -> None:
        attached.append(compress.attach(ddp, bits=4))

    for side, hook in (("plain", None), ("4 bits", attach)):
        steps: list[float] = []
        trained = reference.train(task, attach=hook, on_step=lambda step, to=steps: to.append(step.seconds))  # type: ignore[misc]
        ms = 1e3 * sum(steps[UNCOUNTED:]) / (STEPS - UNCOUNTED)
        result[side] = {"ms": ms, "losses": trained.losses}
    result["parameters"] = sum(parameter.numel() for parameter in trained.model.parameters())
    result["report"] = str(attached[0].report().total)
    if dist.get_rank() == 0:
        print(MARK, json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    work()
