"""A rank that dies, stalls, fails or disagrees ends all others, with an error that names it."""

import os
import signal
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from plait import Chain, losses
from plait.burst import BurstParallel, BurstPlan
from plait.compress.collectives import CompressedCollective
from plait.errors import PlaitError
from plait.worker import free_port

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
            "rank 1 has trained parameter '0.bias' None, and rank 0 has 'float32, 16 bytes' (setting: model)",
        ),
        (
            [{"widths": [2], "frozen": "0.weight"}, {"widths": [2], "frozen": "0.bias"}],
            "rank 1 has trained parameter '0.bias' None, and rank 0 has 'float32, 16 bytes'",
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


def plan_of(*widths):
    return BurstPlan.of([str(place) for place in range(len(widths))], widths, batch=8)


def make(*widths, timeout_s=60.0, **settings):
    """The others are told, or find out: a timeout has no part in it, unless a test says so."""
    Layer.at = -1
    chain = Chain.of([Layer(4, 4) for _ in widths], torch.randn(2, 4))
    settings = {"loss": losses.cross_entropy, "timeout_s": timeout_s, **settings}
    return BurstParallel(chain, plan_of(*widths), **settings)


def batch_of(rows=8, columns=4):
    return torch.randn(rows, columns), torch.zeros(rows, dtype=torch.long)


def outcome(act, *closes):
    """The error that an action ends with, as (class, text); what it needed is closed then."""
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        for parallel in closes:
            parallel.close()
    return None


def leaving():
    """Ranks that leave while others wait for word of theirs in the store, or in a collective."""
    rank, found = dist.get_rank(), []
    for leaver, widths, first, act in (
        (1, (3, 1), True, lambda parallel: parallel.change(plan_of(3, 3))),
        (0, (3, 1), False, lambda parallel: parallel.step(*batch_of())),
        (2, (3, 3), True, lambda parallel: parallel.step(*batch_of())),
        (2, (1, 1), True, lambda parallel: parallel.clip_grad_norm_(1.0)),
    ):
        parallel = make(*widths)
        if first:
            parallel.step(*batch_of())
        found.append(outcome(partial(act, parallel) if rank != leaver else int, parallel))
        dist.barrier()
    return found


def test_a_rank_that_leaves_while_others_need_it(ranks):
    found = ranks(3, leaving, timeout_s=50.0)
    for number, (leaver, says) in enumerate(
        [
            (1, "rank 1 has left; before, it was between steps 1 and 2;"),
            (0, "rank 0 has left; before, it was before the first step;"),
            (2, "rank 2 has left; before, it was between steps 1 and 2;"),
            (2, "rank 2 has left; before, it was between steps 1 and 2;"),
        ]
    ):
        assert found[leaver][number] is None
        for rank in {0, 1, 2} - {leaver}:
            assert found[rank][number][0] == "WorkerError"
            assert found[rank][number][1].startswith(says)


class Detached(nn.Linear):
    """Nothing before it, and not itself, learns from what follows."""

    def forward(self, x):
        return super().forward(x).detach()


def without_gradient(output, batch):
    return losses.cross_entropy(output, batch).detach()


def nothing_to_learn():
    """A loss that is detached, by one rank and by both; then an output that is."""
    found = []
    for widths in ((2, 1), (1, 2)):
        parallel = make(*widths, loss=without_gradient)
        found.append(outcome(lambda parallel=parallel: parallel.step(*batch_of()), parallel))
        dist.barrier()
    chain = Chain.of([nn.Linear(4, 4), Detached(4, 4)], torch.randn(2, 4))
    parallel = BurstParallel(chain, plan_of(2, 1), loss=losses.cross_entropy, timeout_s=60.0)
    found.append(outcome(lambda: parallel.step(*batch_of()), parallel))
    return found


def test_a_step_that_learns_nothing_is_refused(ranks):
    first, second = ranks(2, nothing_to_learn)
    loss = "the loss does not follow from the output by steps that have a gradient (setting: loss)"
    model = "the model's output does not follow from its parameters by steps that have a gradient"
    for number, says in enumerate((loss, loss, model)):
        assert first[number][0] == "UsageError"
        assert first[number][1].startswith(says)
        assert says in second[number][1]
    assert second[0][1].startswith("rank 0 raised UsageError in step 1: ")
    assert second[1][0] == "UsageError"  # it ran the last block itself


def test_a_loss_without_gradients_is_fine_where_none_are_wanted(ranks):
    assert ranks(1, only_the_loss) == [(True, True)]


def only_the_loss():
    parallel = make(1)
    with torch.no_grad():
        loss = parallel.step(*batch_of())
    untouched = all(parameter.grad is None for parameter in parallel.parameters())
    parallel.close()
    return loss > 0, untouched


def mistakes_of_one():
    """A plan that is too wide, something that cannot be pickled, a step after the end, a bad beginning."""
    rank, parallel = dist.get_rank(), make(2, 1)
    found = [
        outcome(lambda: parallel.change(plan_of(3 if rank else 2, 2))),
        outcome(lambda: parallel.step(*batch_of()), parallel),
        outcome(lambda: parallel.step(*batch_of())),
    ]
    dist.barrier()
    parallel = make(2, 1)
    found.append(outcome(lambda: parallel.tell(lambda: 0), parallel))
    dist.barrier()
    parallel = make(2, 1)
    parallel.close()
    found.append(outcome(lambda: parallel.step(*batch_of())))
    for settings in ({"batch_norm": "global"}, {"collective": object()}, {}):
        widths = (2, 1) if settings or rank == 0 else (3, 1)
        dist.barrier()
        found.append(outcome(partial(make, *widths, **(settings if rank else {}))))
    return found


def test_a_mistake_on_one_rank_reaches_all(ranks):
    first, second = ranks(2, mistakes_of_one, timeout_s=50.0)
    wide, again, closed, pickled, ended, *starts = zip(first, second, strict=True)
    assert "rank 1 raised UsageError changing the plan: the plan's widest block is on 3" in wide[0][1]
    assert wide[1][0] == "UsageError"
    assert again[0] == again[1] == closed[0] == closed[1] == wide[0]  # there is no going on
    assert "rank 0 raised UsageError telling the others: a function cannot be pickled: " in pickled[1][1]
    assert pickled[0][0] == "UsageError"
    assert ended[0] == ended[1]
    assert ended[0][0] == "UsageError"
    assert ended[0][1].startswith("it is closed")
    says = [
        "there is no batch_norm 'global'",
        "gradients of uneven shares",
        "the plan's widest block is on 3",
    ]
    for (told, raised), text in zip(starts, says, strict=True):
        assert raised[0] == "UsageError"
        assert told[0] == "WorkerError"
        assert told[1].startswith(f"rank 1 raised UsageError at the start: {text}")


def different_batches():
    """One rank is given another batch than the other, where rows move and where none do."""
    rank, found = dist.get_rank(), []
    for widths, odd, given, micro_batches in (
        ((2, 2), 1, batch_of(4), 1),
        ((2, 1), 1, batch_of(6), 1),
        ((2, 1), 0, batch_of(6), 1),
        ((2, 1), 1, batch_of(8), 2),
        ((2, 1), 0, None, 1),  # the same, to a model that is not in training
    ):
        parallel = make(*widths)
        parallel.step(*batch_of())
        parallel.chain.model.train(given is not None or rank != odd)
        mine, parts = (given or batch_of(), micro_batches) if rank == odd else (batch_of(), 1)
        found.append(outcome(partial(parallel.step, *mine, micro_batches=parts), parallel))
        dist.barrier()
    return found


def test_ranks_that_are_given_different_batches(ranks):
    first, second = ranks(2, different_batches, timeout_s=50.0)
    says = [
        "rank 1 has rows 4, and rank 0 has 8 (setting: batch)",
        "rank 1 has rows 6, and rank 0 has 8 (setting: batch)",
        "rank 1 has rows 8, and rank 0 has 6 (setting: batch)",
        "rank 1 has micro_batches 2, and rank 0 has 1 (setting: micro_batches)",
        "rank 1 has form of the batch 'float32[4], int64[] in ",
    ]
    for one, other, text in zip(first, second, says, strict=True):
        assert one == other
        assert one[0] == "WorkerError"
        assert one[1].startswith(text)


def two_models():
    """Two at once, which one rank calls in another order."""
    both = [make(2, 1, timeout_s=1.0), make(2, 2, timeout_s=1.0)]
    mine = both if dist.get_rank() else both[::-1]
    return outcome(lambda: [each.step(*batch_of()) for each in mine], *both)


def test_models_that_ranks_call_in_different_orders(ranks):
    found = ranks(2, two_models, timeout_s=50.0)
    assert all(kind == "WorkerError" for kind, _ in found)
    circles = [text for _, text in found if text.startswith("all ranks wait for each other: rank 0 waiting")]
    assert circles  # the first to find out; the other one may see that it has left
    assert all("in step 1 of another model" in text for text in circles)


def keeper_fails(bad, widths):
    """Rank 0 keeps the store, as where no agent does, and is the one that something happens to."""
    dist.init_process_group("gloo")
    parallel = make(*widths)
    parallel.step(*batch_of())
    if bad is None:
        act = partial(os._exit, 0) if dist.get_rank() == 0 else partial(parallel.change, plan_of(*widths))
        return outcome(act, parallel)
    if dist.get_rank() == 0:
        Layer.bad, Layer.at, Layer.calls = bad, 2, 0
    return outcome(lambda: parallel.step(*batch_of()), parallel)


@pytest.mark.parametrize(
    ("bad", "widths", "says"),
    [
        (signal.SIGKILL, (3, 2, 1), "rank 0, which keeps the store of the process group, is gone"),
        (signal.SIGKILL, (3, 3, 3), "rank 0, which keeps the store of the process group, is gone"),
        (None, (3, 2, 1), "rank 0, which keeps the store of the process group, is gone"),
        (ValueError("no luck"), (3, 2, 1), "rank 0 raised ValueError in step 2: no luck"),
    ],
)
def test_something_happens_to_who_keeps_the_store(ranks, bad, widths, says):
    here = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free_port())}
    killed = [] if isinstance(bad, Exception) else [0]
    found = ranks(3, keeper_fails, bad, widths, group=False, environment=here, lost=killed, timeout_s=50.0)
    for kind, text in found[1:]:
        assert kind == "WorkerError"
        assert text.startswith(says)
