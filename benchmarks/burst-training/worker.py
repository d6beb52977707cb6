"""One host's worker: measures, plans, trains the sides by turns; rank 0 prints what they took."""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import nets
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from plait import Chain, Profile, losses
from plait.burst import BurstParallel, BurstPlan, Network, plan
from plait.burst.costs import evaluate
from plait.compress import attach
from plait.compress.collectives import CompressedCollective
from plait.profile import Times

LR, MOMENTUM = 1e-3, 0.9
PROBE_BYTES = 16_000_000


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM, fused=True)


def blocks_of(config: dict[str, Any]) -> list[nn.Module]:
    torch.manual_seed(config["seed"])
    return nets.vgg() if config["kind"] == "vgg" else nets.timed()


class Alone:
    """One device; the others wait."""

    def __init__(self, config: dict[str, Any], width: int = 1) -> None:
        self.width, self.loss = width, 0.0
        self.group = dist.new_group(list(range(width))) if width > 1 else None
        self.runs = dist.get_rank() < width
        if self.runs:
            self.model: nn.Module = nn.Sequential(*blocks_of(config))
            self.forward = self.model
            self.optimizer = optimizer_of(self.model.parameters())

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        if not self.runs:
            return
        x, y = (part.tensor_split(self.width)[dist.get_rank()] for part in batch)
        loss = functional.cross_entropy(self.forward(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = loss.item()


class DataParallel(Alone):
    """DistributedDataParallel on the first hosts, as it comes or with compressed gradients."""

    def __init__(self, config: dict[str, Any], width: int, bits: int | None = None) -> None:
        super().__init__(config, width)
        if self.runs:
            self.forward = DistributedDataParallel(
                self.model, process_group=self.group, init_sync=False, gradient_as_bucket_view=True
            )
            if bits is not None:
                attach(self.forward, bits=bits)


class Burst:
    """Each block as wide as the plan says."""

    def __init__(self, config: dict[str, Any], burst_plan: BurstPlan, bits: int | None = None) -> None:
        self.plan = burst_plan
        chain = Chain.of(blocks_of(config), nets.example(config["kind"], 2)[0])
        collective = None if bits is None else CompressedCollective(bits=bits)
        self.parallel = BurstParallel(chain, burst_plan, loss=losses.cross_entropy, collective=collective)
        self.optimizer = optimizer_of(self.parallel.parameters())
        self.loss = 0.0

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.loss = self.parallel.step(*batch)
        self.optimizer.step()
        self.optimizer.zero_grad()


def wire() -> tuple[float, float]:
    """Bytes a second and seconds of latency, of all-reduces over all hosts, as a ring's formula has them."""
    world = dist.get_world_size()
    times = []
    for bytes in (4, PROBE_BYTES):
        tensor = torch.zeros(bytes // 4)
        found = []
        for _ in range(4):
            dist.barrier()
            begun = time.perf_counter()
            dist.all_reduce(tensor)
            found.append(time.perf_counter() - begun)
        times.append(statistics.median(found[1:]))
    latency_s = times[0] / (2 * (world - 1))
    bandwidth = 2 * (world - 1) / world * PROBE_BYTES / (times[1] - times[0])
    figures = torch.tensor([bandwidth, latency_s], dtype=torch.float64)
    dist.broadcast(figures, 0)
    return figures[0].item(), figures[1].item()


def measure(config: dict[str, Any]) -> Profile:
    """The blocks' times, found by all hosts at once: as when they train, they share the machine's memory."""
    rows, world = config["batch"], dist.get_world_size()
    chain = Chain.of(blocks_of(config), nets.example(config["kind"], 2)[0])
    sizes = sorted({rows // width for width in (1, 2, world)})
    dist.barrier()
    return Profile.measure(chain, sizes, optimizer=optimizer_of, repetitions=config["repetitions"], threads=1)


def joined(profiles: list[Profile]) -> Profile:
    """Every time the median of some measurements'."""

    def times(place: int, size: int) -> Times:
        some = [profile.blocks[place].milliseconds[size] for profile in profiles]
        return Times(
            forward=statistics.median(one.forward for one in some),
            backward=statistics.median(one.backward for one in some),
        )

    blocks = [
        replace(block, milliseconds={size: times(place, size) for size in block.milliseconds})
        for place, block in enumerate(profiles[0].blocks)
    ]
    return replace(profiles[0], blocks=tuple(blocks))


def slowest(seconds: float) -> float:
    figure = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(figure, dist.ReduceOp.MAX)
    return figure.item()


def main(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    bandwidth, latency_s = wire()
    profiles = [measure(config)]
    frontier = plan(profiles[0], devices=world, batch=config["batch"], bandwidth=bandwidth, latency=latency_s)
    told = [frontier.fastest]
    dist.broadcast_object_list(told, 0)  # one plan for all
    sides: dict[str, Any] = {"one device": Alone(config)}
    for width in range(2, world + 1):
        sides[f"DDP {width}"] = DataParallel(config, width)
    sides["burst"] = Burst(config, told[0])
    if config["compressed"]:
        sides["DDP 4 bits"] = DataParallel(config, world, 4)
        sides["burst 4 bits"] = Burst(config, told[0], 4)
    batch = nets.example(config["kind"], config["batch"])
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    order = random.Random(config["seed"])
    for number in range(config["warmup"] + config["rounds"]):
        for name in order.sample(list(sides), len(sides)):
            dist.barrier()
            begun = time.perf_counter()
            sides[name].step(batch)
            took = slowest(time.perf_counter() - begun)
            if number >= config["warmup"]:
                seconds[name].append(took)
        if config["measure_every"] and number % config["measure_every"] == 0:
            profiles.append(measure(config))  # the machine is not always as fast as before
    network = Network.of(bandwidth, latency_s)
    predicted_ms, _ = evaluate(joined(profiles), told[0].widths, batch=config["batch"], network=network)
    record = sides["burst"].parallel.record
    if dist.get_rank() == 0:
        kinds = ("forward", "loss", "backward", "wait", "idle", "sync")
        found = {
            "seconds": seconds,
            "loss": {name: side.loss for name, side in sides.items()},
            "widths": told[0].widths,
            "predicted_ms": predicted_ms,
            "planned_ms": told[0].forecast.step_ms,
            "bandwidth": bandwidth,
            "latency_s": latency_s,
            "last_step_ms": {kind: record.total_ms(kind) for kind in kinds},
            "gaps_ms": sides["burst"].parallel.gaps,
        }
        print("RESULT " + json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's own threads may stumble over the interpreter's end


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
