"""Checkpoints of a job in stages: a plain run's file, to go on from under any plan, or plainly."""

import os
import signal
from dataclasses import replace

import pytest
import torch.distributed as dist
from pipeline_jobs import CLOSE, JOB, TABLED, assert_near, assert_trained_alike, job, plan_for, summary

from plait import checkpoint, reference
from plait.errors import FileError, PlaitError, WorkerError
from plait.pipeline.training import train

DROPPING = job(model="dropping", precision="fp32")


def interrupted(one, plan, folder):
    """Whole; and stopped, as after a crash, with the same call each time."""
    again = {"directory": folder, "save_every": 2, "resume": True}
    train(one, plan, **again, stop_after=3)
    return summary(train(one, plan)), summary(train(one, plan, **again))


@pytest.mark.parametrize("one", [DROPPING, TABLED], ids=["dropout", "tied"])
def test_a_resumed_run_ends_with_the_same_bits(ranks, tmp_path, one):
    for whole, resumed in ranks(3, interrupted, one, plan_for(one, 3, 4), str(tmp_path)):
        assert whole["finished"]
        assert_near(resumed, whole, 0.0)


def test_a_run_that_is_done_is_not_trained_again(tmp_path):
    whole = train(DROPPING, plan_for(DROPPING, 1, 3), directory=tmp_path)
    again = train(DROPPING, plan_for(DROPPING, 1, 3), resume=tmp_path, on_step=pytest.fail)
    assert_near(summary(again), summary(whole), 0.0)


def shifted(plan):
    """Cut one block later: other weights on each stage."""
    first, second = plan.stages
    stages = replace(first, end=first.end + 1), replace(second, first=second.first + 1)
    return replace(plan, stages=stages)


def under_plans(folder, first, second):
    """From a plain run's file; then under another plan, which leaves the rest to a plain run."""
    from_plain = summary(train(TABLED, first, resume=f"{folder}/plain"))
    one = job(TABLED, optimizer="by_place")
    train(one, first, directory=f"{folder}/parts", stop_after=2)
    other = train(one, second, directory=f"{folder}/parts", resume=True, stop_after=4)
    return from_plain, summary(other)


def test_plain_runs_and_plans_go_on_from_each_other(ranks, tmp_path):
    reference.train(TABLED, directory=tmp_path / "plain", stop_after=3)
    plans = plan_for(TABLED, 2, 5, k=2), shifted(plan_for(TABLED, 2, 3))
    from_plain, other = zip(*ranks(2, under_plans, str(tmp_path), *plans), strict=True)
    assert_trained_alike(from_plain, reference.train(TABLED))
    one = job(TABLED, optimizer="by_place")
    assert_trained_alike(other, reference.train(one, stop_after=4))
    rest = reference.train(one, resume=tmp_path / "parts")
    assert_near(summary(rest), summary(reference.train(one)), CLOSE)


def save(folder):
    train(job(evaluation=None), plan_for(JOB, 2, 4), directory=folder)


def test_the_file_is_a_plain_run_s(ranks, tmp_path):
    """In one precision and the same micro-batches, to the bit."""
    one = job(evaluation=None)
    ranks(2, save, str(tmp_path / "stages"))
    reference.train(job(one, accumulate=4), directory=tmp_path / "plain")
    stages, plain = (checkpoint.load(tmp_path / name / checkpoint.NAME) for name in ("stages", "plain"))
    stages.pop("job"), plain.pop("job")
    assert_near(stages, dict(plain, model=dict(plain["model"])), 0.0)
    assert list(stages["model"]) == list(plain["model"])


def refused(folder, one):
    """What each rank is told of a checkpoint that rank 0 cannot use."""
    with pytest.raises(PlaitError) as caught:
        train(one, plan_for(one, 2), resume=folder)
    return type(caught.value), caught.value.what


def renamed(state):
    state["model"]["0.name"] = state["model"].pop("0.weight")


def regrouped(state):
    state["optimizer"]["param_groups"][0]["params"].pop()


@pytest.mark.parametrize(
    ("spoil", "seed", "said"),
    [
        (dict, 1, "of another job: its seed is 0, and this job's is 1"),
        (renamed, 0, "does not fit what the job builds now: Missing key(s) in state_dict: 0.weight"),
        (regrouped, 0, "parameter groups of [9] parameters, where the job's optimizer has [10]"),
    ],
    ids=["another job", "another model", "another optimizer"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_on_all_ranks(ranks, tmp_path, spoil, seed, said):
    file = tmp_path / checkpoint.NAME
    reference.train(JOB, directory=tmp_path, stop_after=1)
    state = checkpoint.load(file)
    spoil(state)
    checkpoint.save(file, state)
    first, second = ranks(2, refused, str(tmp_path), job(seed=seed))
    assert (first[0], second[0]) == (FileError, WorkerError)
    assert said in first[1]
    assert said in second[1]


def fails_alone(folder):
    """One rank raises between steps."""

    def wants_out(step):
        if step.step == 1 and dist.get_rank() == 1:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError) as caught:
        train(JOB, plan_for(JOB, 3), on_step=wants_out, directory=folder, save_every=1)
    return str(caught.value)


def test_an_error_on_one_rank_is_told_to_all(ranks, tmp_path):
    first, raised, last = ranks(3, fails_alone, str(tmp_path))
    assert raised == "enough"
    for said in (first, last):
        assert "rank 1 raised RuntimeError" in said
        assert "enough" in said


def dies(folder):
    """One rank is killed between two steps."""

    def farewell(step):
        if step.step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerError) as caught:
        train(JOB, plan_for(JOB, 3), on_step=farewell, directory=folder, save_every=1)
    return str(caught.value)


def test_a_rank_that_is_killed_ends_the_run_and_leaves_its_checkpoint(ranks, tmp_path):
    first, _, last = ranks(3, dies, str(tmp_path), lost=[1])
    assert "rank 1" in first
    assert "rank 1" in last
    plainly = reference.train(JOB, resume=tmp_path)
    assert_near(summary(plainly), summary(reference.train(JOB)), CLOSE)


def cannot_write(folder):
    with pytest.raises(PlaitError) as caught:
        train(JOB, plan_for(JOB, 2), directory=f"{folder}/file/below")
    return str(caught.value)


def test_a_checkpoint_that_cannot_be_written_is_told_to_all(ranks, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for said in ranks(2, cannot_write, str(tmp_path)):
        assert "below/checkpoint cannot be written" in said
