"""One host's worker: trains the sides by turns, each a model of its own, and rank 0 prints what they took."""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, draws, windows
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from plait import native
from plait.compress import Adaptation, Compression, attach

Batches = Iterator[tuple[Tensor, Tensor]]


def batches(rows: int, length: int, seed: int) -> Batches:
    inputs, targets = windows()
    for drawn in draws(len(inputs), rows, seed, dist.get_rank()):
        yield inputs[drawn, :length], targets[drawn, :length]


class Side:
    """A model in training, with one way of exchanging gradients."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        torch.manual_seed(config["seed"])
        self.name = name
        self.model = GPT(config["width"], config["layers"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.batches = batches(config["rows"], config["length"], config["seed"])
        self.attached = None
        self.loss = math.nan
        # PowerSGD starts collectives from callbacks; with several buckets their order differs between ranks,
        # which gloo ends as a mismatch. One bucket is what it can do.
        bucket_mb = 1024 if name.startswith("PowerSGD") else None
        # All workers have drawn the same weights, so none need to be sent around.
        self.forward = DistributedDataParallel(
            self.model, init_sync=False, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb
        )
        if name == "alone":
            self.forward.register_comm_hook(None, noop_hook)
        elif name == "4 bits":
            self.attached = attach(self.forward, bits=4)
        elif name == "auto":
            fields = dict(config["auto"])
            adaptation = Adaptation(**fields.pop("adaptation"))
            self.attached = attach(self.forward, compression=Compression(**fields, adaptation=adaptation))
        elif name == "fp16 hook":
            self.forward.register_comm_hook(None, fp16_compress_hook)
        elif name.startswith("PowerSGD"):
            state = PowerSGDState(
                None, matrix_approximation_rank=int(name.split()[-1]), start_powerSGD_iter=2
            )
            self.forward.register_comm_hook(state, powerSGD_hook)
        elif name != "fp32":
            raise SystemExit(f"there is no side {name!r}")

    def step(self) -> list[float]:
        """Train on one batch; when the forward pass, the backward pass and the update began, and the end."""
        inputs, targets = next(self.batches)
        marks = [time.perf_counter()]
        loss = functional.cross_entropy(self.forward(inputs), targets)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = loss.item()
        return [*marks, time.perf_counter()]

    def counted(self) -> dict[str, float]:
        """What the attachment has counted so far."""
        if self.attached is None:
            return {}
        report = self.attached.report()
        total = report.total
        return {
            "sent_bytes": total.sent_bytes,
            "plain_bytes": total.plain_bytes,
            "exposed_s": report.exposed_s,
            "pack_s": total.pack_s,
            "unpack_s": total.unpack_s,
            "wire_s": total.wire_s,
        }


def slowest(seconds: float) -> float:
    figure = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(figure, dist.ReduceOp.MAX)
    return figure.item()


def check(side: Side) -> None:
    """Stop the benchmark of a side that is fast because it is wrong."""
    mine = [native.checksum(parameter.detach()) for parameter in side.model.parameters()]
    everyone: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if everyone[0] != mine or not math.isfinite(side.loss):
        raise SystemExit(f"{side.name}: loss {side.loss}, weights differ: {everyone[0] != mine}")


def train(sides: list[Side], config: dict[str, Any]) -> dict[str, Any]:
    """Rounds in which every side makes some steps, in an order drawn from the seed."""
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    parts: list[list[float]] = []
    before = {side.name: side.counted() for side in sides}
    order = random.Random(config["seed"])
    steps = config["steps"]
    for _ in range(config["rounds"]):
        for side in order.sample(sides, len(sides)):
            dist.barrier()
            begun = time.perf_counter()
            marks = [side.step() for _ in range(steps)]
            seconds[side.name].append(slowest(time.perf_counter() - begun) / steps)
            if side.name == "alone":
                parts += [[after - mark for mark, after in pairwise(m)] for m in marks]
    made = steps * config["rounds"]
    counted = {
        side.name: {key: (value - before[side.name][key]) / made for key, value in side.counted().items()}
        for side in sides
    }
    return {"seconds": seconds, "parts": parts, "counted": counted}


def main(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sides = [Side(name, config) for name in config["sides"]]
    warmup = {}
    for side in sides:
        made = [side.step() for _ in range(config["warmup"].get(side.name, 2))]
        warmup[side.name] = [marks[-1] - marks[0] for marks in made]
    result = train(sides, config)
    for side in sides:
        if side.name != "alone":
            check(side)
    attached = {side.name: side.attached for side in sides if side.attached is not None}
    result |= {
        "warmup": warmup,
        "loss": {side.name: side.loss for side in sides},
        "elements": sum(parameter.numel() for parameter in sides[0].model.parameters()),
        "memory_bytes": {name: each.memory_bytes for name, each in attached.items()},
        "bits": {name: each.bits for name, each in attached.items()},
        "said": {name: str(each) for name, each in attached.items()},
    }
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's own threads may stumble over the interpreter's end


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
