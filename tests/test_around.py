"""What a step does around its model: fetched and paid for as training does, with training's own gradients."""

import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from plait import Chain, Job, Profile
from plait.around import Around
from plait.losses import cross_entropy
from plait.visit import Visit
from reference_jobs import BASE

ROW_S, LOSS_S = 0.02, 0.03
seen = []


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def rows(seed, size=6):
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))
    return [(row, i % 3) for i, row in enumerate(x)]


class Slow(list):
    """Each row takes a while."""

    def __getitem__(self, row):
        time.sleep(ROW_S)
        return super().__getitem__(row)


def slow_rows(seed):
    return Slow(rows(seed))


def slow_loss(output, batch):
    seen.append(output.dtype)
    time.sleep(LOSS_S)
    return cross_entropy(output, batch)


def keeping(output, batch):
    return output.exp().sum() / len(output)  # exp keeps its result


JOB = replace(BASE, name="around", model=net, data=rows, loss=cross_entropy, batch=4, steps=2)


def test_rows_are_fetched_in_the_first_block_and_the_loss_taken_in_the_last():
    job = replace(JOB, data=slow_rows, loss=slow_loss)
    first, *_, last = Profile.of_job(job, (2, 4), repetitions=1).blocks
    for size, times in first.milliseconds.items():
        assert times.forward >= 1e3 * ROW_S * size
    for times in last.milliseconds.values():
        assert times.forward >= 1e3 * LOSS_S


def test_what_the_loss_keeps_is_saved_by_the_last_block():
    plain = Profile.measure(Chain.of_job(JOB), (4,), repetitions=1)
    job = Profile.of_job(replace(JOB, loss=keeping), (4,), repetitions=1)
    blocks = plain.blocks, job.blocks
    kept = [b.saved_bytes_per_sample - a.saved_bytes_per_sample for a, b in zip(*blocks, strict=True)]
    assert kept == [0, *(0 for _ in kept[2:]), 4 * 3]


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_gradients_are_those_of_the_loss(batch):
    chain = Chain.of_job(JOB, model=JOB.build_model())
    around, shared = Around.of(JOB).at(batch), frozenset(chain.tied)
    args, kwargs = chain.example(batch)
    values, visits = chain.start(*args, **kwargs), []
    for block in chain:
        visits.append(around.visit(chain, block, values, shared=shared))
        values.update(visits[-1].writes)
    gradients = {name: torch.ones_like(values[name]) for name in chain.outputs}
    for visit in reversed(visits):
        visit.backward(gradients)
    found = {name: parameter.grad.clone() for name, parameter in chain.named_parameters()}
    chain.model.zero_grad()
    x, y = around.sample
    assert len(x) == len(y) == batch
    cross_entropy(chain.model(x), (x, y)).backward()
    assert all(torch.equal(found[name], p.grad) for name, p in chain.model.named_parameters())


def test_a_small_data_set_gives_its_rows_more_than_once():
    inputs, targets = Around.of(JOB).fetch(15, step=0)
    assert inputs.shape == (15, 4)
    assert torch.equal(inputs[:6], inputs[6:12])
    assert sorted(targets[:6].tolist()) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(("precision", "wanted"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_blocks_are_measured_under_the_jobs_precision(precision, wanted):
    seen.clear()
    Profile.of_job(replace(JOB, loss=slow_loss, precision=precision), (2,), repetitions=1)
    assert set(seen) == {wanted}


def test_random_numbers_and_threads_are_as_before():
    torch.manual_seed(3)
    generator, threads = torch.get_rng_state(), torch.get_num_threads()
    Profile.of_job(replace(JOB, data=partial(rows, size=20), threads=1), (2,), repetitions=1)
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.get_num_threads() == threads


def test_only_the_last_visit_goes_on_to_the_loss():
    chain = Chain.of_job(JOB, model=JOB.build_model())
    args, kwargs = chain.example(2)
    values = chain.start(*args, **kwargs)
    visit = Around.of(JOB).visit(chain, chain[0], values, shared=frozenset(chain.tied))
    assert type(visit) is Visit


def flat(samples):
    """Rows whose targets lie in one long row, with their lengths: no tensor but the input has a row each."""
    targets = [torch.full((1 + i % 2,), i % 3) for i in range(len(samples))]
    return torch.stack([x for x, _ in samples]), (torch.cat(targets), [len(one) for one in targets])


def by_length(output, batch):
    x, (targets, lengths) = batch
    assert len(x) == len(lengths)
    return cross_entropy(output.repeat_interleave(torch.tensor(lengths), 0), (x, targets))


def pairs(output, batch):
    return output.view(-1, 2, 3).square().mean()


def fours(samples):
    assert len(samples) % 4 == 0, "it takes four"
    return default_collate(samples)


class Broken(list):
    def __getitem__(self, row):
        if row == 5:
            raise ValueError("row five is broken")
        return super().__getitem__(row)


def broken_rows(seed):
    return Broken(rows(seed))


@pytest.mark.parametrize(
    "changes",
    [
        {"collate": flat, "loss": by_length},
        {"loss": pairs},
        {"data": partial(rows, size=4)},
        {"data": broken_rows},
    ],
)
def test_jobs_of_all_shapes_are_measured(changes):
    profile = Profile.of_job(replace(JOB, **changes), (1, 2, 4), repetitions=1)
    assert profile.batch_sizes == (1, 2, 4)


def test_data_is_made_once(monkeypatch):
    made = []
    monkeypatch.setattr(
        "plait.job.Job._load", lambda self, name, load=Job._load: made.append(name) or load(self, name)
    )
    Profile.of_job(JOB, (2,), repetitions=1)
    assert made.count("data") == 1


def test_copies_that_autocast_makes_of_weights_are_not_counted_by_rows():
    job = replace(JOB, precision="bf16")
    few, most = (Profile.of_job(job, sizes, repetitions=1) for sizes in ((1, 64), (1, 128)))
    saved = [[block.saved_bytes_per_sample for block in found.blocks] for found in (few, most)]
    assert saved[0] == saved[1]


def test_a_batch_that_training_never_asks_for_need_not_be_one():
    looked = []

    class Counted(list):
        def __getitem__(self, row):
            looked.append(row)
            return super().__getitem__(row)

    job = replace(JOB, collate=fours)
    around = Around.of(job)
    assert around.at(2).sample is None
    assert len(around.at(4).sample[0]) == 4
    few = replace(around.few, dataset=Counted(around.few.dataset))
    for size in (4, 8):
        replace(around, few=few).at(size)
    assert set(looked) == {0, 1}
