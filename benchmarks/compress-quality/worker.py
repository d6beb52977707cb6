"""One of the workers: trains a task with every seed on every side, and rank 0 prints what came of it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, draws, windows
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from plait.compress import Adaptation, Attachment, Compression, attach


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learnt, and how."""

    model: Callable[[], nn.Module]
    data: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    rows: int
    """A worker's, at each step."""
    optimizer: Callable[[Any], torch.optim.Optimizer]
    smoothing: float = 0.0
    """Of the labels."""


def text() -> Task:
    return Task(
        model=lambda: GPT(width=128, layers=2),
        data=windows(),
        held_out=windows(held_out=True),
        rows=32,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, fused=True),
    )


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(*stage(inside, outside, stride), nn.ReLU())
        self.second = nn.Sequential(*stage(outside, outside, 1))
        self.pass_on = nn.Identity() if inside == outside else nn.Conv2d(inside, outside, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.second(self.first(x)) + self.pass_on(x))


def stage(inside: int, outside: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outside)]


def convnet(width: int) -> nn.Module:
    """A residual net with one block at each of three widths."""
    blocks: list[nn.Module] = [*stage(1, width, 1), nn.ReLU()]
    inside = width
    for outside in (width, 2 * width, 4 * width):
        blocks.append(Residual(inside, outside, outside // inside))
        inside = outside
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 10))


def digits() -> Task:
    from sklearn.datasets import load_digits

    found = load_digits()
    images, labels = torch.tensor(found.images).float()[:, None] / 16, torch.tensor(found.target)
    kept = torch.arange(len(images)) % 3 == 0
    return Task(
        model=lambda: convnet(width=32),
        data=(images[~kept], labels[~kept]),
        held_out=(images[kept], labels[kept]),
        rows=32,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4),
        smoothing=0.1,
    )


TASKS = {"GPT": text, "convnet": digits}


def attached(ddp: DistributedDataParallel, side: dict[str, Any], seed: int) -> Attachment | None:
    """Exchange gradients in the side's way: fields of a Compression, a rank of PowerSGD, or neither."""
    if not side:
        return None
    if "rank" in side:
        state = PowerSGDState(None, matrix_approximation_rank=side["rank"], start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook)
        return None
    fields = {**side, "adaptation": Adaptation(**side.get("adaptation", {}))}
    # Loopback is too fast for compression to pay, and it is what is judged here.
    return attach(ddp, compression=Compression(**fields, seed=seed, decline=False))


def train(task: Task, side: dict[str, Any], seed: int, steps: int) -> dict[str, Any]:
    """One run from the seed's weights through the seed's batches."""
    torch.manual_seed(seed)
    begun = time.perf_counter()
    bucket_mb = 1024 if "rank" in side else None  # in several buckets it ends in a mismatch
    ddp = DistributedDataParallel(task.model(), gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    attachment = attached(ddp, side, seed)
    optimizer = task.optimizer(ddp.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=optimizer.param_groups[0]["lr"], total_steps=steps + 1, pct_start=0.1
    )
    inputs, targets = task.data
    rows = draws(len(inputs), task.rows, seed, dist.get_rank())
    for _ in range(steps):
        drawn = next(rows)
        optimizer.zero_grad()
        loss = functional.cross_entropy(ddp(inputs[drawn]), targets[drawn], label_smoothing=task.smoothing)
        loss.backward()
        optimizer.step()
        schedule.step()
    result = evaluate(task, ddp.module) | {"seconds": time.perf_counter() - begun, "last": loss.item()}
    if attachment is not None:
        report = attachment.report()
        result |= {"mean_bits": report.mean_bits, "parameters": len(report.bits)}
        if attachment.log is not None:
            result["changes"] = sum(decision.changed for decision in attachment.log.decisions)
    return result


@torch.no_grad()
def evaluate(task: Task, model: nn.Module) -> dict[str, float]:
    """On what was held out: the loss as it is trained, and the share of right guesses."""
    model.eval()
    inputs, targets = task.held_out
    loss, right = 0.0, 0
    for x, y in zip(inputs.split(128), targets.split(128), strict=True):
        guess = model(x)
        loss += functional.cross_entropy(guess, y, label_smoothing=task.smoothing, reduction="sum").item()
        right += int((guess.argmax(1) == y).sum())
    return {"loss": loss / targets.numel(), "accuracy": right / targets.numel()}


def main(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task = TASKS[config["task"]]()
    for seed in range(config["seeds"]):
        for name, side in config["sides"].items():
            result = train(task, side, config["seed"] + seed, config["steps"])
            if dist.get_rank() == 0:
                print(json.dumps({"side": name, "seed": seed, **result}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's own threads may stumble over the interpreter's end


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
