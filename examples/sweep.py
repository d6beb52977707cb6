"""A sweep: eight GPT-2s over learning rate and depth, under a memory limit that holds a few of them.

    plait run examples/sweep.py

The trials take turns on this machine's devices; what does not fit waits on disk. After half of the steps
the worse half is given up.
"""

from functools import partial

import torch

from plait import Job
from plait.demo.chain import gpt2
from plait.english import english
from plait.spill import Choice, Grid, Selection, halving

base = Job(
    name="gpt2",
    model=partial(gpt2, width=512, layers=2),
    data=partial(english, context=64),
    loss="plait.losses:model_loss",
    weight="plait.losses:next_tokens",
    optimizer=partial(torch.optim.AdamW, lr=1e-3),
    batch=4,
    steps=4,
    memory="768MiB",  # a device; what an interpreter with transformers takes, about 300 MiB, is part of it
)
space = {"optimizer.lr": Choice([3e-3, 1e-3, 3e-4, 1e-4]), "model.layers": Choice([2, 4])}

jobs = [
    Selection(base, space, halving(trials=8, least_steps=2, most_steps=4, eta=2), sampler=Grid(space)),
]
