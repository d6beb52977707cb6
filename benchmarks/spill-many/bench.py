"""How fast many models train that together, and each by itself, are larger than memory."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from plait.bench import Bench
from plait.errors import LabError
from plait.lab.limited import run_limited
from plait.lab.memory import can_limit
from plait.worker import free_port

WORKER = Path(__file__).with_name("worker.py")
JOBS = 8
CLAIM = "50% to 100% more throughput than pipelines for many large models (Hydra, arXiv 2110.08633)"


def worker(
    side: str, config: dict[str, Any], *, memory: int | None = None, env: dict[str, str] | None = None
) -> dict[str, Any]:
    command = [sys.executable, str(WORKER), side, json.dumps(config)]
    done = run_limited(command, memory=memory, env={"PYTHONPATH": str(WORKER.parent), **(env or {})})
    found = [json.loads(line) for line in done.lines if line.startswith("{")]
    return {**(found[-1] if found else {}), "peak_bytes": done.peak_bytes}


def beside(side: str, config: dict[str, Any]) -> dict[str, Any]:
    """Two processes, each with half of the jobs and a core; the slower one's time."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    halves = [{**config, "jobs": config["jobs"][i::2], "core": core} for i, core in enumerate(cores)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(partial(worker, side), halves))
    losses = {name: values for one in found for name, values in one.get("losses", {}).items()}
    return {"seconds": max(one["seconds"] for one in found), "losses": losses}


def piped(config: dict[str, Any]) -> dict[str, Any]:
    """Two processes, each with half of every model."""
    contract = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    settings = {**config, "core": sorted(os.sched_getaffinity(0))[0]}
    with ThreadPoolExecutor(2) as pool:
        ranks = [{"RANK": str(rank), **contract} for rank in range(2)]
        found = list(pool.map(lambda env: worker("piped", settings, env=env), ranks))
    return found[0]


def run(bench: Bench) -> None:
    if not can_limit() or len(os.sched_getaffinity(0)) < 2:
        bench.skip("all", "memory cannot be limited here, or there are not two cores")
        return
    config: dict[str, Any] = {"width": 512, "layers": 12, "context": 64, "rows": 32, "pieces": 4}
    config |= {"steps": bench.pick(quick=1, full=3), "seed": bench.seed, "jobs": list(range(JOBS))}
    memory = 1536 << 20
    bench.configure(**{**config, "jobs": JOBS}, memory_bytes=memory, devices=2, optimizer="AdamW, fused")
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as directory:
        config |= {"directory": directory, "memory_bytes": memory, "policy": "sticky", "devices": 2}
        ours = worker("spilled", config, memory=memory)
        ceiling = beside("plain", config)
        spilled = {"ours": ours}
        try:
            spilled["Sharded-LRTF"] = worker("spilled", {**config, "policy": "lrtf"}, memory=memory)
        except LabError as error:  # it keeps graphs of more jobs on a device than a plan foresees
            bench.skip("Sharded-LRTF, spilled", error.what)
        alone = worker("spilled", {**config, "devices": 1}, memory=memory)
        peers = {"one model after another, spilled": alone["seconds"]}
        peers["GPipe over both cores, in memory"] = piped(config)["seconds"]
        maps = "memory maps, a thread a core"
        try:
            peers[maps] = worker("mapped", config, memory=memory)["seconds"]
        except LabError as error:
            bench.skip(maps, error.what)
    for found in (*spilled.values(), alone):
        if found["losses"] != ceiling["losses"]:
            raise RuntimeError("losses differ from those in memory")
    tokens = JOBS * config["steps"] * config["rows"] * config["context"]
    speed = {"unit": "tokens/s", "better": "higher"}
    bench.case(
        "8 models, 2 devices, spilled",
        tokens / ours["seconds"],
        **speed,
        against=("two processes, in memory", tokens / ceiling["seconds"]),
        at_least=0.95,
    )
    bench.case(
        "the same over one device",
        tokens / ours["seconds"],
        **speed,
        against=("1 device, spilled", tokens / alone["seconds"]),
        at_least=1.85,
    )
    best = min(peers, key=peers.__getitem__)
    bench.case(
        "the same over the best peer",
        tokens / ours["seconds"],
        **speed,
        against=(best, tokens / peers[best]),
        limit=("two processes, in memory", tokens / ceiling["seconds"]),
        at_least=1.25,
        aim=1.5,
        published=CLAIM,
    )
    for name, seconds in peers.items():
        bench.case(name, tokens / seconds, **speed)
    for name, found in spilled.items():
        if name != "ours":
            bench.case(f"{name}, spilled", tokens / found["seconds"], **speed)
        bench.case(f"moved, {name}", found["moved_bytes"] / 1e9, unit="GB", better="lower")
        bench.case(f"devices idle, {name}", 100 * found["idle"], unit="% of the time", better="lower")
    bench.case(
        "peak memory, ours", ours["peak_bytes"] / 2**20, unit="MiB", better="lower", at_most=memory / 2**20
    )
    bench.skip("DeepSpeed's offload", "it needs an accelerator, or builds its kernels with one's compiler")
