"""One host's worker: runs the sides by turns, phase after phase, and rank 0 prints what their steps took.

Rank 0 asks for a rate by printing a line; whoever started the workers sets it and answers with a file.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from plait.pipeline import AdaptiveSchedule, ScheduleKFKB, Tuning
from plait.pipeline.orders import Order

CURRENT, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Side:
    """A pipeline of its own: stage, process group and schedule."""

    def __init__(
        self, name: str, config: dict[str, Any], computing: Any, work: Any, limit: int | None
    ) -> None:
        self.name, self.work = name, work
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(backend="gloo")
        module = computing.make_stage(config, self.rank, self.world)
        stage = PipelineStage(module, self.rank, self.world, torch.device("cpu"), group=self.group)
        count, side = config["micro_batches"], config["sides"][name]
        self.schedule: Any
        self.limit_bytes = limit or 0
        self.peak_bytes = 0
        if side == "stock":
            self.schedule = Schedule1F1B(stage, count, loss_fn=work.loss)
        elif side == "adaptive":
            self.schedule = AdaptiveSchedule(
                stage,
                work.rows,
                tuning=Tuning(micro_batches=(count,)),
                memory=None if limit is None else computing.memory(config, self.rank, self.world),
                memory_limit=limit,
                loss_fn=work.loss,
            )
        else:
            self.schedule = ScheduleKFKB(stage, count, loss_fn=work.loss, order=Order.from_json(side))
        self.parameters = list(module.parameters())

    def step(self) -> dict[str, Any]:
        """One step from a common start; how long the slowest rank took, and what there is to know of it."""
        inputs, target = self.work.batch()
        RESET.write_text("5")  # the highest resident memory so far is forgotten
        dist.barrier(self.group)
        begun = time.perf_counter()
        if self.rank == 0:
            self.schedule.step(inputs)
        elif self.rank == self.world - 1:
            self.schedule.step(target=target, losses=[])
        else:
            self.schedule.step()
        took_ms = 1e3 * (time.perf_counter() - begun)
        for parameter in self.parameters:
            parameter.grad = None
        peak_bytes = 1024 * int(CURRENT.read_text().partition("VmHWM:")[2].split()[0])
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        mine = {"ms": took_ms, "peak_bytes": peak_bytes, "limit_bytes": self.limit_bytes}
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, mine, group=self.group)
        return {
            "ms": max(one["ms"] for one in everyone),
            "ranks": everyone,
        }


def ask(request: dict[str, Any], folder: Path, number: int) -> None:
    """Have the rates of links set, and wait for it."""
    if dist.get_rank() == 0:
        print("SET " + json.dumps({**request, "number": number}), flush=True)
        while not (folder / f"set-{number}").exists():
            time.sleep(0.01)
    dist.barrier()


def run(sides: list[Side], config: dict[str, Any]) -> list[dict[str, Any]]:
    """Every phase: its rate, then the sides in an order drawn from the seed, each with so many steps."""
    found: list[dict[str, Any]] = []
    draw = random.Random(config["seed"])
    for number, phase in enumerate(config["phases"]):
        ask({"rate": phase["rate"], "hosts": phase.get("hosts", {})}, Path(config["folder"]), number)
        for side in draw.sample(sides, len(sides)):
            for step in range(phase["steps"].get(side.name, phase["steps"]["others"])):
                schedule = side.schedule
                ran = {} if not isinstance(schedule, ScheduleKFKB) else {"order": schedule.order.label}
                if isinstance(schedule, AdaptiveSchedule) and schedule.decision is not None:
                    decision = schedule.decision
                    ran |= {"predicted_ms": decision.predicted_ms, "kind": decision.kind}
                    ran |= {"reason": decision.reason}
                found.append({"phase": number, "side": side.name, "step": step, **ran, **side.step()})
    return found


def main(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    spec = importlib.util.spec_from_file_location("stage", config["stage"])
    assert spec is not None, config["stage"]
    assert spec.loader is not None, config["stage"]
    computing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(computing)
    work = computing.Work(config)
    sides: list[Side] = []
    for name in config["sides"]:
        # No more memory than another side has taken, where that is asked for.
        taken = [side.peak_bytes for side in sides if side.name == config.get("memory_of")]
        limit = taken[0] if taken and config["sides"][name] == "adaptive" else None
        sides.append(Side(name, config, computing, work, limit))  # connections are made for the slowest rate
        for _ in range(config["warmup"]):  # torch looks at shapes in the first step
            sides[-1].step()
    steps = run(sides, config)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps({"steps": steps}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's own threads may stumble over the interpreter's end


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
