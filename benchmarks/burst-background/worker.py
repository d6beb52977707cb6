"""The foreground on one host: rounds of steps with and without background, timed; nothing here speaks to it.

Which rounds have background is written into a file, which the host's agent reads.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from net import CONVOLUTIONS, batch, blocks
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

SETTLES_S = 0.4
"""Within which an agent has read the file."""


def data_parallel(rows: int, seed: int) -> Callable[[], float]:
    """DDP, as anybody would write it."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Sequential(*blocks()), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, classes = batch(rows, seed)
    mine = slice(dist.get_rank(), None, dist.get_world_size())

    def step() -> float:
        loss = cross_entropy(model(images[mine]), classes[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def burst(rows: int, seed: int) -> Callable[[], float]:
    """The convolutions on both hosts, the dense layers on one."""
    import plait
    from plait import losses
    from plait.burst import BurstParallel, BurstPlan

    torch.manual_seed(seed)
    chain = plait.Chain.of(blocks(), batch(2, seed)[0])
    world = dist.get_world_size()
    widths = [world if place < CONVOLUTIONS else 1 for place in range(len(chain))]
    plan = BurstPlan.of([block.name for block in chain], widths, batch=rows, devices=world)
    model = BurstParallel(chain, plan, loss=losses.cross_entropy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    given = batch(rows, seed)

    def step() -> float:
        loss = model.step(given)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def main(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, switch = dist.get_rank(), Path(config["folder"]) / f"switch{dist.get_rank()}"
    step = {"DDP": data_parallel, "burst": burst}[config["foreground"]](config["rows"], config["seed"])
    # The multiplexer measures its first baseline meanwhile.
    losses = [step() for _ in range(config["warmup"])]
    order = random.Random(config["seed"])
    rounds: list[dict[str, Any]] = []
    for _ in range(config["rounds"]):
        for background in order.sample([False, True], 2):
            switch.write_text("on" if background else "off")
            time.sleep(SETTLES_S)
            losses.append(step())  # the step in which the background comes or goes
            dist.barrier()
            begun, used = time.monotonic(), time.process_time()
            losses += [step() for _ in range(config["steps"])]
            ended = time.monotonic()
            rounds.append(
                {
                    "background": background,
                    "begun": begun,
                    "ended": ended,
                    "ms": 1e3 * (ended - begun) / config["steps"],
                    "processor": (time.process_time() - used) / (ended - begun),
                }
            )
    print("RESULT", json.dumps({"rank": rank, "rounds": rounds, "losses": losses}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's own threads may stumble over the interpreter's end


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
