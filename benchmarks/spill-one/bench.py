"""How fast one model trains in a quarter of the memory that its state takes."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from plait.bench import Bench, Measured
from plait.bench.machine import Moment
from plait.cluster.disk import move_at_once
from plait.errors import LabError
from plait.lab.limited import run_limited
from plait.lab.memory import can_limit

HERE = Path(__file__).parent
ITEM_BYTES = 4
STATE = 4
"""Numbers a parameter: itself, its gradient, and two of Adam."""
LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Torch allocates in large pages, as in a device of spill's; few who train in memory set that."""


def attempt(side: str, config: dict[str, Any], memory: int | None, **env: str) -> dict[str, Any]:
    """One side in a process of its own, within a memory limit if there is one."""
    before = Moment.now()
    command = [sys.executable, str(HERE / "worker.py"), side, json.dumps(config)]
    done = run_limited(command, memory=memory, env={"PYTHONPATH": str(HERE), **env})
    found: dict[str, Any] = json.loads(done.lines[-1])
    return {**found, "activity": Moment.now().since(before), "peak_bytes": done.peak_bytes}


def with_maps(config: dict[str, Any], budget: int) -> tuple[dict[str, Any], int]:
    """Memory maps in the budget, or in the least above it in which the system does not kill them."""
    for tenths in (10, 12, 15, 20):
        room = budget * tenths // 10
        try:
            return attempt("mapped", config, room), room
        except LabError as error:
            print(error, file=sys.stderr)
    raise RuntimeError(f"memory maps ran out of {room} bytes, twice the budget")


def measured(found: list[dict[str, Any]], side: str, *, drop_first: bool) -> Measured:
    """The seconds of a side's steps; the first step of a process that has all in memory warms it up."""
    values = [s for run in found for s in (run["seconds"][1:] if drop_first else run["seconds"])]
    activity = max((run["activity"] for run in found), key=lambda a: a.steal + a.others)
    return Measured(name=side, values=tuple(values), better="lower", activity=activity)


def run(bench: Bench) -> None:
    if not can_limit():
        bench.skip("all", "memory cannot be limited here: there is no control group that can be written")
        return
    shape = bench.pick(
        quick={"width": 1024, "inner": 4096, "blocks": 8}, full={"width": 2048, "inner": 8192, "blocks": 8}
    )
    parameters = shape["blocks"] * (2 * shape["width"] * shape["inner"] + shape["width"] + shape["inner"])
    state_bytes = ITEM_BYTES * STATE * parameters
    # A small model's quarter is less than the processes themselves take.
    budget = max(state_bytes // 4, 900 << 20)
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as directory:
        config: dict[str, Any] = {**shape, "rows": 1024, "threads": 2, "seed": bench.seed}
        config |= {"steps": bench.pick(quick=3, full=5), "memory_bytes": budget, "directory": directory}
        config |= {"prefetch": True}
        bench.configure(**shape, rows=1024, threads=2, parameters=parameters, budget_bytes=budget)
        rounds = bench.pick(quick=1, full=2)
        plain, stock, spilled = [], [], []
        for _ in range(rounds):
            plain.append(attempt("plain", config, None, **LARGE_PAGES))
            stock.append(attempt("plain", config, None))
            spilled.append(attempt("spilled", config, budget))
        mapped, room = with_maps({**config, "steps": 3}, budget)
        alternating = attempt("spilled", {**config, "prefetch": False, "steps": 3}, budget)
        moved = {way: int(spilled[-1][way]) for way in ("read_bytes", "written_bytes")}
        disk_s = move_at_once(Path(directory), **moved)
    for one in spilled:
        if one["losses"] != plain[0]["losses"]:
            raise RuntimeError(f"other losses: {one['losses']}, in memory {plain[0]['losses']}")
    ours = measured(spilled, "spilled", drop_first=False)
    kinds = {
        "in memory, large pages": measured(plain, "plain", drop_first=True),
        "in memory, pages as torch has them": measured(stock, "stock", drop_first=True),
    }
    theirs = min(kinds.values(), key=lambda kind: kind.value)
    bench.case(
        "spilled, a quarter of the state",
        ours,
        unit="s a step",
        limit=("computing alone", theirs),
    )
    bench.case(
        "of the best speed in memory",
        theirs.value / ours.value,
        unit="",
        better="higher",
        at_least=0.9,
        aim=0.97,
    )
    user = measured([mapped], "mapped", drop_first=True)
    bench.configure(mapped_bytes=room)
    bench.case(
        "times the speed of memory maps" + ("" if room == budget else f" in {room / budget:g} of the budget"),
        user.value / ours.value,
        unit="",
        better="higher",
        limit=("in memory", user.value / theirs.value),
        at_least=2.5,
    )
    bench.case("every tensor a memory map", user, unit="s a step")
    for name, kind in kinds.items():
        bench.case(name, kind, unit="s a step")
    bench.case("moved a step", sum(moved.values()) / 1e9, unit="GB", better="lower")
    bench.case("the disk alone, for these bytes", disk_s, unit="s a step", better="lower")
    bench.case(
        "peak memory", max(run["peak_bytes"] for run in spilled) / 2**20, unit="MiB", better="lower",
        at_most=budget / 2**20,
    )  # fmt: skip
    for name, one in (("on", spilled[-1]), ("off", alternating)):
        bench.case(
            f"device idle, double buffering {name}", 100 * one["idle"], unit="% of the time", better="lower"
        )
