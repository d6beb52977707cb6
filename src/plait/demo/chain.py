"""The first act: an unmodified Hugging Face GPT-2 is traced into a chain, profiled and trained through it."""

from __future__ import annotations

import functools
import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING

from plait.english import LETTERS
from plait.errors import UsageError
from plait.extras import install

if TYPE_CHECKING:
    from torch import nn

    from plait.chain import Chain
    from plait.job import Job

CONTEXT = 64
STEPS = 60
DRAWN = 2
CHECKED = 5
"""Steps that plain PyTorch repeats, to compare bit for bit."""


def gpt2(*, width: int = 96, layers: int = 3, heads: int = 4) -> nn.Module:
    """A small GPT-2, as Hugging Face builds it from a config."""
    if importlib.util.find_spec("transformers") is None:
        raise UsageError("the demo trains a Hugging Face GPT-2", setting="extras", works=install("hf"))
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=LETTERS,
        n_positions=CONTEXT,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = GPT2LMHeadModel(config)  # type: ignore[no-untyped-call]
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # else Hugging Face warns that it falls back to it
    return model


def job() -> Job:
    """What the act trains."""
    import torch

    from plait.english import english
    from plait.job import Job

    return Job(
        name="demo-gpt2",
        model=gpt2,
        data=functools.partial(english, context=CONTEXT),
        loss="plait.losses:model_loss",
        weight="plait.losses:next_tokens",
        optimizer=functools.partial(torch.optim.AdamW, lr=3e-3),
        batch=16,
        steps=STEPS,
    )


def act(directory: Path) -> None:
    """Trace, profile, train, compare, draw."""
    from plait import reference
    from plait.chain import Chain
    from plait.cli.console import console, status
    from plait.cli.profile import print_profile
    from plait.profile import Profile

    show = console()
    task = job()
    with status("tracing GPT-2 and measuring its blocks"):
        chain = Chain.of_job(task, model=task.build_model())
        profile = Profile.measure(chain, (4, 16), repetitions=3, threads=task.threads)
    count = sum(parameter.numel() for parameter in chain.parameters())
    cheapest = min(chain.cut_bytes(task.batch))
    show.print(
        f"{type(chain.model).__name__}: {count:,} parameters in {len(chain)} blocks; the cheapest of "
        f"{len(chain) - 1} cuts passes {cheapest:,} bytes a step of {task.batch} rows"
    )
    print_profile(profile)
    losses = _train(task, chain, directory / "timeline.html")
    plain = reference.train(task, stop_after=CHECKED)
    equal = sum(a == b for a, b in zip(losses, plain.losses, strict=False))
    show.print(
        f"the first {CHECKED} losses, block by block and in plain PyTorch: {equal} of {CHECKED} bit-equal"
    )
    show.print(f"timeline of all {STEPS} steps: {directory / 'timeline.html'}")


def _train(job: Job, chain: Chain, page: Path) -> list[float]:
    """Train the job through the chain, block by block; returns the losses."""
    from plait.cli.console import console, track
    from plait.determinism import reproducible, seed_micro_batch
    from plait.timeline import Timeline
    from plait.visit import Walk

    timeline = Timeline()
    walk = Walk(chain, timeline)
    objective, batches = job.build_objective(), job.build_batches()
    optimizer = job.build_optimizer(chain.named_parameters())
    losses: list[float] = []
    began: list[int] = []
    with reproducible(job.threads):
        for step in track(range(STEPS), "training"):
            began.append(time.perf_counter_ns())
            batch = batches.fetch(batches.indices(step))
            args, kwargs = objective.model_inputs(batch)
            seed_micro_batch(job.seed, step, 0)
            optimizer.zero_grad()
            loss = objective.mean(walk.forward(*args, **kwargs), batch)
            walk.backward(loss)
            with timeline.span("device", "optimizer"):
                optimizer.step()
            losses.append(loss.item())
    console().print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps of real English")
    last = [span for span in timeline.spans if span.start_ms >= began[-DRAWN] / 1e6]
    console().print(f"the last {DRAWN} steps:")
    console().print(Timeline.of(last).draw(width=96), markup=False, highlight=False)
    timeline.export(page)
    return losses
