"""Everything that DDP can do, each a few steps of training; test files load this one by its path."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CAP_MB = 0.02  # several buckets, so that there is something to rebuild
STEPS = 3


class Net(nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        self.embed = nn.Embedding(40, 48, sparse=sparse)
        self.first = nn.Linear(48, 64)
        self.norm = nn.LayerNorm(64)
        self.second = nn.Linear(64, 64)
        self.spare = nn.Linear(64, 64)
        self.head = nn.Linear(64, 40)

    def forward(self, tokens, use_spare=True):
        x = self.norm(torch.relu(self.first(self.embed(tokens))))
        x = x + self.second(x)
        if use_spare:
            x = x + self.spare(x)
        return self.head(x)


def batch(step, rank, rows=6):
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, 40, (rows, 5), generator=generator)
    return tokens, tokens.roll(1, 1)


def loss_of(model, step, rank, **kwargs):
    tokens, wanted = batch(step, rank)
    return nn.functional.cross_entropy(model(tokens, **kwargs).flatten(0, 1), wanted.flatten())


def flat(model):
    found = [
        p.grad.to_dense() if p.grad.is_sparse else p.grad for p in model.parameters() if p.grad is not None
    ]
    return torch.cat([gradient.detach().float().reshape(-1) for gradient in found])


# Each feature trains a few steps and returns the gradients of each.


def steps_of(ddp, rank, optimizer, **kwargs):
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(ddp, step, rank, **kwargs).backward()
        yield flat(ddp)
        optimizer.step()


def plainly(ddp, rank, optimizer):
    return list(steps_of(ddp, rank, optimizer))


def with_unused(ddp, rank, optimizer):
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(ddp, step, rank, use_spare=(step + rank) % 2 == 0).backward()
        found.append(flat(ddp))
        optimizer.step()
    return found


def accumulating(ddp, rank, optimizer):
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with ddp.no_sync():
            (loss_of(ddp, 10 * step, rank) / 2).backward()
        (loss_of(ddp, 10 * step + 1, rank) / 2).backward()
        found.append(flat(ddp))
        optimizer.step()
    return found


def joining(ddp, rank, optimizer):
    found = []
    with ddp.join():
        for step in range(STEPS + 2 * rank):  # rank 1 has more to do
            optimizer.zero_grad()
            loss_of(ddp, step, rank).backward()
            found.append(flat(ddp))
            optimizer.step()
    return found[:STEPS]


def scaling(ddp, rank, optimizer):
    scaler, found = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2), []
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(ddp, step, rank)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        found.append(flat(ddp))
        scaler.step(optimizer)
        scaler.update()
    return found


def compiling(ddp, rank, optimizer):
    return list(steps_of(torch.compile(ddp, backend="aot_eager"), rank, optimizer))


FEATURES = {
    "plain": (plainly, {}, {}),
    "unused": (with_unused, {"find_unused_parameters": True}, {}),
    "accumulation": (accumulating, {}, {}),
    "join": (joining, {}, {}),
    "static graph": (plainly, {"static_graph": True}, {}),
    "views": (plainly, {"gradient_as_bucket_view": True}, {}),
    "sparse": (plainly, {}, {"sparse": True}),
    "scaler": (scaling, {}, {}),
    "compile": (compiling, {"bucket_cap_mb": 25}, {}),
}


def model_of(feature, dtype=torch.float32):
    run, ddp_options, model_options = FEATURES[feature]
    torch.manual_seed(0)
    model = Net(**model_options).to(dtype)
    if feature in ("sparse",):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ddp = DistributedDataParallel(model, **{"bucket_cap_mb": CAP_MB, **ddp_options})
    return run, ddp, optimizer
