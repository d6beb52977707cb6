"""How a step ends, whoever found its gradients: clipped, refused or left out, applied; and what is due."""

import math
import time
import warnings

import pytest
import torch

from plait import checkpoint
from plait.errors import FileError, NonfiniteError, UsageError
from plait.evaluation import Evaluated
from plait.progress import Progress, Step, check_settings, read, unfit
from reference_jobs import EVERYTHING, job

FINE = job(clip_norm=0.5, schedule=None)


def progress_of(one=FINE):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return weight, Progress(job=one, optimizer=optimizer, schedule=schedule)


def finish(parameter, progress, loss=1.0, gradient=(3.0, 4.0), **more):
    parameter.grad = torch.tensor(gradient)
    clip = lambda most: torch.nn.utils.clip_grad_norm_([parameter], most)  # noqa: E731
    return progress.finish(loss, clip=clip, started_s=time.perf_counter(), **more)


def test_a_step_is_clipped_applied_and_counted():
    weight, progress = progress_of()
    done = finish(weight, progress)
    assert (done.step, done.loss, done.norm, done.skipped, done.learning_rate) == (0, 1.0, 5.0, False, 0.5)
    torch.testing.assert_close(weight.detach(), torch.tensor([1 - 0.5 * 0.3, 1 - 0.5 * 0.4]))
    assert weight.grad is None
    assert finish(weight, progress).learning_rate == 0.25
    assert progress.losses == [1.0, 1.0]


def test_without_a_clip_norm_nobody_is_asked_to_clip():
    weight, progress = progress_of(job(clip_norm=None))
    weight.grad = torch.ones(2)
    done = progress.finish(1.0, clip=lambda most: pytest.fail("clipped"), started_s=0.0)
    assert done.norm is None
    assert weight.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("loss", "gradient", "more", "said"),
    [
        (math.nan, (1.0, 1.0), {"weight": 0.0}, "a loss of nan over a weight of 0 at step 0"),
        (math.inf, (1.0, 1.0), {}, "a loss of inf at step 0"),
        (1.0, (math.inf, 1.0), {}, "gradients of norm inf at step 0"),
    ],
)
def test_what_is_not_finite_stops_or_is_left_out(loss, gradient, more, said):
    weight, progress = progress_of()
    with pytest.raises(NonfiniteError, match=f"job 'small' has {said}"):
        finish(weight, progress, loss, gradient, **more)
    assert progress.losses == []
    weight, progress = progress_of(job(FINE, nonfinite="skip"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of a schedule that moves before the optimizer
        done = finish(weight, progress, loss, gradient, **more)
    assert done.skipped
    assert weight.tolist() == [1.0, 1.0]
    assert weight.grad is None
    assert progress.skipped == [0]
    assert finish(weight, progress).learning_rate == 0.25  # it goes by the number of the step alone


def advanced(total, *, stop_after=None, save_every=None):
    _, progress = progress_of(job(EVERYTHING, clip_norm=None))  # evaluated after every second step
    seen = []

    def take(step):
        progress.losses.append(float(step))
        seen.append(f"step {step}")
        return Step(step=step, loss=0.0, norm=None, skipped=False, learning_rate=0.0, seconds=0.0)

    def evaluate(done):
        seen.append(f"evaluated {done}")
        return Evaluated(step=done, loss=0.0, metrics={})

    progress.advance(
        take,
        total=total,
        stop_after=stop_after,
        evaluate=evaluate,
        save=lambda: seen.append("saved"),
        save_every=save_every,
        on_step=lambda step: seen.append(f"told {step.step}"),
    )
    return seen, progress


def test_evaluation_and_saving_when_they_are_due():
    seen, progress = advanced(3, save_every=2)
    first = ["step 0", "told 0", "step 1", "evaluated 2"]
    assert seen == [*first, "saved", "told 1", "step 2", "evaluated 3", "saved", "told 2"]
    assert [evaluated.step for evaluated in progress.evaluations] == [2, 3]
    seen, _ = advanced(5, stop_after=3)  # the last of this call, not of the job: saved, and not evaluated
    assert seen == [*first, "told 1", "step 2", "saved", "told 2"]
    assert advanced(2, stop_after=7)[0] == [*first, "saved", "told 1"]


def test_a_state_is_restored(tmp_path):
    weight, progress = progress_of(job(FINE, nonfinite="skip"))
    finish(weight, progress, math.nan)
    finish(weight, progress)
    progress.evaluations.append(Evaluated(step=2, loss=0.5, metrics={"right": 0.25}))
    file = tmp_path / checkpoint.NAME
    checkpoint.save(file, progress.state({"weight": weight.detach()}, progress.optimizer.state_dict()))
    state = read(progress.job, file, device="cpu")
    _, other = progress_of(progress.job)
    other.restore(state)
    assert other.losses[1:] == [1.0]
    assert math.isnan(other.losses[0])
    assert (other.evaluations, other.skipped) == (progress.evaluations, [0])
    assert other.schedule.last_epoch == 2
    done = other.result(torch.nn.Linear(1, 1), {}, total=2, seconds=1.0)
    assert (done.steps, done.finished) == (2, True)


def test_other_files_are_refused(tmp_path):
    file = tmp_path / checkpoint.NAME
    checkpoint.save(file, {"weights": torch.zeros(3)})
    with pytest.raises(FileError, match="has no job: it is not one of a job"):
        read(FINE, file, device="cpu")
    _, progress = progress_of()
    checkpoint.save(file, progress.state({}, {}))
    with pytest.raises(FileError, match="of another job: its seed is 3, and this job's is 4"):
        read(job(FINE, seed=4), file, device="cpu")
    assert "does not fit what the job builds now: no such" in str(unfit(file, ValueError("no such")))


@pytest.mark.parametrize("given", [{"save_every": 0}, {"stop_after": -1}, {"save_every": 2}])
def test_settings_that_cannot_be_meant_are_refused(given):
    with pytest.raises(UsageError) as caught:
        check_settings(**{"save_every": None, "stop_after": None, "directory": None, **given})
    assert caught.value.works in ("1 or more", "runs/first")
