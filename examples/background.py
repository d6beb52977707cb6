"""A job that matters, and one that may have what is left: the second trains in the gaps of the first.

plait run examples/background.py
"""

from dataclasses import replace
from functools import partial

import torch

from plait import Job
from plait.demo.chain import gpt2
from plait.english import english

front = Job(
    name="front",
    model=partial(gpt2, width=128, layers=4),
    data=partial(english, context=64),
    loss="plait.losses:model_loss",
    weight="plait.losses:next_tokens",
    optimizer=partial(torch.optim.AdamW, lr=1e-3),
    batch=16,
    steps=30,
)
small = partial(gpt2, width=64, layers=2)
behind = replace(front, name="behind", model=small, batch=8, priority="background")

jobs = [front, behind]
