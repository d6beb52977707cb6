"""A rank that dies, stalls, fails or disagrees ends all others, with an error that names it."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from plait import Chain, losses
from plait.burst import BurstParallel, BurstPlan
from plait.compress.collectives import CompressedCollective
from plait.errors import PlaitError

TIMEOUT_S = 5.0


class Layer(nn.Linear):
    """Does something bad in one of its forwards."""

    bad, at, calls = None, -1, 0

    def forward(self, x):
        Layer.calls += 1
        if Layer.calls == self.at:
            if isinstance(self.bad, int):
                os.kill(os.getpid(), self.bad)
            else:
                raise self.bad
        return super().forward(x)


def train(widths, steps=3, rows=8, bad=None, frozen=None, **settings):
    """Some steps; the error that ended them, if any, as (class, text)."""
    Layer.at = -1
    chain = Chain.of([Layer(4, 4) for _ in widths], torch.randn(2, 4))
    for name, parameter in chain.named_parameters():
        parameter.requires_grad_(name != frozen)
    plan = BurstPlan.of([block.name for block in chain], widths, batch=8)
    if bad is not None:  # in the second step
        Layer.bad, Layer.at, Layer.calls = bad, sum(dist.get_rank() < width for width in widths) + 2, 0
    try:
        parallel = BurstParallel(chain, plan, loss=losses.cross_entropy, timeout_s=TIMEOUT_S, **settings)
        for _ in range(steps):
            parallel.step(torch.randn(rows, 4), torch.zeros(rows, dtype=torch.long))
    except PlaitError as error:
        if "parallel" in locals():
            with pytest.raises(PlaitError):  # and there is no going on
                parallel.step(torch.randn(rows, 4), torch.zeros(rows, dtype=torch.long))
        return type(error).__name__, str(error)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def one_bad(victim, bad, widths):
    return train(widths, bad=bad if dist.get_rank() == victim else None)


@pytest.mark.parametrize(("victim", "widths"), [(2, [3, 3, 3]), (1, [2, 2, 3])])
def test_a_killed_rank_is_named_by_all_others(ranks, victim, widths):
    found = ranks(3, one_bad, victim, signal.SIGKILL, widths, lost=[victim])
    for kind, text in filter(None, found):
        assert kind == "WorkerError"
        assert f"rank {victim} is gone" in text
    assert sum(one is None for one in found) == 1


def test_a_stopped_rank_is_named_by_all_others(ranks):
    found = ranks(3, one_bad, 1, signal.SIGSTOP, [2, 3, 2], lost=[1])
    for kind, text in filter(None, found):
        assert kind == "WorkerError"
        assert "rank 1 has shown no sign of life for" in text
        assert "(setting: timeout_s)" in text


def disagree(kinds):
    """One quarrel after another, in the same processes."""
    return [train(**kind[dist.get_rank()]) for kind in kinds]


def test_ranks_that_disagree_and_an_error_on_one_rank(ranks):
    quarrels = [
        ([{"widths": [2, 1]}, {"widths": [2, 2]}], "rank 1 has width of block '1' 2, and rank 0 has 1"),
        ([{"widths": [2]}, {"widths": [2, 2]}], "rank 1 has blocks 2, and rank 0 has 1"),
        (
            [{"widths": [2]}, {"widths": [2], "batch_norm": "synchronized"}],
            "rank 1 has batch_norm 'synchronized'",
        ),
        (
            [{"widths": [2]}, {"widths": [2], "collective": CompressedCollective(bits=8)}],
            "rank 1 has collective 'CompressedCollective', and rank 0 has 'TorchCollective'",
        ),
        (
            [{"widths": [2]}, {"widths": [2], "frozen": "0.bias"}],
            "rank 1 has trained parameters 'count' 1, and rank 0 has 2",
        ),
        (
            [{"widths": [2], "frozen": "0.weight"}, {"widths": [2], "frozen": "0.bias"}],
            "rank 1 has trained parameters 'digest of names and sizes'",
        ),
    ]
    for found in ranks(2, disagree, [kinds for kinds, _ in quarrels]):
        for one, (_, says) in zip(found, quarrels, strict=True):
            assert one[0] == "WorkerError"
            assert says in one[1]


def mistakes():
    """An error of the user's on one rank; then batches of different shapes."""
    rank = dist.get_rank()
    first = one_bad(1, ValueError("no luck"), [2, 1, 2])
    second = train([1, 2, 1], rows=8 if rank == 0 else 1)
    return first, second


def test_an_error_on_one_rank_reaches_all(ranks):
    (first, alike), (second, too_few) = ranks(2, mistakes)
    assert second == ("ValueError", "no luck")
    assert first[0] == "WorkerError"
    assert "rank 1 raised ValueError in step 2: no luck" in first[1]
    assert too_few[0] == "UsageError"
    assert "rank 1 raised UsageError in step 1: 1 rows are too few" in alike[1]
