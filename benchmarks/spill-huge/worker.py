"""Trains a GPT-2 for a few steps, spilled or all in memory, and prints what came of it."""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from models import gpt2, one_text

from plait import reference
from plait.job import Job
from plait.spill import fit
from plait.timeline import Timeline


def job(config: dict[str, Any]) -> Job:
    return Job(
        name="gpt2",
        model=partial(gpt2, width=config["width"], layers=config["layers"], context=config["context"]),
        data=partial(one_text, context=config["context"]),
        loss="plait.losses:next_token",
        optimizer=partial(torch.optim.SGD, lr=config["rate"]),
        batch=1,
        steps=config["steps"],
        threads=2,
        seed=config["seed"],
    )


def spilled(config: dict[str, Any]) -> dict[str, Any]:
    timeline = Timeline()
    with tempfile.TemporaryDirectory(dir=config["directory"]) as folder:
        outcomes = fit(
            job(config),
            memory=config["memory_bytes"],
            directory=folder,
            export=config["export"],
            timeline=timeline,
            show=lambda line: print(line, file=sys.stderr, flush=True),
        )
    (outcome,) = outcomes
    if not outcome.finished:
        raise RuntimeError(str(outcome))
    ends: dict[int, float] = {}
    begun = 0.0
    for span in timeline.spans:
        if span.track == "device 0" and " create " not in span.name:
            step = int(span.info["step"] or 0)
            ends[step] = span.end_ms
            begun = begun or span.start_ms
    moved = [0.0, 0.0]
    for span in timeline.spans:
        if span.track.startswith("disk") and span.start_ms >= begun and span.end_ms <= max(ends.values()):
            moved["write" in span.track] += int(span.info["bytes"] or 0)
    edges = [begun, *(ends[step] for step in sorted(ends))]
    return {
        "seconds": [1e-3 * (late - early) for early, late in pairwise(edges)],
        "losses": list(outcome.losses),
        "read_bytes": moved[0],
        "written_bytes": moved[1],
        "text": str(outcomes),
    }


def plain(config: dict[str, Any]) -> dict[str, Any]:
    return {"losses": list(reference.train(job(config)).losses)}


if __name__ == "__main__":
    side, settings = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps({"spilled": spilled, "plain": plain}[side](settings)), flush=True)
