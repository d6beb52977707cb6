"""One process: equal to a loop written by hand, to the bit, and resumable to the bit."""

import functools
import math

import pytest
import torch
from torch import nn

from plait import losses, reference
from plait.data import indices
from plait.determinism import seed_micro_batch
from plait.errors import NonfiniteError
from plait.job import Evaluation
from reference_jobs import (
    ADAM,
    ADAMW,
    BASE,
    COSINE,
    EVERYTHING,
    MOMENTUM,
    SGD,
    assert_equal,
    assert_same,
    job,
    net,
    points,
    steps_with,
)


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
