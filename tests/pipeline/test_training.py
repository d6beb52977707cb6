"""A job trained in stages ends with what plait.reference ends with."""

import pytest
import torch
from pipeline_jobs import (
    CLOSE,
    JOB,
    TIED,
    assert_near,
    assert_trained_alike,
    job,
    named,
    plan_for,
    summary,
)

from plait import Timeline, reference
from plait.data import indices
from plait.errors import NonfiniteError, UsageError
from plait.evaluation import Evaluation
from plait.factory import Factory
from plait.pipeline import orders
from plait.pipeline.evaluating import rounds
from plait.pipeline.training import train


def each(jobs):
    """One after the other, in the same processes."""
    return [summary(train(one, plan)) for one, plan in jobs]


def in_stages(ranks, stages, jobs):
    """Of each job, in so many micro-batches, the summaries of all ranks."""
    given = [(one, plan_for(one, stages, count, k=2)) for one, count in jobs]
    # With two, as torchrun starts them: train() itself lets them meet.
    return zip(*ranks(stages, each, given, group=stages > 2), strict=True)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_job_is_trained_as_plainly(ranks, stages):
    jobs = [(JOB, 5), (TIED, 4)] if stages == 4 else [(JOB, 5)]
    for (one, _), found in zip(jobs, in_stages(ranks, stages, jobs), strict=True):
        assert_trained_alike(found, reference.train(one))


FROZEN = job(model="half_frozen", evaluation=None)
PLACED = job(optimizer="by_place", evaluation=None)
KEPT = job(optimizer="adagrad", evaluation=None, clip_norm=None)


def test_frozen_weights_groups_by_place_and_state_from_the_beginning(ranks):
    jobs = [(FROZEN, 4), (PLACED, 4), (KEPT, 3)]
    for (one, _), found in zip(jobs, in_stages(ranks, 3, jobs), strict=True):
        assert_trained_alike(found, reference.train(one))
    assert len(reference.train(FROZEN).optimizer["state"]) == 4


def test_it_is_bit_equal_to_plain_training_in_the_same_micro_batches(ranks):
    """Where no weight is tied and nothing drops out; so BatchNorm, which sees micro-batches, is, too."""
    single = job(precision="fp32", evaluation=None)
    jobs = [(single, 4), (job(single, model="normal"), 3), (job(single, precision="bf16"), 4)]
    for (one, count), found in zip(jobs, in_stages(ranks, 3, jobs), strict=True):
        assert_trained_alike(found, reference.train(job(one, accumulate=count)), close=0.0)


def test_of_one_stage_dropout_is_drawn_as_plainly_does():
    one = job(model="dropping", precision="fp32", evaluation=None)
    found = train(one, plan_for(one, 1, 3))
    assert_near(summary(found), summary(reference.train(job(one, accumulate=3))), 0.0)


def drops():
    one = job(model="dropping", evaluation=None)
    return [train(one, plan_for(one, 2, 3, k=k)).losses for k in (1, 2, 1)]


def test_dropout_does_not_depend_on_the_order(ranks):
    """Each stage draws its own masks, so they are others than one device's, as in data parallelism."""
    plainly = reference.train(job(model="dropping", accumulate=3, evaluation=None)).losses
    for first, other, again in ranks(2, drops):
        assert first == other == again
        assert first != plainly


def test_other_orders_than_kfkb(ranks):
    for made in ranks(3, in_orders):
        assert len(set(made)) == 1
        assert made[0] == pytest.approx(reference.train(JOB).losses, abs=CLOSE)


def in_orders():
    made = [orders.gpipe(3, 5), orders.depth(3, 5, 2), orders.work_conserving(3, 5, 2)]
    return [train(JOB, plan_for(JOB, 3, order=order)).losses for order in made]


def adapting(tied):
    chosen = []
    timeline = Timeline()
    limited = train(TIED, tied, adaptive=True, memory_limit="20GiB", timeline=timeline)
    free = train(JOB, plan_for(JOB, 2), adaptive=True, on_step=chosen.append)
    return summary(limited), summary(free), len(timeline.spans), [step.step for step in chosen]


def test_an_adaptive_run_trains_the_same(ranks):
    limited, free, spans, steps = zip(*ranks(2, adapting, plan_for(TIED, 2)), strict=True)
    assert_trained_alike(limited, reference.train(TIED))
    assert_trained_alike(free, reference.train(JOB))
    assert min(spans) >= TIED.steps * 2 * 2
    assert steps[0] == steps[1] == list(range(6))


# --- what is not finite, or counts for nothing ------------------------------------------------------

BROKEN = job(data=Factory(named("points"), broken_at=3), evaluation=None)
WEIGHTLESS = job(BROKEN, model="normal", data=Factory(named("points"), weightless=True), nonfinite="skip")


def stopped():
    with pytest.raises(NonfiniteError) as caught:
        train(BROKEN, plan_for(BROKEN, 3))
    skipping = job(BROKEN, nonfinite="skip")
    return str(caught.value), summary(train(skipping, plan_for(skipping, 3))), weightless()


def weightless():
    return summary(train(WEIGHTLESS, plan_for(WEIGHTLESS, 3)))


def test_a_loss_that_is_not_finite_stops_all_or_is_skipped(ranks):
    step = next(n for n in range(6) if 3 in indices(seed=0, step=n, batch=10, size=40))
    said, skipped, nothing = zip(*ranks(3, stopped), strict=True)
    with pytest.raises(NonfiniteError) as caught:
        reference.train(BROKEN)
    assert set(said) == {str(caught.value)}
    assert f"at step {step}" in said[0]
    expected = reference.train(job(BROKEN, nonfinite="skip"))
    assert step in expected.skipped
    assert_trained_alike(skipped, expected)
    # Steps of weight zero are not run at all: BatchNorm has seen none of them.
    assert_trained_alike(nothing, reference.train(WEIGHTLESS), close=0.0)
    assert nothing[0]["skipped"] == tuple(range(6))


# --- evaluation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 17, 100])
@pytest.mark.parametrize("batch", [1, 4, 30])
@pytest.mark.parametrize("stages", [1, 3])
def test_rounds_hold_every_row_once_in_micro_batches_that_are_small_enough(rows, batch, stages):
    found = rounds(rows, batch, stages)
    assert [row for some, _ in found for row in some] == list(range(rows))
    for some, count in found:
        assert stages <= count <= 4 * stages
        assert -(-len(some) // count) <= batch


def few(rows):
    few_rows = Evaluation(data=Factory(named("points"), rows=rows), batch=1)
    return summary(train(job(evaluation=few_rows, steps=1), plan_for(JOB, 3)))


@pytest.mark.parametrize("rows", [1, 14])
def test_evaluation_on_fewer_rows_than_stages_and_in_several_rounds(ranks, rows):
    expected = reference.train(job(evaluation=Evaluation(data=Factory(named("points"), rows=rows)), steps=1))
    assert_trained_alike(ranks(3, few, rows), expected)


# --- what cannot be ---------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_before_anything_runs():
    one = plan_for(JOB, 1, 2)
    with pytest.raises(UsageError, match="for a batch of 10 rows, and the job's has 8"):
        train(job(batch=8), one)
    with pytest.raises(UsageError, match=r"2 stages, and there are 1 ranks.*works: a plan of 1 stages"):
        train(JOB, plan_for(JOB, 2))
    with pytest.raises(UsageError, match="for 5 blocks, and the job's chain has 4"):
        train(job(model="normal"), one)
    with pytest.raises(UsageError, match=r"memory limit of 1GiB .*adaptive=True"):
        train(JOB, one, memory_limit="1GiB")
    with pytest.raises(UsageError, match="save_every is 0"):
        train(JOB, one, save_every=0)
    with pytest.raises(UsageError, match="no directory"):
        train(JOB, one, save_every=1)


class Telling(torch.nn.Linear):
    """Keeps more in its state than tensors."""

    def get_extra_state(self):
        return {"told": 1}

    def set_extra_state(self, state):
        pass


def telling():
    return torch.nn.Sequential(Telling(6, 5))


def test_a_model_with_a_state_of_its_own_kind_is_refused():
    one = job(model=Factory(f"{__file__}:telling"))
    with pytest.raises(UsageError, match=r"_extra_state.*none of its parameters"):
        train(one, plan_for(one, 1, 2))


def disagreeing():
    import torch.distributed as dist

    plan = plan_for(JOB, 2, 4 + dist.get_rank())
    with pytest.raises(Exception, match="rank 1 has plan") as caught:
        train(JOB, plan)
    return type(caught.value).__name__


def test_ranks_with_different_plans_are_told(ranks):
    assert ranks(2, disagreeing) == ["WorkerError"] * 2
