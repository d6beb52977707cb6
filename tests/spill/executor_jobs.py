"""Jobs with much of what can go wrong shard by shard; tests import this file by name."""

import dataclasses
import functools
import math

import torch
from torch import nn

from plait import losses
from plait.factory import Factory
from plait.job import Evaluation, Job


class Net(nn.Module):
    """Much of what can go wrong: a weight and a value that many blocks use, values that skip blocks, an
    integer among them, dropout, BatchNorm, a frozen layer, a parameter that nothing uses."""

    def __init__(self, dropout=0.0, norm=False, tied=False, frozen=False, width=12):
        super().__init__()
        self.first = nn.Linear(6, width)
        self.shared = nn.Linear(width, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) if norm else nn.LayerNorm(width) for _ in range(4))
        self.drop = nn.Dropout(dropout)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.full((width,), 0.5))
        self.tied, self.last = tied, nn.Linear(width, 4)
        if frozen:
            for layer in (self.first, self.layers[0], self.layers[3]):
                layer.requires_grad_(False)

    def forward(self, x):
        picked = x.argmax(1)
        kept = torch.tanh(self.first(x))
        x = kept
        for place, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = x + self.drop(nn.functional.gelu(layer(norm(x))))
            if self.tied and place % 2 == 0:
                x = torch.tanh(self.shared(self.shared(x)) * kept)
            if place == 3:
                x = x * self.scale + nn.functional.one_hot(picked, 6).to(x.dtype).mean(1, keepdim=True)
        return self.last(x)


def net(**options):
    return Net(**options)


class Transposed(nn.Module):
    """Values and gradients in other layouts than rows, and one that is expanded."""

    def __init__(self):
        super().__init__()
        self.stem, self.down, self.end = nn.Conv2d(1, 8, 2, 2), nn.Conv2d(8, 8, 1), nn.Linear(8, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1, 8, 1, 1))

    def forward(self, x):
        x = x.reshape(-1, 1, 2, 3)[:, :, :, :2].repeat(1, 1, 2, 2)
        for conv, norm in zip((self.stem, self.down), self.norms, strict=True):
            x = norm(conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2) * self.scale
        return self.end(x.mean((-2, -1)))


def transposed():
    return Transposed()


def sequential():
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(16, 16),
        nn.SiLU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4),
    )  # fmt: skip


class Again(nn.Module):
    """One layer used in every block, its weights cast by autocast for each; and a recurrent one."""

    def __init__(self, recurrent):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 4)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)
        self.turn = nn.GRU(16, 16, 2, batch_first=True, dropout=0.1) if recurrent else None
        self.between = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        x = torch.tanh(self.first(x))[:, None].expand(-1, 3, -1)
        for between in self.between:
            x = self.layer(between(x))
        if self.turn is not None:
            x, _ = self.turn(x)
        return self.last(x.mean(1))


def again(*, recurrent=False):
    return Again(recurrent)


def points(seed, *, count=40, masked=False, broken_at=None):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    y = x.argmax(1) % 4
    if masked:
        y[torch.arange(count) % 8 > 1] = losses.IGNORED
    if broken_at is not None:
        x[broken_at] = math.inf
    return [(x[i], y[i]) for i in range(count)]


def decayed(parameters):
    """Two groups by name, and a parameter that is in neither."""
    named = dict(parameters)
    named.pop("layers.1.weight")
    plain = [(name, p) for name, p in named.items() if p.ndim < 2]
    rest = [(name, p) for name, p in named.items() if p.ndim > 1]
    return torch.optim.AdamW([{"params": rest, "weight_decay": 0.5}, {"params": plain, "lr": 0.1}], lr=0.01)


SGD = functools.partial(torch.optim.SGD, lr=0.1)
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
ADAM = functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
FUSED = functools.partial(torch.optim.AdamW, lr=0.01, fused=True)
FOREACH = functools.partial(torch.optim.Adam, lr=0.01, foreach=True)
COSINE = Factory("torch.optim.lr_scheduler:CosineAnnealingLR", T_max=10)
CYCLE = Factory("torch.optim.lr_scheduler:OneCycleLR", max_lr=0.05, total_steps=20)
BASE = Job(
    name="small", model=net, data=points, loss=losses.cross_entropy, optimizer=SGD, batch=8, steps=3, seed=3
)
ALL = functools.partial(net, dropout=0.3, norm=True, tied=True, frozen=True)
MODES = ("keep", "thrift", "spill", "recompute")
EVALUATION = Evaluation(data=functools.partial(points, count=11), every=2, metrics={"right": losses.accuracy})


def job(base=BASE, **changes):
    return dataclasses.replace(base, **changes)


def gpt2(*, dropout=0.1):
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, **drops))


def sentences(seed):
    tokens = torch.randint(0, 50, (12, 16), generator=torch.Generator().manual_seed(seed))
    labels = tokens.masked_fill(torch.arange(16) > torch.arange(12)[:, None] + 2, losses.IGNORED)
    return [{"input_ids": tokens[i], "labels": labels[i]} for i in range(12)]


GPT2 = Job(
    name="gpt", model=gpt2, data=sentences, loss=losses.model_loss, weight=losses.next_tokens, batch=4,
    steps=3, optimizer=FUSED, accumulate=2, clip_norm=1.0, schedule=COSINE,
    evaluation=Evaluation(data=sentences),
)  # fmt: skip


class Steep(nn.Module):
    """A loss that is finite, with a gradient that is not."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.middle(self.first(x))
        return self.last(torch.sqrt(x * 0))


def steep():
    return Steep()
