"""The strategy "data": real workers with DDP agree with one process in float64, whatever the shares."""

import dataclasses
import functools
import gc
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from plait import losses, reference, reference_worker
from plait.data import indices, share
from plait.determinism import seed_micro_batch
from plait.errors import UsageError
from plait.factory import Factory
from plait.job import Evaluation, Job


def net(*, dropout=0.0, norm=False):
    split = [nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2), nn.Flatten()]
    middle = nn.Sequential(*split) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(5, 8), middle, nn.Dropout(dropout), nn.Linear(8, 3))


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x):
        return self.used(x)


def points(seed, *, masked=False):
    x = torch.randn(30, 5, generator=torch.Generator().manual_seed(seed))
    y = x.argmax(1) % 3
    if masked:
        y[torch.arange(30) % 3 > 0] = losses.IGNORED
    return [(x[i], y[i]) for i in range(30)]


BASE = Job(
    name="shared",
    model=net,
    data=points,
    loss=losses.cross_entropy,
    optimizer=functools.partial(torch.optim.AdamW, lr=0.05),
    schedule=Factory("torch.optim.lr_scheduler:ExponentialLR", gamma=0.9),
    batch=8,
    steps=4,
    precision="fp64",
    evaluation=Evaluation(data=points, every=2, metrics={"right": losses.accuracy}),
)


def train(text, **options):
    """On every rank: the result, as plain values."""
    result = reference.train(Job.from_json(text), **options)
    assert not dist.is_initialized()
    return {
        "losses": result.losses,
        "evaluations": result.evaluations,
        "model": result.model.state_dict(),
        "skipped": result.skipped,
    }


def resumed(text, directory):
    return train(text, resume=directory)


def stopped(text, directory):
    return train(text, directory=directory, stop_after=2)


def assert_close(got, wanted):
    assert got["losses"] == pytest.approx(wanted["losses"], abs=1e-10, nan_ok=True)
    assert got["skipped"] == wanted["skipped"]
    for one, other in zip(got["evaluations"], wanted["evaluations"], strict=True):
        assert one.loss == pytest.approx(other.loss, abs=1e-10)
        assert one.metrics == pytest.approx(other.metrics, abs=1e-10)
    for name, tensor in wanted["model"].items():
        torch.testing.assert_close(got["model"][name], tensor, rtol=0, atol=1e-10)


def assert_ranks_equal(results):
    for result in results[1:]:
        assert result["losses"] == results[0]["losses"]
        assert result["evaluations"] == results[0]["evaluations"]
        for name, tensor in results[0]["model"].items():
            assert torch.equal(result["model"][name], tensor), name


CASES = {
    "even": {},
    "uneven": {"batch": 7},
    "fewer rows than ranks": {"batch": 2, "evaluation": None},
    "accumulated": {"batch": 7, "accumulate": 3},
    "masked": {"data": functools.partial(points, masked=True), "batch": 6, "accumulate": 2, "seed": 5},
    "clipped": {"clip_norm": 0.1, "batch": 5},
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_workers_agree_with_one_process(ranks, world, case):
    one = dataclasses.replace(BASE, **CASES[case])
    results = ranks(world, train, one.to_json(), group=False)
    assert_ranks_equal(results)
    assert_close(results[0], train(one.to_json()))


def test_the_masked_case_has_ranks_on_which_nothing_counts():
    one = dataclasses.replace(BASE, **CASES["masked"])
    batches, objective = one.build_batches(), one.build_objective()
    weights = [
        [objective.weigh(batches.fetch([rows[i] for i in share(6, rank, 3)])) for rank in range(3)]
        for rows in map(batches.indices, range(4))
    ]
    assert any(0 in step for step in weights)
    assert all(sum(step) > 0 for step in weights)


def by_hand(one, world):
    """What DDP does to dropout and BatchNorm: each rank draws its own mask and normalises its own rows."""
    torch.set_num_threads(1)
    data, model = points(one.seed), one.build_model()
    optimizer = one.build_optimizer(model.named_parameters())
    schedule = one.build_schedule(optimizer)
    for step in range(one.steps):
        rows = indices(seed=one.seed, step=step, batch=one.batch, size=30)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for rank in reversed(range(min(world, one.batch))):  # rank 0 last, so that its statistics stay
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
            mine = [data[rows[i]] for i in share(len(rows), rank, world)]
            x, y = (torch.stack(part) for part in zip(*mine, strict=True))
            seed_micro_batch(one.seed, step, 0, rank=rank)
            loss = nn.functional.cross_entropy(model(x.double()), y) * (len(mine) / one.batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.state_dict()


@pytest.mark.parametrize(("batch", "world"), [(7, 2), (2, 3)], ids=["uneven", "a rank without rows"])
def test_dropout_and_batch_norm_differ_as_they_always_do_under_ddp(ranks, batch, world):
    model = functools.partial(net, dropout=0.4, norm=True)
    one = dataclasses.replace(BASE, model=model, batch=batch, evaluation=None)
    results = ranks(world, train, one.to_json(), group=False)
    assert_ranks_equal(results)
    for name, tensor in by_hand(one, world).items():
        torch.testing.assert_close(results[0]["model"][name], tensor, rtol=0, atol=1e-10)


def test_evaluation_uses_rank_0s_statistics_on_every_rank(ranks):
    one = dataclasses.replace(BASE, model=functools.partial(net, norm=True), batch=7)
    results = ranks(2, train, one.to_json(), group=False)
    assert_ranks_equal(results)
    model = one.build_model()
    model.load_state_dict(results[0]["model"])
    x, y = (torch.stack(part) for part in zip(*points(0), strict=True))
    wanted = nn.functional.cross_entropy(model.eval()(x.double()), y).item()
    assert results[0]["evaluations"][-1].loss == pytest.approx(wanted, abs=1e-10)


def test_a_run_is_resumed_to_the_bit_by_as_many_and_closely_by_fewer(ranks, tmp_path):
    text = dataclasses.replace(BASE, batch=7).to_json()
    whole = ranks(2, train, text, group=False)
    ranks(2, stopped, text, tmp_path, group=False)
    again = ranks(2, resumed, text, tmp_path, group=False)
    assert_ranks_equal([whole[0], *again])
    assert_close(resumed(text, tmp_path), whole[0])


def stacked():
    wide = [nn.Linear(300, 300), nn.GELU(), nn.LayerNorm(300), nn.Linear(300, 300), nn.GELU()]
    return nn.Sequential(nn.Linear(5, 300), nn.GELU(), *wide, nn.Linear(300, 4))


def test_three_ranks_resume_to_the_bit(ranks, tmp_path):
    text = dataclasses.replace(BASE, model=stacked, batch=9).to_json()
    whole = ranks(3, train, text, group=False)
    ranks(3, stopped, text, tmp_path, group=False)
    again = ranks(3, resumed, text, tmp_path, group=False)
    assert_ranks_equal([whole[0], *again])


def in_a_group(text):
    result = reference.train(Job.from_json(text))
    assert dist.is_initialized()  # it was not ours to close
    return result.losses


def test_a_process_group_that_is_there_is_used_and_kept(ranks):
    got = ranks(2, in_a_group, BASE.to_json())
    assert got[0] == got[1] == pytest.approx(train(BASE.to_json())["losses"], abs=1e-10)


def counted(text):
    buckets = []

    def attach(model):
        assert isinstance(model, DistributedDataParallel)

        def hook(state, bucket):
            buckets.append(bucket.buffer().numel())
            tensor = bucket.buffer().div_(dist.get_world_size())
            return dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0])

        model.register_comm_hook(None, hook)

    result = train(text, attach=attach)
    return result["losses"], sum(buckets)


def test_a_hook_can_be_attached_to_the_gradients(ranks):
    results = ranks(2, counted, BASE.to_json(), group=False)
    size = sum(p.numel() for p in BASE.build_model().parameters())
    wanted = train(BASE.to_json())["losses"]
    for got, sent in results:
        assert got == pytest.approx(wanted, abs=1e-10)
        assert sent == BASE.steps * size


def test_a_parameter_that_takes_no_part_is_refused_by_name(ranks):
    one = dataclasses.replace(BASE, model=Unused)
    assert train(one.to_json())["losses"]
    with pytest.raises(RuntimeError, match=r"parameter spare.weight took no part in the loss"):
        ranks(2, train, one.to_json(), group=False)


def disagreeing(texts):
    return train(texts[int(os.environ["RANK"])])


def test_workers_that_were_given_different_jobs_are_told_apart(ranks):
    one, other = BASE.to_json(), dataclasses.replace(BASE, seed=1).to_json()
    with pytest.raises(RuntimeError, match=r"WorkerError: rank 2 has job [0-9a-f]{12} and rank 0 has "):
        ranks(3, disagreeing, [one, one, other], group=False)


def test_or_stand_at_different_steps(ranks, tmp_path):
    train(BASE.to_json(), directory=tmp_path, stop_after=1)
    with pytest.raises(RuntimeError, match="WorkerError: rank 1 has step 1 and rank 0 has 0"):
        ranks(2, half_resumed, BASE.to_json(), tmp_path, group=False)


def half_resumed(text, directory):
    return train(text, resume=directory if os.environ["RANK"] == "1" else None)


def tripped(text):
    try:
        train(text)
    except UsageError as error:
        return error.what, sum(isinstance(thing, DistributedDataParallel) for thing in gc.get_objects())


def test_no_ddp_outlives_its_process_group_in_the_causes_of_an_error(ranks):
    text = dataclasses.replace(BASE, inputs=tuple).to_json()  # the labels too, which the model does not take
    for what, left in ranks(2, tripped, text, group=False):
        assert "the model cannot be called with argument 1, argument 2" in what
        assert left == 0


def dying(seed):
    """Data of which rank 1, in the first of torchrun's attempts, dies in the middle."""

    class Rows(list):
        def __getitem__(self, row):
            if (
                len(calls) == 5
                and os.environ["RANK"] == "1"
                and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
            ):
                os._exit(9)
            calls.append(row)
            return super().__getitem__(row)

    calls = []
    return Rows(points(seed))


def test_one_command_survives_a_restart(tmp_path):
    one = dataclasses.replace(BASE, data=dying, batch=4, evaluation=None)
    (tmp_path / "job.json").write_text(one.to_json())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--monitor-interval", "0.1", "-m", "plait.reference"]
    command += [str(tmp_path / "job.json"), "--directory", str(tmp_path), "--save-every", "1", "--resume"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    wanted = train(dataclasses.replace(one, data=points).to_json())
    assert told["losses"] == pytest.approx(wanted["losses"], abs=1e-10)
    assert told["finished"]
    assert "exitcode: 9" in done.stderr or "exitcode  : 9" in done.stderr


def test_workers_start_from_a_file(ranks, tmp_path):
    (tmp_path / "job.json").write_text(BASE.to_json())
    ranks(2, reference_worker.main, [str(tmp_path / "job.json"), "--directory", str(tmp_path)], group=False)
    assert_close(resumed(BASE.to_json(), tmp_path), train(BASE.to_json()))
    assert json.loads((tmp_path / "job.json").read_text())["name"] == "shared"
