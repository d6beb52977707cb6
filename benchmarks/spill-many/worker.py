"""Trains some of the jobs in one of the ways that are compared, and prints when each of its steps ended."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from functools import partial
from itertools import count
from typing import Any

import torch
from models import gpt2
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from plait import reference
from plait.determinism import reproducible
from plait.english import english
from plait.job import Job
from plait.spill import fit
from plait.timeline import Timeline


def job(config: dict[str, Any], number: int) -> Job:
    model = {name: config[name] for name in ("width", "layers", "context")}
    return Job(
        name=f"model-{number}",
        model=partial(gpt2, **model),
        data=partial(english, context=config["context"]),
        loss="plait.losses:next_token",
        optimizer=partial(torch.optim.AdamW, lr=1e-4 * (1 + number), fused=True),
        batch=config["rows"],
        steps=config["steps"],
        threads=1,
        seed=config["seed"] + number,
    )


def spilled(config: dict[str, Any]) -> dict[str, Any]:
    """All jobs, on all devices."""
    timeline = Timeline()
    with tempfile.TemporaryDirectory(dir=config["directory"]) as folder:
        outcomes = fit(
            [job(config, number) for number in config["jobs"]],
            memory=config["memory_bytes"],
            devices=config["devices"],
            policy=config["policy"],
            directory=folder,
            export=False,
            timeline=timeline,
            show=lambda line: print(line, file=sys.stderr, flush=True),
        )
    bad = [outcome for outcome in outcomes if not outcome.finished]
    if bad:
        raise RuntimeError(str(bad[0]))
    spans = [s for s in timeline.spans if s.track.startswith("device")]
    units = [s for s in spans if " create " not in s.name]
    begun, ended = min(s.start_ms for s in units), max(s.end_ms for s in units)
    # Models are created when their turn comes. The other sides create theirs before they look at the clock.
    creating = sum(s.end_ms - s.start_ms for s in spans if " create " in s.name and s.start_ms > begun)
    taken = ended - begun - creating / config["devices"]
    return {
        "seconds": taken / 1e3,
        "idle": 1 - sum(s.end_ms - s.start_ms for s in units) / (config["devices"] * taken),
        "losses": {outcome.name: list(outcome.losses) for outcome in outcomes},
        "moved_bytes": outcomes.measured.read_bytes + outcomes.measured.written_bytes,
        "bound_seconds": outcomes.bound_seconds,
    }


def plain(config: dict[str, Any]) -> dict[str, Any]:
    """One job after another, each all in memory, on one core."""
    os.sched_setaffinity(0, {config["core"]})
    losses: dict[str, list[float]] = {}
    seconds = 0.0
    for number in config["jobs"]:
        result = reference.train(job(config, number))
        losses[f"model-{number}"] = list(result.losses)
        seconds += result.seconds
    return {"seconds": seconds, "losses": losses}


def mapped(config: dict[str, Any]) -> dict[str, Any]:
    """One job after another on both cores, every tensor that lasts a shared memory map of a file."""
    seconds = 0.0
    for number in config["jobs"]:
        what = job(config, number)
        with tempfile.TemporaryDirectory(dir=config["directory"]) as folder, reproducible(2):
            files = count()

            def file(like: torch.Tensor, files: Any = files, folder: str = folder) -> torch.Tensor:
                name = os.path.join(folder, str(next(files)))
                made = torch.from_file(name, shared=True, size=like.numel(), dtype=like.dtype)
                return made.view(like.shape).copy_(like)

            model = what.build_model("cpu")
            for parameter in model.parameters():
                parameter.data = file(parameter.data)
                parameter.grad = file(torch.zeros_like(parameter))
            optimizer = what.build_optimizer(model.named_parameters())
            for parameter in model.parameters():
                moments = {name: file(torch.zeros_like(parameter)) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
            batches, objective = what.build_batches(), what.build_objective()
            begun = time.perf_counter()
            for step in range(config["steps"]):
                batch = batches.fetch(batches.indices(step))
                args, kwargs = objective.model_inputs(batch)
                objective.loss(objective.call(model, args, kwargs), batch).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            seconds += time.perf_counter() - begun
    return {"seconds": seconds}


def piped(config: dict[str, Any]) -> dict[str, Any]:
    """One job after another, each cut in two stages on two cores: PyTorch's own GPipe."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {config["core"] + rank})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seconds, pieces = 0.0, config["pieces"]
    for number in config["jobs"]:
        what = job(config, number)
        batches = what.build_batches()
        model = what.build_model("cpu")
        half = Half(model, rank, config["layers"] // 2, recompute=config["recompute"])
        del model
        optimizer = what.build_optimizer(half.named_parameters())
        stage = PipelineStage(half, rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, pieces, loss_fn=shifted)
        for step in range(config["steps"] + 1):  # the first asks for shapes, and is not counted
            if step == 1:
                dist.barrier()
                begun = time.perf_counter()
            ids = batches.fetch(batches.indices(min(step, config["steps"] - 1)))["input_ids"]
            if rank == 0:
                schedule.step(ids)
            else:
                schedule.step(target=ids)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        dist.barrier()
        seconds += time.perf_counter() - begun
    dist.barrier()
    if rank == 0:
        print(json.dumps({"seconds": seconds}), flush=True)
    os._exit(0)  # gloo's own threads may stumble over the interpreter's end


class Half(nn.Module):
    """The first or the second half of a GPT-2."""

    def __init__(self, model: Any, rank: int, cut: int, *, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        body = model.transformer
        self.blocks = body.h[:cut] if rank == 0 else body.h[cut:]
        self.words, self.places = (body.wte, body.wpe) if rank == 0 else (None, None)
        self.norm, self.head = (None, None) if rank == 0 else (body.ln_f, model.lm_head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.words is not None and self.places is not None:
            x = self.words(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            out = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
            x = out if isinstance(out, torch.Tensor) else out[0]
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def shifted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())


if __name__ == "__main__":
    side, settings = sys.argv[1], json.loads(sys.argv[2])
    print(
        json.dumps({"spilled": spilled, "plain": plain, "mapped": mapped, "piped": piped}[side](settings)),
        flush=True,
    )
