"""A job under a plan ends with what plait.reference ends with, and goes on from its files."""

import dataclasses

import pytest
import torch
from torch import nn

from plait import Chain, checkpoint, reference
from plait.burst import BurstPlan
from plait.burst.training import train
from plait.compress import CompressedCollective
from plait.errors import FileError, NonfiniteError, UsageError
from plait.evaluation import Evaluation
from plait.job import Job

CLOSE = 1e-10
BLOCKS = ["0", "2", "4"]


def model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))


def half_frozen():
    whole = model()
    whole[0].requires_grad_(False)
    return whole


def data(seed, rows=40):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=draw)
    y = torch.randint(5, (rows,), generator=draw)
    y[::5] = -100
    return list(zip(x, y, strict=True))


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


def by_place(parameters):
    """Rates that go by a parameter's place among all, which no rank but the first can tell by itself."""
    rates = [{"params": [p], "lr": 0.1 / (2 + place)} for place, (_, p) in enumerate(parameters)]
    return torch.optim.SGD(rates)


class Spare(nn.Module):
    """Dropout, and a parameter that nothing uses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 5))
        self.spare = nn.Linear(2, 2)

    def forward(self, x):
        return self.layers(x)


def slower(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


JOB = Job(  # by the path of the file, which is the same in every process
    name="small",
    model=f"{__file__}:model",
    data=f"{__file__}:data",
    loss="plait.losses:cross_entropy",
    optimizer=f"{__file__}:adam",
    schedule=f"{__file__}:slower",
    batch=7,
    accumulate=2,
    steps=6,
    clip_norm=0.3,
    precision="fp64",
    evaluation=Evaluation(data=f"{__file__}:data", every=3, metrics={"accuracy": "plait.losses:accuracy"}),
)


FROZEN = dataclasses.replace(JOB, model=f"{__file__}:half_frozen", evaluation=None)
PLACED = dataclasses.replace(JOB, optimizer=f"{__file__}:by_place", evaluation=None)


def plan_of(*widths, batch=7):
    return BurstPlan.of(BLOCKS, widths, batch=batch)


def summary(result):
    """What can be compared; weights and state on rank 0."""
    whole = not any(p.is_meta for p in result.model.parameters())
    return {
        "losses": result.losses,
        "evaluations": [(e.step, e.loss, e.metrics["accuracy"]) for e in result.evaluations],
        "finished": result.finished,
        "weights": {n: p.detach() for n, p in result.model.named_parameters()} if whole else {},
        "optimizer": result.optimizer["state"] if whole else {},
    }


def runs(folder):
    """Whole; in two parts under two plans; the plain run's beginning, and its own end."""
    found = [summary(train(JOB, plan_of(2, 1, 3)))]
    train(JOB, plan_of(1, 3, 2), directory=f"{folder}/parts", stop_after=2)
    found.append(summary(train(JOB, plan_of(3, 1, 1), directory=f"{folder}/parts", resume=True)))
    found.append(summary(train(JOB, plan_of(2, 2, 2), resume=f"{folder}/plain")))
    return found, train(PLACED, plan_of(1, 3, 2)).losses, train(FROZEN, plan_of(3, 1, 1)).losses


def test_a_job_is_trained_as_plainly(ranks, tmp_path):
    reference.train(JOB, directory=tmp_path / "plain", stop_after=3)
    expected = reference.train(JOB)
    by_places, beginning_frozen = reference.train(PLACED).losses, reference.train(FROZEN).losses
    for rank, (found, placed, frozen) in enumerate(ranks(3, runs, str(tmp_path))):
        assert placed == pytest.approx(by_places, abs=CLOSE)
        assert frozen == pytest.approx(beginning_frozen, abs=CLOSE)
        for one in found:
            assert one["finished"]
            assert one["losses"] == pytest.approx(expected.losses, abs=CLOSE)
            for (step, loss, accuracy), evaluated in zip(
                one["evaluations"], expected.evaluations, strict=True
            ):
                assert step == evaluated.step
                assert (loss, accuracy) == pytest.approx(
                    (evaluated.loss, evaluated.metrics["accuracy"]), abs=CLOSE
                )
            assert one["weights"] or rank  # rank 0 has all
            for name, value in one["weights"].items():
                assert (value - dict(expected.model.named_parameters())[name]).abs().max() < CLOSE
            for place, state in one["optimizer"].items():
                for key, value in state.items():
                    assert (value - expected.optimizer["state"][place][key]).abs().max() < CLOSE
    # What a plan has written, a plain run goes on from.
    again = reference.train(dataclasses.replace(JOB, steps=8), resume=tmp_path / "parts")
    assert again.losses[:6] == pytest.approx(expected.losses, abs=CLOSE)
    assert again.finished


def broad():
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))


ROUNDED = dataclasses.replace(JOB, model=f"{__file__}:broad", precision="fp32")


def rounded(**options):
    return summary(train(ROUNDED, plan_of(2, 3, 3), collective=CompressedCollective(bits=4), **options))


def rounded_until(directory, stop):
    exact = train(ROUNDED, plan_of(2, 3, 3)).losses
    whole = rounded()
    rounded(directory=directory, stop_after=stop)
    return exact, whole


def rounded_from(directory):
    return rounded(resume=directory)


def test_compressed_gradients_are_rounded_alike_in_a_run_that_is_resumed(ranks, tmp_path):
    before = ranks(3, rounded_until, str(tmp_path), 2)
    for (exact, whole), again in zip(before, ranks(3, rounded_from, str(tmp_path)), strict=True):
        assert exact != whole["losses"] == pytest.approx(exact, rel=0.1)
        assert again["losses"] == whole["losses"]
        assert all(torch.equal(value, again["weights"][name]) for name, value in whole["weights"].items())


def test_dropout_in_micro_batches_and_a_parameter_without_use():
    job = dataclasses.replace(JOB, model=f"{__file__}:Spare", evaluation=None, steps=3)
    blocks = [block.name for block in Chain.of_job(dataclasses.replace(job, precision="fp32"))]
    expected = reference.train(job)
    found = train(job, BurstPlan.of(blocks, [1] * len(blocks), batch=7))
    assert found.losses == pytest.approx(expected.losses, abs=CLOSE)
    for name, parameter in expected.model.named_parameters():
        assert (found.model.get_parameter(name) - parameter).abs().max() < CLOSE
    assert len(found.optimizer["param_groups"][0]["params"]) == 6


def broken(output, batch):
    return (output * float("nan")).mean()


def test_a_loss_that_is_not_finite_stops_or_is_skipped():
    wild = dataclasses.replace(JOB, loss=f"{__file__}:broken", evaluation=None)
    with pytest.raises(NonfiniteError, match="job 'small' has a loss of nan at step 0"):
        train(wild, plan_of(1, 1, 1))
    skipping = dataclasses.replace(wild, nonfinite="skip", steps=3)
    assert train(skipping, plan_of(1, 1, 1)).skipped == reference.train(skipping).skipped == (0, 1, 2)


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(UsageError, match="for a batch of 8 rows, and the job's has 7"):
        train(JOB, plan_of(1, 1, 1, batch=8))
    with pytest.raises(UsageError, match="save_every is 0"):
        train(JOB, plan_of(1, 1, 1), save_every=0)
    with pytest.raises(UsageError, match="no directory"):
        train(JOB, plan_of(1, 1, 1), save_every=1)
    reference.train(JOB, directory=tmp_path, stop_after=1)
    with pytest.raises(FileError, match="of another job: its seed is 0"):
        train(dataclasses.replace(JOB, seed=1), plan_of(1, 1, 1), resume=tmp_path)
    state = checkpoint.load(tmp_path / checkpoint.NAME, device="cpu")
    del state["model"]["0.weight"]
    checkpoint.save(tmp_path / checkpoint.NAME, state)
    with pytest.raises(FileError, match=r"does not fit what the job builds now: .*Missing key"):
        train(JOB, plan_of(1, 1, 1), resume=tmp_path)
