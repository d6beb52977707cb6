"""One process: equal to a loop written by hand, to the bit, and resumable to the bit."""

import dataclasses
import functools
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from plait import checkpoint, losses, reference, reference_worker
from plait.data import indices
from plait.determinism import seed_micro_batch
from plait.errors import FileError, NonfiniteError, UsageError
from plait.factory import Factory
from plait.job import Evaluation, Job


class Net(nn.Module):
    def __init__(self, dropout, norm):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.frozen(self.drop(self.norm(self.first(x)).relu())))


def net(*, dropout=0.0, norm=False):
    return Net(dropout, norm)


def points(seed, *, count=40, masked=False, broken_at=None):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    y = x.argmax(1) % 4
    if masked:
        y[torch.arange(count) % 5 > 1] = losses.IGNORED
    if broken_at is not None:
        x[broken_at] = math.inf
    return [(x[i], y[i]) for i in range(count)]


BASE = Job(
    name="small",
    model=net,
    data=points,
    loss=losses.cross_entropy,
    optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    batch=8,
    steps=7,
    seed=3,
)
SGD = functools.partial(torch.optim.SGD, lr=0.1)
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, fused=True)
COSINE = Factory("torch.optim.lr_scheduler:CosineAnnealingLR", T_max=10)
STEPS = Factory("torch.optim.lr_scheduler:MultiStepLR", milestones=[2, 5])
EVERYTHING = dataclasses.replace(
    BASE,
    model=functools.partial(net, dropout=0.3, norm=True),
    optimizer=ADAMW,
    schedule=STEPS,
    accumulate=3,
    clip_norm=0.5,
    evaluation=Evaluation(
        data=functools.partial(points, count=11), every=2, metrics={"right": losses.accuracy}
    ),
)


def job(base=BASE, **changes):
    return dataclasses.replace(base, **changes)


def assert_equal(one, other, place="state"):
    """Equal to the bit, through dicts and lists."""
    assert type(one) is type(other), place
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, place
        assert torch.equal(one, other), place
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            assert_equal(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), place
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{place}.{number}")
    else:
        assert one == other or (one != one and other != other), place


def assert_same(one, other):
    """Two results, equal to the bit in all but their time."""
    assert_equal(one.model.state_dict(), other.model.state_dict(), "model")
    assert_equal(one.optimizer, other.optimizer, "optimizer")
    assert_equal(one.losses, other.losses, "losses")
    for field in ("evaluations", "skipped", "steps", "finished"):
        assert getattr(one, field) == getattr(other, field)


def by_hand(one, *, optimizer, schedule=None, clip=None, bf16=False):
    """What a user would write; one batch a step, no accumulation."""
    threads = torch.get_num_threads()
    torch.set_num_threads(one.threads)
    data, history = points(one.seed), []
    model = one.build_model()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer(parameters)
    scheduler = schedule(optimizer) if schedule else None
    for step in range(one.steps):
        rows = indices(seed=one.seed, step=step, batch=one.batch, size=len(data))
        x = torch.stack([data[row][0] for row in rows])
        y = torch.stack([data[row][1] for row in rows])
        seed_micro_batch(one.seed, step, 0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        history.append(loss.item())
    torch.set_num_threads(threads)
    return model, history


@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM, ADAM, ADAMW], ids=["sgd", "momentum", "adam", "adamw"])
@pytest.mark.parametrize("model", [{}, {"dropout": 0.3}, {"norm": True}], ids=["plain", "dropout", "norm"])
def test_it_is_the_loop_that_one_would_write(optimizer, model):
    one = job(optimizer=optimizer, model=functools.partial(net, **model))
    result = reference.train(one)
    wanted, history = by_hand(one, optimizer=optimizer)
    assert list(result.losses) == history
    assert_equal(result.model.state_dict(), wanted.state_dict())


def test_so_it_is_with_clipping_a_schedule_and_bf16():
    cosine = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=10)
    one = job(optimizer=MOMENTUM, schedule=COSINE, clip_norm=0.3, precision="bf16", threads=2)
    steps = []
    result = reference.train(one, on_step=steps.append)
    wanted, history = by_hand(one, optimizer=MOMENTUM, schedule=cosine, clip=0.3, bf16=True)
    assert list(result.losses) == history
    assert_equal(result.model.state_dict(), wanted.state_dict())
    assert [step.step for step in steps] == list(range(7))
    assert all(step.norm > 0.3 for step in steps)
    rates = [step.learning_rate for step in steps]
    assert rates[0] == 0.1
    assert rates == sorted(rates, reverse=True)


def test_it_learns():
    result = reference.train(job(optimizer=ADAM, steps=None, epochs=20))
    assert result.steps == 100
    assert result.finished
    assert sum(result.losses[-5:]) < 0.5 * sum(result.losses[:5])


@pytest.mark.parametrize("accumulate", [2, 3, 8])
@pytest.mark.parametrize("masked", [False, True])
def test_accumulation_changes_nothing_but_rounding(accumulate, masked):
    one = job(
        precision="fp64", data=functools.partial(points, masked=masked), clip_norm=0.2, optimizer=MOMENTUM
    )
    whole, cut = reference.train(one), reference.train(job(one, accumulate=accumulate))
    assert cut.losses == pytest.approx(whole.losses, rel=1e-12)
    for a, b in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_two_runs_are_equal_and_disturb_nobody():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    threads = torch.get_num_threads()
    one = reference.train(job(EVERYTHING, threads=threads + 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    torch.rand(17)
    assert_same(one, reference.train(job(EVERYTHING, threads=threads + 1)))


def test_frozen_parameters_stay():
    result = reference.train(job(optimizer=MOMENTUM))
    assert_equal(result.model.frozen.state_dict(), BASE.build_model().frozen.state_dict())
    assert len(result.optimizer["state"]) == 4


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


def test_evaluation_is_of_the_weights_at_that_step_and_changes_nothing():
    without = reference.train(job(EVERYTHING, evaluation=None))
    result = reference.train(EVERYTHING)
    assert_equal(result.model.state_dict(), without.model.state_dict())
    assert [evaluated.step for evaluated in result.evaluations] == [2, 4, 6, 7]
    x, y = (torch.stack(part) for part in zip(*points(3, count=11), strict=True))
    for stop in (2, 7):
        model = reference.train(job(EVERYTHING, evaluation=None, steps=stop)).model.eval()
        with torch.no_grad():
            output = model(x)
        evaluated = next(e for e in result.evaluations if e.step == stop)
        assert evaluated.loss == pytest.approx(nn.functional.cross_entropy(output, y).item(), rel=1e-5)
        assert evaluated.metrics == {"right": pytest.approx((output.argmax(1) == y).double().mean().item())}
    last = reference.train(job(EVERYTHING, evaluation=Evaluation(data=points)))
    assert [evaluated.step for evaluated in last.evaluations] == [7]


def steps_with(row):
    return [step for step in range(5) if row in indices(seed=3, step=step, batch=8, size=40)]


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_is_not_finite_is_skipped_and_leaves_no_trace(clip, accumulate):
    row = 11
    one = job(
        data=functools.partial(points, broken_at=row), optimizer=ADAM, schedule=COSINE, steps=5,
        nonfinite="skip", clip_norm=clip, accumulate=accumulate,
    )  # fmt: skip
    result = reference.train(one)
    (bad,) = steps_with(row)
    assert result.skipped == (bad,)
    assert [math.isfinite(loss) for loss in result.losses] == [step != bad for step in range(5)]
    assert all(state["step"] == 4 for state in result.optimizer["state"].values())
    assert all(torch.isfinite(tensor).all() for tensor in result.model.state_dict().values())
    rates = []
    reference.train(one, on_step=lambda step: rates.append(step.learning_rate))
    assert len(set(rates)) == 5  # the schedule goes on


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


def test_the_first_step_may_be_the_one(recwarn):
    row = indices(seed=3, step=0, batch=8, size=40)[0]
    one = job(data=functools.partial(points, broken_at=row), nonfinite="skip", schedule=COSINE, steps=2)
    assert reference.train(one).skipped == (0,)
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


def test_or_stops_the_job_with_the_state_as_it_was(tmp_path):
    row = 11
    (bad,) = steps_with(row)
    assert bad > 0
    one = job(data=functools.partial(points, broken_at=row), optimizer=ADAM)
    with pytest.raises(
        NonfiniteError, match=f"job 'small' has a loss of nan over a weight of 8 at step {bad}"
    ) as caught:
        reference.train(one, directory=tmp_path, save_every=1)
    assert caught.value.setting == "nonfinite"
    assert reference.train(one, resume=tmp_path, stop_after=bad).steps == bad


def steep(output, batch):
    """A loss of zero whose gradients are infinite."""
    return (output - output.detach()).sum().sqrt()


def test_gradients_that_overflow_are_seen_where_they_are_clipped():
    one = job(loss=steep, clip_norm=1.0, steps=1)
    with pytest.raises(NonfiniteError, match=r"gradients of norm (inf|nan) at step 0"):
        reference.train(one)
    assert reference.train(job(one, nonfinite="skip")).skipped == (0,)
    assert reference.train(job(one, clip_norm=None, nonfinite="skip")).skipped == ()


def test_a_step_in_which_nothing_counts_is_not_finite():
    one = job(weight=zero, nonfinite="skip", steps=1)
    result = reference.train(one)
    assert result.skipped == (0,)
    assert math.isnan(result.losses[0])
    with pytest.raises(NonfiniteError, match="a loss of nan over a weight of 0 at step 0"):
        reference.train(job(one, nonfinite="stop"))


def zero(batch):
    return 0


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


def run_worker(capsys, *words):
    """The exit code, what was printed, and what was complained of."""
    code = reference_worker.main([str(word) for word in words])
    out, error = capsys.readouterr()
    return code, json.loads(out, parse_constant=pytest.fail) if out else None, error


def test_a_worker_takes_its_job_from_a_file_and_survives_a_restart(tmp_path, capsys):
    (tmp_path / "job.json").write_text(EVERYTHING.to_json())
    command = [tmp_path / "job.json", "--directory", tmp_path / "run", "--save-every", "3", "--resume"]
    reference.train(EVERYTHING, directory=tmp_path / "run", stop_after=2)  # what an earlier start came to
    code, told, _ = run_worker(capsys, *command)
    result = reference.train(EVERYTHING)
    assert (code, told["format"], told["job"]) == (0, "plait.reference/1", "small")
    assert told["losses"] == list(result.losses)
    assert told["evaluations"][-1]["step"] == 7
    assert (told["steps"], told["finished"], told["skipped"]) == (7, True, [])
    assert run_worker(capsys, *command)[1]["losses"] == told["losses"]
    code, _, error = run_worker(capsys, *command[:-1])
    assert code == 2
    assert "holds a checkpoint already" in error
    assert run_worker(capsys, *command[:-1], "--overwrite")[0] == 0
    assert run_worker(capsys, tmp_path / "job.json", "--resume", tmp_path / "run")[0] == 0


def test_or_from_a_jobs_file_by_name(tmp_path, capsys):
    file = tmp_path / "jobs.py"
    file.write_text(
        f"import dataclasses\nfrom plait.job import Job\none = Job.from_json({BASE.to_json()!r})\n"
        "jobs = [one, dataclasses.replace(one, name='short', steps=1, strategy='spill', memory='1MiB')]"
    )
    code, told, error = run_worker(capsys, file, "--job", "short")
    assert (code, told["job"], told["steps"]) == (0, "short", 1)
    assert "job 'short' is trained plainly; its strategy and memory are for others to read" in error
    code, told, error = run_worker(capsys, file, "--job", "small")
    assert (code, told["steps"], error) == (0, 7, "")
    code, told, error = run_worker(capsys, file)
    assert (code, told) == (2, None)
    assert (
        error == f"plait.reference: {file} has 2 jobs (setting: job); works: the name of one: small, short\n"
    )


def test_what_is_not_finite_is_null_in_json(tmp_path, capsys):
    (bad,) = steps_with(11)
    one = job(data=functools.partial(points, broken_at=11), optimizer=ADAM, steps=5, nonfinite="skip")
    one = job(one, evaluation=Evaluation(data=functools.partial(points, broken_at=0)))
    (tmp_path / "job.json").write_text(one.to_json())
    code, told, _ = run_worker(capsys, tmp_path / "job.json")
    assert code == 0
    assert [step for step, loss in enumerate(told["losses"]) if loss is None] == [bad] == told["skipped"]
    assert told["evaluations"][0]["loss"] is None


def from_disk(seed):
    return Path("/no/such/rows").read_text().splitlines()


BAD_JOBS = [
    ({"batch": 41}, 2, "a global batch of 41 rows is larger than the data set of 40"),
    ({"model": Factory(net, colour=1)}, 2, "takes no argument 'colour'"),
    ({"loss": "torch.nn.functional:cross_entropy"}, 2, "the loss failed when called with"),
    ({"data": from_disk}, 2, "No such file or directory: '/no/such/rows'"),
    ({"data": functools.partial(points, broken_at=11)}, 1, "job 'small' has a loss of nan"),
]


@pytest.mark.parametrize(("changes", "code", "reason"), BAD_JOBS, ids=[bad[2][:20] for bad in BAD_JOBS])
def test_a_worker_ends_with_a_line_and_a_code(tmp_path, capsys, changes, code, reason):
    (tmp_path / "job.json").write_text(job(**changes).to_json())
    got, told, error = run_worker(capsys, tmp_path / "job.json")
    assert (got, told) == (code, None)
    assert error.startswith("plait.reference: ")
    assert reason in error
    assert error.count("\n") == 1


def test_so_it_does_over_its_files(tmp_path, capsys):
    file = tmp_path / "job.json"
    code, _, error = run_worker(capsys, file)
    assert (code, "there is no jobs file" in error) == (2, True)
    file.write_text('{"format": "plait.profile/1"}')
    code, _, error = run_worker(capsys, file)
    assert (code, "job.json: the format is 'plait.profile/1'" in error) == (2, True)
    file.write_text(BASE.to_json())
    reference.train(job(seed=4), directory=tmp_path, stop_after=1)
    code, _, error = run_worker(capsys, file, "--directory", tmp_path, "--resume")
    assert (code, "is of another job: its seed is 4" in error) == (2, True)
    code, _, error = run_worker(capsys, file, "--save-every", "0", "--directory", tmp_path / "new")
    assert (code, "save_every is 0" in error) == (2, True)
    with pytest.raises(SystemExit) as ended:
        reference_worker.main([str(file), "--colour"])
    assert ended.value.code == 2


def test_a_checkpoint_that_cannot_be_written_late_is_a_run_that_failed(tmp_path, capsys):
    (tmp_path / "job.json").write_text(job(steps=2).to_json())
    code, told, error = run_worker(
        capsys, tmp_path / "job.json", "--directory", tmp_path / "job.json" / "run"
    )
    assert (code, told) == (1, None)
    assert "cannot be written" in error


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, **dropout)
    )


def sentences(seed):
    tokens = torch.randint(0, 50, (12, 16), generator=torch.Generator().manual_seed(seed))
    labels = tokens.masked_fill(torch.arange(16) > torch.arange(12)[:, None] + 2, losses.IGNORED)
    return [{"input_ids": tokens[i], "labels": labels[i]} for i in range(12)]


def test_a_hugging_face_model_with_its_own_loss_or_ours():
    own = job(
        model=gpt2, data=sentences, loss=losses.model_loss, weight=losses.next_tokens, batch=4, steps=3,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
    )  # fmt: skip
    whole = reference.train(own)
    cut = reference.train(job(own, accumulate=3))
    ours = reference.train(job(own, loss=losses.next_token, weight=None))
    assert cut.losses == pytest.approx(whole.losses, rel=1e-6)
    assert ours.losses == pytest.approx(whole.losses, rel=1e-6)
    embedding = whole.model.transformer.wte.weight
    assert embedding is whole.model.lm_head.weight
    assert not torch.equal(embedding, own.build_model().transformer.wte.weight)
