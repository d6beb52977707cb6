"""The loop by hand: ``python loop.py STEPS CORE`` prints the time at which each step ended."""

from __future__ import annotations

import os
import sys
import time
from functools import partial

import torch

from plait.demo.chain import gpt2
from plait.english import english
from plait.job import Job


def job() -> Job:
    return Job(
        name="overhead",
        model=partial(gpt2, width=128, layers=4),
        data=partial(english, context=64),
        loss="plait.losses:model_loss",
        weight="plait.losses:next_tokens",
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        batch=8,
        steps=100,
    )


def main(steps: int, core: int) -> None:
    os.sched_setaffinity(0, [core])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = gpt2(width=128, layers=4).train()
    rows = english(0, context=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order = torch.randperm(len(rows))
    for step in range(steps):
        picked = [rows[int(i)] for i in order[8 * step % len(rows) :][:8]]
        batch = torch.utils.data.default_collate(picked)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        print(time.time(), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
