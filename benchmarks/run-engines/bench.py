"""A step under the Ray engine against the same step under the local one."""

from __future__ import annotations

import importlib.util
import json
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import plait
from plait.bench import Bench
from plait.demo.chain import gpt2
from plait.engine import Run
from plait.engine.machine import this_machine
from plait.english import english
from plait.extras import install
from plait.job import Job

UNCOUNTED = 5
"""Steps at the start that are slower than others."""


def jobs(steps: int) -> list[Job]:
    first = Job(
        name="first",
        model=partial(gpt2, width=128, layers=4),
        data=partial(english, context=64),
        loss="plait.losses:model_loss",
        weight="plait.losses:next_tokens",
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        batch=16,
        steps=steps,
        strategy="data",
    )
    return [first, replace(first, name="second", seed=1, steps=steps // 2)]


def run(bench: Bench) -> None:
    if importlib.util.find_spec("ray") is None:
        bench.skip("all", f"Ray is missing: {install('ray')}")
        return
    steps = bench.pick(quick=40, full=120)
    bench.configure(steps=steps, uncounted=UNCOUNTED)
    losses: dict[str, list[tuple[float, ...]]] = {"local": [], "ray": []}
    starting: dict[str, list[float]] = {"local": [], "ray": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster = this_machine(devices=2, memory_bytes=None, directory=folder)
        plait.plan(jobs(steps), cluster)  # measures the profiles, which are then kept

        def once(engine: str) -> float:
            begun = time.time()
            place = folder / f"{engine}{time.monotonic_ns()}"
            done = plait.run(jobs(steps), cluster, engine, directory=place, show=False)  # type: ignore[arg-type]
            losses[engine].append(tuple(loss for job in done.values() for loss in job.losses))
            at = told(done)
            starting[engine].append(at[0] - begun)
            return 1e3 * statistics.median(
                b - a for a, b in zip(at[UNCOUNTED:], at[UNCOUNTED + 1 :], strict=False)
            )

        ray, local = bench.interleave(
            {"ray": lambda: once("ray"), "local": lambda: once("local")},
            repetitions=bench.pick(quick=2, full=5),
            warmup=0,
            better="lower",
            retries=1,
        )
    bench.case(
        "a step under the Ray engine", ray, unit="ms", against=("the local engine", local), at_least=0.95
    )
    for engine, values in starting.items():
        bench.case(
            f"from the call to the first step's end, {engine}",
            statistics.median(values),
            unit="s",
            better="lower",
        )
    unequal = sum(
        a != b
        for ours, theirs in zip(losses["ray"], losses["local"], strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )
    bench.case("losses that differ in any bit", float(unequal), unit="steps", better="lower", at_most=0)


def told(done: Run) -> list[float]:
    """When the steps of the first job ended."""
    rows = [json.loads(line) for line in (done.directory / "metrics.jsonl").read_text().splitlines()]
    return [row["time"] for row in rows if row["job"] == "first" and "loss" in row]
