"""One host's worker: measures blocks and wire, trains in every way by turns; rank 0 prints what it took."""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import sys
import time
from dataclasses import asdict, replace
from typing import Any

import models
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from plait import Chain, Profile
from plait.burst import BurstParallel, plan
from plait.compress import attach
from plait.compress.collectives import CompressedCollective
from plait.compress.communicator import current, prepare
from plait.compress.settings import Settings
from plait.pipeline import ScheduleKFKB
from plait.pipeline.network import Network
from plait.pipeline.planning import plan as plan_pipeline
from plait.profile import Times
from plait.sim.reduction import codec_of

Batch = tuple[torch.Tensor, torch.Tensor]


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, fused=True)


def blocks_of(config: dict[str, Any]) -> list[nn.Module]:
    torch.manual_seed(config["seed"])
    return models.blocks(config["kind"])


class Data:
    """DistributedDataParallel, as it comes or with compressed gradients."""

    def __init__(self, config: dict[str, Any], bits: int | None) -> None:
        self.model = DistributedDataParallel(
            nn.Sequential(*blocks_of(config)), init_sync=False, gradient_as_bucket_view=True
        )
        if bits is not None:
            attach(self.model, bits=bits)
        self.optimizer = optimizer_of(self.model.parameters())

    def step(self, batch: Batch) -> None:
        x, y = (part.tensor_split(dist.get_world_size())[dist.get_rank()] for part in batch)
        models.loss(self.model(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Burst:
    """Each block as wide as the plan says."""

    def __init__(self, config: dict[str, Any], made: Any, bits: int | None) -> None:
        chain = Chain.of(blocks_of(config), models.example(config["kind"], 2)[0])
        collective = None if bits is None else CompressedCollective(codec=codec_of(bits))
        self.parallel = BurstParallel(chain, made, loss=models.loss_of, collective=collective)
        self.optimizer = optimizer_of(self.parallel.parameters())

    def step(self, batch: Batch) -> None:
        self.parallel.step(*batch)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Pipeline:
    """A stage a host."""

    def __init__(self, config: dict[str, Any], made: Any) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        own = made.stages[rank]
        stage = nn.Sequential(*blocks_of(config)[own.first : own.end])
        self.schedule = ScheduleKFKB(
            PipelineStage(stage, rank, world, torch.device("cpu")),
            n_microbatches=made.order.micro_batches,
            loss_fn=models.loss,
        )
        self.schedule.change(order=made.order)
        self.optimizer = optimizer_of(stage.parameters())
        self.first, self.last = rank == 0, rank == world - 1

    def step(self, batch: Batch) -> None:
        self.schedule.step(*batch[:1] if self.first else (), **({"target": batch[1]} if self.last else {}))
        self.optimizer.step()
        self.optimizer.zero_grad()


def wire(probe_bytes: int) -> dict[str, float]:
    """Bytes a second and seconds of latency, as a ring's formula has them; processor seconds a byte sent."""
    world = dist.get_world_size()
    times, busy = [], []
    for size in (4, probe_bytes):
        tensor = torch.zeros(size // 4)
        found = []
        for _ in range(4):
            dist.barrier()
            begun, used = time.perf_counter(), _processor_s()
            dist.all_reduce(tensor)
            found.append(time.perf_counter() - begun)
            busy.append(_processor_s() - used)
        times.append(statistics.median(found[1:]))
    sent = 2 * (world - 1) / world * probe_bytes
    figures = torch.tensor(
        [sent / (times[1] - times[0]), times[0] / (2 * (world - 1)), statistics.median(busy[-3:]) / sent],
        dtype=torch.float64,
    )
    dist.broadcast(figures, 0)
    return dict(zip(("bandwidth", "latency_s", "busy_s_per_byte"), figures.tolist(), strict=True))


def packing() -> dict[str, Any]:
    """What plait's thread needs for a byte on the wire, the codec for one of fp32; on all hosts at once."""
    codec = codec_of(4)
    pace, speeds = current().measured(prepare(), [codec], Settings())
    return {"own_busy_s_per_byte": pace.busy_s_per_byte, "speed": asdict(speeds[codec])}


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(config: dict[str, Any]) -> Profile:
    """The blocks' times, found by all hosts at once: as when they train, they share the machine."""
    chain = Chain.of(blocks_of(config), models.example(config["kind"], 2)[0])
    dist.barrier()
    return Profile.measure(
        chain, config["sizes"], optimizer=optimizer_of, repetitions=config["repetitions"], threads=1
    )


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


def ways(config: dict[str, Any], profile: Profile, link: dict[str, float]) -> dict[str, tuple[Any, Any]]:
    """By name, what trains, and the plan that it follows (None where the name says all)."""
    world, rows = dist.get_world_size(), config["batch"]
    found: dict[str, tuple[Any, Any]] = {}
    for name in config["ways"]:
        strategy, _, more = name.partition(", ")
        bits = 4 if more == "4 bits" else None
        if strategy == "data":
            found[name] = (Data(config, bits), None)
        elif strategy == "burst":
            told: list[Any] = [
                plan(
                    profile, devices=world, batch=rows, bandwidth=link["bandwidth"], latency=link["latency_s"]
                ).fastest
            ]
            dist.broadcast_object_list(told, 0)
            found[name] = (Burst(config, told[0], bits), told[0].to_json())
        else:
            network = Network.uniform(
                world, latency_ms=1e3 * link["latency_s"], bytes_per_s=link["bandwidth"]
            )
            counts = [config["micro_batches"]]
            made = plan_pipeline(
                profile, world, global_batch=rows, micro_batches=counts, network=network, families=("kfkb",)
            )
            from plait.pipeline.orders import kfkb

            told = [replace(made, order=kfkb(world, counts[0], int(more.removeprefix("k=")))).to_json()]
            dist.broadcast_object_list(told, 0)
            from plait.pipeline.plan import PipelinePlan

            found[name] = (Pipeline(config, PipelinePlan.from_json(told[0])), told[0])
    return found


def slowest(seconds: float) -> float:
    figure = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(figure, dist.ReduceOp.MAX)
    return figure.item()


def main(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    link, packed, profiles = wire(config["probe_bytes"]), packing(), [measure(config)]
    trained = ways(config, profiles[0], link)
    batch = models.example(config["kind"], config["batch"])
    seconds: dict[str, list[float]] = {name: [] for name in trained}
    order = random.Random(config["seed"])
    for number in range(2 + config["rounds"]):
        for name in order.sample(list(trained), len(trained)):
            dist.barrier()
            begun = time.perf_counter()
            trained[name][0].step(batch)
            took = slowest(time.perf_counter() - begun)
            if number >= 2:
                seconds[name].append(took)
        if config["measure_every"] and number % config["measure_every"] == 0:
            profiles.append(measure(config))  # the machine is not always as fast as before
    if dist.get_rank() == 0:
        found = {
            "seconds": seconds,
            "profile": joined(profiles).to_json(),
            "plans": {name: made for name, (_, made) in trained.items()},
            **link,
            **packed,
        }
        print("RESULT " + json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's own threads may stumble over the interpreter's end


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
