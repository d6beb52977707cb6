"""A rank that dies, stalls, fails or disagrees ends all others, with an error that names it."""

import atexit
import os
import re
import signal
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from plait.errors import PlaitError, UsageError, WorkerError
from plait.pipeline import AdaptiveSchedule, ScheduleKFKB
from plait.worker import Place, free_port

TIMEOUT_S = 3.0


class Layer(nn.Module):
    """Does something bad in one of its forwards."""

    def __init__(self, bad=None, at=-1):
        super().__init__()
        self.linear, self.bad, self.at, self.calls = nn.Linear(4, 4), bad, at, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == self.at:
            if isinstance(self.bad, int):
                os.kill(os.getpid(), self.bad)
            elif isinstance(self.bad, Exception):
                raise self.bad
            else:
                return self.bad(x)
        return self.linear(x)


def squared(output, target):
    return (output - target).square().mean()


def train(module, steps=3, rows=8, micro_batches=4, loss=squared, stage=None, **options):
    """Some steps; the error that ended them, if any, as (class, text)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    stage = stage or PipelineStage(module, rank, world, torch.device("cpu"))
    try:
        schedule = ScheduleKFKB(stage, micro_batches, loss, **{"timeout_s": TIMEOUT_S, **options})
        for _ in range(steps):
            given = [torch.randn(rows, 4)] if rank == 0 else []
            schedule.step(*given, **({"target": torch.zeros(rows, 4)} if rank == world - 1 else {}))
    except PlaitError as error:
        with pytest.raises(PlaitError):  # and there is no going on
            schedule.step(*[torch.randn(rows, 4)][: rank == 0])
        return type(error).__name__, str(error)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def one_bad(victim, bad, at):
    """In the second step, one rank does something bad."""
    return train(Layer(bad, at) if dist.get_rank() == victim else Layer())


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_killed_rank_is_named_by_all_others(ranks, victim):
    found = ranks(4, one_bad, victim, signal.SIGKILL, 6, lost=[victim])
    assert found[victim] is None
    for kind, text in filter(None, found):
        assert kind == "WorkerError"
        assert f"rank {victim} is gone" in text
        assert re.search("rank [0-3] was (receiving|sending) the .* (of|in) step 2", text), text


@pytest.mark.parametrize("victim", [0, 2])
def test_a_stopped_rank_is_named_by_all_others(ranks, victim):
    found = ranks(4, one_bad, victim, signal.SIGSTOP, 6, lost=[victim])
    for kind, text in filter(None, found):
        assert kind == "WorkerError"
        assert f"rank {victim} has shown no sign of life for" in text
        assert "(setting: timeout_s)" in text


def keeper_fails(bad):
    """Rank 0 keeps the store, as where no agent does, and is the one that something happens to."""
    dist.init_process_group("gloo")
    found = one_bad(0, bad, 6)
    atexit._run_exitfuncs()  # a script's end, which the process of a test does not come to
    return found


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (signal.SIGKILL, "rank 0, which keeps the store of the process group, is gone"),
        (ValueError("no luck"), "rank 0 raised ValueError in step 2: no luck"),
    ],
)
def test_something_happens_to_who_keeps_the_store(ranks, bad, says):
    here = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free_port())}
    killed = [] if isinstance(bad, Exception) else [0]
    found = ranks(3, keeper_fails, bad, group=False, environment=here, lost=killed)
    for kind, text in found[1:]:
        assert kind == "WorkerError"
        assert text.startswith(says)


def bad_before_its_first_step(victim, number):
    """A rank that has its schedule, and then never begins."""
    rank, world = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(Layer(), rank, world, torch.device("cpu"))
    ScheduleKFKB(stage, 4, squared, timeout_s=TIMEOUT_S)
    if rank == victim:
        os.kill(os.getpid(), number)
    return train(None, stage=stage)


@pytest.mark.parametrize(
    ("victim", "number", "says"),
    [
        (0, signal.SIGSTOP, "rank 0 has shown no sign of life for"),
        (1, signal.SIGSTOP, "rank 1 has shown no sign of life for"),
        (0, signal.SIGKILL, "rank 0 is gone"),
    ],
)
def test_a_rank_that_is_lost_before_its_first_step(ranks, victim, number, says):
    found = ranks(3, bad_before_its_first_step, victim, number, lost=[victim], timeout_s=40.0)
    for kind, text in filter(None, found):
        assert kind == "WorkerError"
        assert text.startswith(says)


def killed_between_steps():
    rank = dist.get_rank()
    stage = PipelineStage(Layer(), rank, 2, torch.device("cpu"))
    assert train(None, steps=1, stage=stage) is None
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0)  # by now gloo knows, and takes nothing for that rank
    return train(None, stage=stage)


def test_a_rank_that_was_gone_before_the_step_began(ranks):
    (kind, text), _ = ranks(2, killed_between_steps, lost=[1])
    assert kind == "WorkerError"
    assert text.startswith("rank 1 is gone")
    assert "rank 0 was sending the note of step 2" in text


def slow_to_begin():
    if dist.get_rank() == 1:
        time.sleep(TIMEOUT_S + 1.5)  # a large model takes its time
    return train(Layer())


def test_a_rank_that_is_slow_to_begin_is_waited_for(ranks):
    assert ranks(3, slow_to_begin) == [None, None, None]


def slower_than_the_group_waits():
    place = Place.from_environment()
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    return train(Layer(lambda x: time.sleep(4) or x, 2) if place.rank else Layer())


def test_a_rank_that_takes_longer_than_the_process_group_waits(ranks):
    kind, text = ranks(2, slower_than_the_group_waits, group=False)[0]
    assert kind == "WorkerError"
    assert "rank 1 took longer than the process group waits (Timed out waiting 2000ms" in text
    assert "(setting: timeout of init_process_group)" in text


def out_of_turn():
    """Two pipelines of equal shapes in one group; the second time, one rank has them in another order."""
    rank = dist.get_rank()
    both = [PipelineStage(Layer(), rank, 2, torch.device("cpu")) for _ in range(2)]
    for stage in both:
        assert train(None, steps=1, stage=stage) is None
    return train(None, steps=1, stage=both[rank])


def test_pipelines_that_ranks_call_in_different_orders(ranks):
    found = ranks(2, out_of_turn)
    for kind, text in found:
        assert kind == "WorkerError"
        assert "rank 1 is in step 2 of one pipeline, and those before it in another's" in text


def test_an_error_on_one_rank_reaches_all(ranks):
    found = ranks(3, one_bad, 1, ValueError("no luck"), 6)
    assert found[1][0] == "RuntimeError"  # as torch's stages raise it
    for rank in (0, 2):
        kind, text = found[rank]
        assert kind == "WorkerError"
        assert "rank 1 raised ValueError in step 2: no luck" in text  # and not what torch made of it


def shrink(x):
    return x[:, :3]


def test_a_stage_whose_outputs_change_shape(ranks):
    found = ranks(2, one_bad, 0, shrink, 6)
    assert found[0][0] == "UsageError"
    assert "gave float32[2, 4] for such inputs before, and now gives float32[2, 3]" in found[0][1]
    assert found[1][0] == "WorkerError"
    assert "float32[2, 3]" in found[1][1]


def declared(takes, gives):
    """Stages with input_args and output_args as a user may give them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    said = (
        {} if takes is None else {"input_args": torch.zeros(2, takes), "output_args": torch.zeros(2, gives)}
    )
    return train(None, stage=PipelineStage(Layer(), rank, world, torch.device("cpu"), **said))


def test_stages_that_do_not_take_or_give_what_was_said(ranks):
    assert ranks(2, declared, 4, 4) == [None, None]
    found = ranks(2, declared, 4, 5)
    assert "stage 0 gives float32[2, 4], and was said to: float32[2, 5]" in found[0][1]
    assert found[1][0] == "WorkerError"
    assert "float32[2, 5]" in found[1][1]
    assert "stage 1 takes float32[2, 4], and was said to: float32[2, 5]" in ranks(2, declared, 5, 4)[1][1]


def disagree(options):
    return train(Layer(), **options[dist.get_rank()])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([{"k": 1}, {"k": 2}], "rank 1 has the order 2F2B.* and the first rank 1F1B"),
        ([{}, {"micro_batches": 2}], "rank 1 has the order .* 2 micro-batches, and .* 4 micro-batches"),
        ([{}, {"loss": None}], r"rank 1 called eval\(\), or .*, and the first rank step\(\) with"),
    ],
)
def test_ranks_that_disagree(ranks, options, says):
    found = ranks(2, disagree, options)
    for kind, text in filter(None, found):
        assert kind == "WorkerError"
        with pytest.raises(WorkerError, match=says):
            raise WorkerError(text)


def small(rows):
    return train(Layer(), rows=rows)


def test_a_batch_with_fewer_rows_than_micro_batches(ranks):
    found = ranks(2, small, 3)
    assert found[0] == (
        "UsageError",
        "a tensor of 3 rows for 4 micro-batches (setting: n_microbatches); "
        "works: schedule.change(n_microbatches=3) on every rank, or 4 rows or more",
    )
    assert found[1][0] == "WorkerError"
    assert "rank 0 raised UsageError in step 1: a tensor of 3 rows for 4 micro-batches" in found[1][1]
    assert ranks(2, small, 1)[0][1].endswith("works: 4 rows or more")  # and not fewer than a stage each


def without_loss(schedule, asked):
    """A schedule with nothing to learn from; the last rank's error."""
    rank = dist.get_rank()
    stage = PipelineStage(Layer(), rank, 2, torch.device("cpu"))
    given = [torch.randn(8, 4)] if rank == 0 else []
    without = schedule(stage, 8)
    assert (without.eval(*given) is None) == (rank == 0)
    assert (without.step(*given) is None) == (rank == 0)  # forward only, as torch's
    if rank == 0:
        with suppress(WorkerError):  # if it hears of the other's error before its own work is done
            without.step(*given)
        return None
    with pytest.raises(UsageError) as caught:
        without.step(**asked)
    return str(caught.value)


@pytest.mark.parametrize("schedule", [ScheduleKFKB, AdaptiveSchedule])
def test_training_without_a_loss(ranks, schedule):
    for asked, what in (({"target": torch.zeros(8, 4)}, "a target"), ({"losses": []}, "losses")):
        says = f"the last rank has {what} and its schedule no loss_fn: there is nothing to learn from"
        works = f"works: {schedule.__name__}(..., loss_fn=...) on every rank"
        found = ranks(2, without_loss, schedule, asked)[1]
        assert found.startswith(f"{says} (setting: loss_fn); {works}")


def wrong_rows():
    rank = dist.get_rank()
    stage = PipelineStage(Layer(), rank, 2, torch.device("cpu"))
    schedule = ScheduleKFKB(stage, 4, squared, timeout_s=TIMEOUT_S)
    with pytest.raises((UsageError, WorkerError)) as caught:  # two rows of output for one of the target
        schedule.step(*[torch.randn(8, 4)][: rank == 0], **({"target": torch.zeros(4, 4)} if rank else {}))
    return str(caught.value)


def test_a_target_of_another_batch(ranks):
    assert all("a target of 4 rows for a batch of 8" in text for text in ranks(2, wrong_rows))


def with_loss(loss_fn, weight=None):
    # The others are told at once: a timeout that a slow machine can meet has no part in it.
    return train(Layer(), loss=loss_fn, weight=weight, timeout_s=30.0)


def a_number(output, target):
    return 1.0


def each_row(output, target):
    return (output - target).square()


def without_gradient(output, target):
    return squared(output.detach(), target)


def infinite(target):
    return float("inf")


@pytest.mark.parametrize(
    ("loss_fn", "weight", "says"),
    [
        (a_number, None, "the loss of a micro-batch is 1.0 (setting: loss_fn)"),
        (each_row, None, "the loss of a micro-batch is of shape (2, 4) (setting: loss_fn)"),
        (without_gradient, None, "the loss does not follow from the output"),
        (squared, infinite, "the weights of the micro-batches are [inf, inf, inf, inf]"),
    ],
)
def test_a_loss_that_cannot_be_learned_from(ranks, loss_fn, weight, says):
    first, last = ranks(2, with_loss, loss_fn, weight)
    assert last[0] == "UsageError"
    assert says in last[1]
    assert f"rank 1 raised UsageError in step 1: {says}" in first[1]


def no_target():
    rank = dist.get_rank()
    stage = PipelineStage(Layer(), rank, 2, torch.device("cpu"))
    schedule = ScheduleKFKB(stage, 4, squared, timeout_s=TIMEOUT_S)
    with pytest.raises((UsageError, WorkerError)) as caught:
        schedule.step(*[torch.randn(8, 4)][: rank == 0])
    return str(caught.value)


def test_a_target_that_is_missing(ranks):
    assert "the last rank has no target" in ranks(2, no_target)[0]
