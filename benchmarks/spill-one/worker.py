"""One side of the benchmark: trains the model and prints how long each step took and what it lost."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models import perceptrons, rows
from torch import nn

from plait import reference
from plait.determinism import reproducible, seed_micro_batch
from plait.job import Job
from plait.spill import fit
from plait.timeline import Timeline


def job(config: dict[str, Any]) -> Job:
    width = config["width"]
    return Job(
        name="perceptrons",
        model=partial(perceptrons, width=width, inner=config["inner"], blocks=config["blocks"]),
        data=partial(rows, width=width, count=config["rows"] * config["steps"]),
        loss="plait.losses:mean_squared_error",
        optimizer=partial(torch.optim.Adam, lr=1e-4, fused=True),
        batch=config["rows"],
        steps=config["steps"],
        threads=config["threads"],
        seed=config["seed"],
    )


def plain(config: dict[str, Any]) -> dict[str, Any]:
    """All in memory."""
    seconds: list[float] = []
    result = reference.train(job(config), on_step=lambda step: seconds.append(step.seconds))
    return {"seconds": seconds, "losses": list(result.losses)}


def mapped(config: dict[str, Any]) -> dict[str, Any]:
    """Every tensor that lasts is a shared memory map of a file: the system pages as it sees fit."""
    what = job(config)
    seconds: list[float] = []
    losses: list[float] = []
    with tempfile.TemporaryDirectory(dir=config["directory"]) as folder, reproducible(what.threads):
        count = 0

        def file(like: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            name = str(Path(folder) / str(count))
            return torch.from_file(name, shared=True, size=like.numel(), dtype=like.dtype).view(like.shape)

        with torch.device("meta"):
            model = what.make_model()
        for name, parameter in list(model.named_parameters()):
            owner, _, attribute = name.rpartition(".")
            real = nn.Parameter(file(parameter))
            nn.init.normal_(real, std=0.02)
            real.grad = file(parameter)
            setattr(model.get_submodule(owner), attribute, real)
        optimizer = what.build_optimizer(model.named_parameters())
        for parameter in model.parameters():
            moments = {name: file(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
        batches, objective = what.build_batches(), what.build_objective()
        for step in range(config["steps"]):
            begun = time.perf_counter()
            seed_micro_batch(what.seed, step, 0)
            batch = batches.fetch(batches.indices(step))
            args, kwargs = objective.model_inputs(batch)
            loss = objective.loss(model(*args, **kwargs), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            losses.append(loss.item())
            seconds.append(time.perf_counter() - begun)
    return {"seconds": seconds, "losses": losses}


def spilled(config: dict[str, Any]) -> dict[str, Any]:
    """plait.spill."""
    timeline = Timeline()
    with tempfile.TemporaryDirectory(dir=config["directory"]) as folder:
        outcomes = fit(
            job(config),
            memory=config["memory_bytes"],
            directory=folder,
            export=False,
            prefetch=config["prefetch"],
            timeline=timeline,
            show=lambda line: print(line, file=sys.stderr),
        )
    (outcome,) = outcomes
    if not outcome.finished:
        raise RuntimeError(str(outcome))
    ends: dict[int, float] = {}
    for span in timeline.spans:
        if span.track == "device 0" and " create " not in span.name:
            ends[int(span.info["step"] or 0)] = span.end_ms
    moved = {
        way: sum(
            int(s.info["bytes"] or 0)
            for s in timeline.spans
            if s.track == f"disk {way}" and s.start_ms >= ends[0]
        )
        for way in ("read", "write")
    }
    first = min(span.start_ms for span in timeline.spans if span.info.get("step") == 1)
    window = max(ends.values()) - first
    busy = sum(s.end_ms - s.start_ms for s in timeline.spans if s.track == "device 0" and s.start_ms >= first)
    return {
        "seconds": [1e-3 * (ends[step] - ends[step - 1]) for step in range(1, len(ends))],
        "losses": list(outcome.losses),
        "idle": 1 - busy / window,
        "read_bytes": moved["read"] / (len(ends) - 1),
        "written_bytes": moved["write"] / (len(ends) - 1),
        "text": str(outcomes),
    }


if __name__ == "__main__":
    side, settings = sys.argv[1], json.loads(sys.argv[2])
    answer = {"plain": plain, "mapped": mapped, "spilled": spilled}[side](settings)
    print(json.dumps({"side": side, **answer}), flush=True)
