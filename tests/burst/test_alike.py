"""Ranks hold parts of a model, and do alike what one device does with the whole: layouts, state, norms."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from plait import Chain, losses
from plait.burst import BurstParallel, BurstPlan
from plait.errors import UsageError

CLOSE = 1e-10


def dense():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def images():
    torch.manual_seed(0)
    model = nn.Sequential(
        # No bias before BatchNorm: its gradient is zero but for rounding, of which Adam makes a step.
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 5),
    )  # fmt: skip
    return model.double().to(memory_format=torch.channels_last)


def plan_of(chain, widths, rows):
    return BurstPlan.of([block.name for block in chain], widths, batch=rows)


def batch_of(rows, shape=(6,), seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, *shape, dtype=torch.float64, generator=draw)
    return x, torch.randint(5, (rows,), generator=draw)


def channels_last():
    """A fused optimizer walks parameters, gradients and state side by side, so all must lie alike."""
    batches = [batch_of(6, (1, 8, 8), seed) for seed in range(4)]
    alone = images()
    whole = torch.optim.AdamW(alone.parameters(), fused=True)
    chain = Chain.trace(images(), batches[0][0])
    narrow = plan_of(chain, [2, *[1] * (len(chain) - 1)], 6)
    parallel = BurstParallel(chain, narrow, loss=losses.cross_entropy, batch_norm="synchronized")
    optimizer = torch.optim.AdamW(parallel.parameters(), fused=True)
    for number, batch in enumerate(batches):
        if number == 2:
            parallel.change(plan_of(chain, [2] * len(chain), 6), optimizer)
        losses.cross_entropy(alone(batch[0]), batch).backward()
        parallel.step(*batch)
        for one in (whole, optimizer):
            one.step()
            one.zero_grad()
    expected = dict(alone.named_parameters())
    named = list(parallel.named_parameters())
    assert all(p.stride() == expected[n].stride() for n, p in named)
    parallel.close()
    return max(float((p - expected[n]).detach().abs().max()) for n, p in named)


def state_that_lacks_one():
    """A parameter without state in what is loaded has none afterwards, on any rank."""
    batch = batch_of(4)
    chain = Chain.trace(dense(), batch[0])
    parallel = BurstParallel(chain, plan_of(chain, [2] * len(chain), 4), loss=losses.cross_entropy)
    optimizer = torch.optim.AdamW(parallel.parameters())
    parallel.step(*batch)
    optimizer.step()
    state = copy.deepcopy(parallel.optimizer_state(optimizer)) or None
    if state:
        del state["state"][0]
    parallel.load_optimizer_state(optimizer, state)
    found = [name for name, parameter in parallel.named_parameters() if parameter not in optimizer.state]
    parallel.close()
    return found


class Narrower(nn.Module):
    def forward(self, x):
        return x.float()


def two_kinds():
    """Rank 1 has none of the parameters in double precision, and clips by the same norm."""
    x, y = batch_of(4)
    torch.manual_seed(0)
    chain = Chain.of([nn.Linear(6, 5).double(), Narrower(), nn.Linear(5, 5)], x)
    parallel = BurstParallel(chain, plan_of(chain, [1, 1, 2], 4), loss=losses.cross_entropy)
    parallel.step(x, y)
    norm = parallel.clip_grad_norm_(0.01)
    parallel.close()
    return norm


def idle_muon():
    """A rank without blocks can make any optimizer; closing leaves no group behind."""
    x, y = batch_of(4)
    chain = Chain.of([nn.Linear(6, 5, bias=False).double()], x)
    parallel = BurstParallel(chain, plan_of(chain, [1], 4), loss=losses.cross_entropy)
    optimizer = torch.optim.Muon(parallel.parameters())
    parallel.step(x, y)
    optimizer.step()
    parallel.close()
    return len(dist.distributed_c10d._world.pg_map)


def corners():
    return channels_last(), state_that_lacks_one(), two_kinds(), idle_muon()


def test_layouts_state_norms_and_groups(ranks):
    (first, lacks, norm, groups), (second, too, same, left) = ranks(2, corners)
    assert max(first, second) < CLOSE
    assert lacks == too == ["0.weight"]
    assert norm.dtype == same.dtype == torch.float64
    assert norm == same
    assert groups == left == 1  # the one that was there before


def test_what_is_trained_stays_so():
    batch = batch_of(5)
    chain = Chain.trace(dense(), batch[0])
    parallel = BurstParallel(chain, plan_of(chain, [1] * len(chain), 5), loss=losses.cross_entropy)
    parallel.step(*batch)
    next(parallel.parameters()).requires_grad_(False)
    with pytest.raises(UsageError, match=r"'0.weight' was trained when the plan was taken up, and is frozen"):
        parallel.step(*batch)
    parallel.close()
