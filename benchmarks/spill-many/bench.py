"""How fast many models train that together, and each by itself, are larger than memory."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

from plait.bench import Bench, Measured
from plait.errors import LabError
from plait.lab.limited import Limited, run_limited
from plait.lab.memory import can_limit
from plait.units import format_bytes
from plait.worker import free_port

WORKER = Path(__file__).with_name("worker.py")
ROOMY = 3 << 30
"""For both devices: with interpreters off, less than one model takes in memory."""
TIGHT = 2 << 30
"""The least in which GPipe runs: its halves fit if blocks are computed again."""
KEPT = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
}
"""Large pages, and what is freed is kept: training in memory is fastest so, and few who train know."""
UNIT = "tokens/s"
SPEED: Any = {"unit": UNIT, "better": "higher"}
CLAIM = "50% to 100% more throughput than pipelines for many large models (Hydra, arXiv 2110.08633)"


def worker(
    side: str, config: dict[str, Any], *, memory: int | None = None, env: dict[str, str] | None = None
) -> dict[str, Any]:
    command = [sys.executable, str(WORKER), side, json.dumps(config)]
    done = run_limited(command, memory=memory, env={"PYTHONPATH": str(WORKER.parent), **(env or {})})
    return last_line(done)


def last_line(done: Limited) -> dict[str, Any]:
    found = [json.loads(line) for line in done.lines if line.startswith("{")]
    return {**found[-1], "peak_bytes": done.peak_bytes}


def beside(side: str, config: dict[str, Any], env: dict[str, str] = KEPT) -> dict[str, Any]:
    """Two processes, each with half of the jobs and a core; the slower one's time."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    halves = [{**config, "jobs": config["jobs"][i::2], "core": core} for i, core in enumerate(cores)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(partial(worker, side, env=env), halves))
    losses = {name: values for one in found for name, values in one.get("losses", {}).items()}
    return {"seconds": max(one["seconds"] for one in found), "losses": losses}


def piped(config: dict[str, Any], *, memory: int | None = None, env: dict[str, str] = KEPT) -> dict[str, Any]:
    """Two processes, each with half of every model, within one limit."""
    contract = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    settings = {**config, "core": sorted(os.sched_getaffinity(0))[0]}
    rank = shlex.join([sys.executable, str(WORKER), "piped", json.dumps(settings)])
    both = ["sh", "-c", f"RANK=1 {rank} & RANK=0 {rank} && wait $!"]
    env = {"PYTHONPATH": str(WORKER.parent), **contract, **env}
    return last_line(run_limited(both, memory=memory, env=env))


def best_pipe(bench: Bench, config: dict[str, Any], memory: int) -> tuple[str, float] | None:
    """The fastest GPipe that stays within the limit: activations kept if they fit, or computed again."""
    found: dict[str, float] = {}
    for recompute in (False, True):
        for pieces, env in ((pieces, env) for pieces in (4, 8) for env in (KEPT, {})):
            again, freed = ", recomputed" if recompute else "", ", memory kept" if env else ""
            name = f"GPipe, {pieces} pieces{again}{freed}, same limit"
            try:
                settings = {**config, "pieces": pieces, "recompute": recompute}
                found[name] = piped(settings, memory=memory, env=env)["seconds"]
            except LabError as error:
                bench.skip(name, error.what)
        if found:
            break
    best = min(found, key=found.__getitem__, default=None)
    return None if best is None else (best, found[best])


def run(bench: Bench) -> None:
    if not can_limit() or len(os.sched_getaffinity(0)) < 2:
        bench.skip("all", "memory cannot be limited here, or there are not two cores")
        return
    jobs = bench.pick(quick=4, full=8)
    config: dict[str, Any] = {"width": 512, "layers": 12, "context": 64, "rows": 32, "pieces": 4}
    config |= {"steps": bench.pick(quick=1, full=3), "seed": bench.seed, "jobs": list(range(jobs))}
    bench.configure(**{**config, "jobs": jobs}, devices=2, optimizer="AdamW, fused")
    bench.configure(memory_bytes=ROOMY, tight_memory_bytes=TIGHT)
    config |= {"policy": "sticky", "devices": 2, "recompute": False}
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as directory:
        config |= {"directory": directory}
        in_memory = _against_memory(bench, config)
        _against_peers(bench, config, *in_memory)
    bench.skip("DeepSpeed's offload", "it needs an accelerator, or builds its kernels with one's compiler")


def _tokens(config: dict[str, Any]) -> int:
    return int(len(config["jobs"]) * config["steps"] * config["rows"] * config["context"])


def _spilled(config: dict[str, Any], memory: int, **changes: Any) -> dict[str, Any]:
    return worker("spilled", {**config, "memory_bytes": memory, **changes}, memory=memory)


def _check(found: dict[str, Any], losses: dict[str, list[float]]) -> dict[str, Any]:
    if found["losses"] != losses:
        raise RuntimeError("losses differ from those in memory")
    return found


def _against_memory(bench: Bench, config: dict[str, Any]) -> tuple[dict[str, list[float]], Measured]:
    """What spilling costs, and what a second device gives; the losses and the speed in memory."""
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "in memory": [], "one device": []}

    def side(name: str, train: Callable[[], dict[str, Any]]) -> Callable[[], float]:
        def turn() -> float:
            runs[name].append(train())
            return _tokens(config) / float(runs[name][-1]["seconds"])

        return turn

    ours, both_cores, alone = bench.interleave(
        {
            "ours": side("ours", lambda: _spilled(config, ROOMY)),
            "in memory": side("in memory", lambda: beside("plain", config)),
            "one device": side("one device", lambda: _spilled(config, ROOMY, devices=1)),
        },
        repetitions=bench.pick(quick=1, full=2),
        warmup=0,
        better="higher",
    )
    losses = runs["in memory"][0]["losses"]
    for found in chain(*runs.values()):
        _check(found, losses)
    few = {**config, "jobs": config["jobs"][:2], "core": min(os.sched_getaffinity(0))}
    one_core = _tokens(few) / worker("plain", few, env=KEPT)["seconds"]
    bench.case(
        f"{len(config['jobs'])} models, 2 devices, {format_bytes(ROOMY)}",
        ours,
        unit=UNIT,
        against=("two processes, in memory", both_cores),
        at_least=0.95,
    )
    bench.case(
        "the same over one device",
        ours,
        unit=UNIT,
        against=("1 device, spilled", alone),
        limit=(
            "1 device x what two processes in memory give over one",
            alone.scaled(both_cores.value / one_core),
        ),
        at_least=1.85,
    )
    stock = _tokens(config) / _check(beside("plain", config, env={}), losses)["seconds"]
    bench.case("two processes, in memory, as torch has it", stock, **SPEED)
    bench.case("one process, in memory", one_core, **SPEED)
    _aside(bench, "ours", max(runs["ours"], key=itemgetter("peak_bytes")), ROOMY)
    return losses, both_cores


def _against_peers(
    bench: Bench, config: dict[str, Any], losses: dict[str, list[float]], both_cores: Measured
) -> None:
    """What is gained over the other ways to train models that do not fit."""
    tokens = _tokens(config)
    ours = _check(_spilled(config, TIGHT), losses)
    alone = _check(_spilled(config, TIGHT, devices=1), losses)
    peers = {"one model after another, spilled": alone["seconds"]}
    pipe = best_pipe(bench, config, TIGHT)
    if pipe is not None:
        peers[pipe[0]] = pipe[1]
    maps = "memory maps, a thread a core"
    try:
        peers[maps] = worker("mapped", config, memory=TIGHT)["seconds"]
    except LabError as error:
        bench.skip(maps, error.what)
    best = min(peers, key=peers.__getitem__)
    bench.case(
        f"{len(config['jobs'])} models, 2 devices, {format_bytes(TIGHT)}",
        tokens / ours["seconds"],
        **SPEED,
        against=(best, tokens / peers[best]),
        limit=("two processes, in memory", both_cores),
        at_least=1.25,
        aim=1.5,
        published=CLAIM,
    )
    for name, seconds in peers.items():
        bench.case(name, tokens / seconds, **SPEED)
    bench.case("GPipe, 4 pieces, no limit", tokens / piped(config)["seconds"], **SPEED)
    _aside(bench, f"ours, {format_bytes(TIGHT)}", ours, TIGHT)
    if bench.quick:
        return
    try:
        lrtf = _check(_spilled(config, TIGHT, policy="lrtf"), losses)
    except LabError as error:  # it keeps graphs of more jobs on a device than a plan foresees
        bench.skip("Sharded-LRTF", error.what)
        return
    bench.case("Sharded-LRTF", tokens / lrtf["seconds"], **SPEED)
    _aside(bench, "Sharded-LRTF", lrtf, TIGHT)


def _aside(bench: Bench, name: str, found: dict[str, Any], memory: int) -> None:
    bench.case(f"moved, {name}", found["moved_bytes"] / 1e9, unit="GB", better="lower")
    bench.case(f"devices idle, {name}", 100 * found["idle"], unit="% of the time", better="lower")
    peak, most = found["peak_bytes"] / 2**20, memory / 2**20
    bench.case(f"peak memory, {name}", peak, unit="MiB", better="lower", at_most=most)
