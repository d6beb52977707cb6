"""Plain training stops and goes on to the bit; a checkpoint of anything else is refused."""

import functools

import pytest
import torch

from plait import checkpoint, reference
from plait.errors import FileError, UsageError
from reference_jobs import ADAM, BASE, COSINE, EVERYTHING, assert_same, job, net, points, steps_with


@pytest.mark.parametrize("stop", [1, 4, 6])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, stop, precision):
    one = job(EVERYTHING, precision=precision)
    whole = reference.train(one)
    part = reference.train(one, directory=tmp_path, stop_after=stop)
    assert (part.steps, part.finished) == (stop, False)
    assert part.losses == whole.losses[:stop]
    assert_same(reference.train(one, resume=tmp_path), whole)
    assert_same(reference.train(one, resume=tmp_path / reference.CHECKPOINT), whole)


def test_checkpoints_are_written_along_the_way_and_one_of_a_finished_job_is_its_result(tmp_path):
    class Stop(Exception):
        pass

    def crash(step):
        if step.step == 4:
            raise Stop

    whole = reference.train(EVERYTHING)
    with pytest.raises(Stop):
        reference.train(EVERYTHING, directory=tmp_path, save_every=2, on_step=crash)
    seen = []
    resumed = reference.train(EVERYTHING, resume=tmp_path, directory=tmp_path, on_step=seen.append)
    assert [step.step for step in seen] == [4, 5, 6]
    assert_same(resumed, whole)
    assert_same(reference.train(EVERYTHING, resume=tmp_path), whole)
    longer = reference.train(job(EVERYTHING, steps=9), resume=tmp_path)
    assert longer.losses == reference.train(job(EVERYTHING, steps=9)).losses


def test_a_run_that_skipped_steps_is_resumed_as_it_was(tmp_path):
    row = 11
    (bad,) = steps_with(row)
    one = job(
        data=functools.partial(points, broken_at=row), optimizer=ADAM, schedule=COSINE, nonfinite="skip"
    )
    reference.train(one, directory=tmp_path, stop_after=bad + 1)
    resumed = reference.train(one, resume=tmp_path)
    assert resumed.skipped[0] == bad
    assert_same(resumed, reference.train(one))


OTHER = [
    ("name", "other"),
    ("batch", 4),
    ("seed", 4),
    ("threads", 2),
    ("accumulate", 2),
    ("clip_norm", 0.25),
    ("precision", "fp64"),
    ("optimizer", ADAM),
    ("schedule", None),
    ("model", net),
]


@pytest.mark.parametrize(("field", "value"), OTHER)
def test_a_checkpoint_of_another_job_is_refused_by_the_field_that_differs(tmp_path, field, value):
    one = job(EVERYTHING, steps=1, evaluation=None)
    reference.train(one, directory=tmp_path)
    with pytest.raises(FileError, match=f"is of another job: its {field} is ") as caught:
        reference.train(job(one, **{field: value}), resume=tmp_path)
    assert caught.value.setting == field


def test_what_does_not_change_a_step_may_change(tmp_path):
    one = job(EVERYTHING, steps=1)
    reference.train(one, directory=tmp_path)
    changed = job(
        one, steps=None, epochs=1, evaluation=None, priority="background", strategy="data", memory="1GiB"
    )
    assert reference.train(changed, resume=tmp_path).finished


def test_a_checkpoint_that_the_code_has_outgrown_is_refused(tmp_path):
    reference.train(BASE, directory=tmp_path, stop_after=1)
    state = checkpoint.load(tmp_path / reference.CHECKPOINT)
    state["model"]["first.weights"] = state["model"].pop("first.weight")
    checkpoint.save(tmp_path / reference.CHECKPOINT, state)
    with pytest.raises(FileError, match=r"does not fit what the job builds now: .*first\.weight"):
        reference.train(BASE, resume=tmp_path)


@pytest.mark.parametrize("name", ["save_every", "stop_after"])
def test_a_step_number_below_one_is_refused(name):
    with pytest.raises(UsageError, match=f"{name} is 0"):
        reference.train(BASE, **{name: 0})


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    checkpoint.save(tmp_path / reference.CHECKPOINT, {"weights": torch.zeros(3)})
    with pytest.raises(FileError, match="has no job: it is not one of a job"):
        reference.train(job(), resume=tmp_path / reference.CHECKPOINT)


def test_no_checkpoint_to_resume_from(tmp_path):
    with pytest.raises(FileError, match="there is no checkpoint"):
        reference.train(BASE, resume=tmp_path)


def test_saving_needs_a_place():
    with pytest.raises(UsageError, match="save_every has no directory") as caught:
        reference.train(BASE, save_every=1)
    assert caught.value.setting == "directory"


def test_the_same_call_goes_on_where_it_was_and_begins_where_there_is_nothing(tmp_path):
    again = {"directory": tmp_path / "run", "resume": True}
    assert reference.train(BASE, stop_after=3, **again).steps == 3
    seen = []
    whole = reference.train(BASE, on_step=seen.append, **again)
    assert [step.step for step in seen] == [3, 4, 5, 6]
    assert_same(whole, reference.train(BASE))
    assert_same(reference.train(BASE, **again), whole)


def test_a_checkpoint_is_only_overwritten_when_told(tmp_path):
    reference.train(BASE, directory=tmp_path, stop_after=3)
    with pytest.raises(FileError, match="holds a checkpoint already"):
        reference.train(BASE, directory=tmp_path, stop_after=1)
    assert reference.train(BASE, resume=tmp_path, stop_after=3).steps == 3
    assert reference.train(BASE, directory=tmp_path, overwrite=True, stop_after=1).steps == 1
    assert reference.train(BASE, resume=tmp_path, stop_after=1).steps == 1
