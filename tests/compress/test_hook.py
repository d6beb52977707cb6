"""Compressed gradients in DDP, with everything that DDP can do, against DDP itself."""

import os
import signal
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ddp_features import FEATURES, STEPS, flat, loss_of, model_of, steps_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import plait.compress
from plait.compress import Adaptation, Settings
from plait.compress.communicator import shutdown


def compare(features, bits):
    """The gradients of DDP itself and of DDP with compression, and whether all ranks have the same."""
    rank, outcome = dist.get_rank(), {}
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    for feature in features:
        run, ddp, optimizer = model_of(feature)
        exact = run(ddp, rank, optimizer)
        del ddp
        run, ddp, optimizer = model_of(feature)
        attachment = plait.compress.attach(ddp, bits=bits, decline=False, settings=Settings(verify=True))
        ours = run(ddp, rank, optimizer)
        summary = attachment.report()
        outcome[feature] = exact, ours, summary.total.ratio, summary.steps
        del ddp, run
    return outcome


@pytest.fixture(scope="module")
def outcomes(request):
    return {}


def parity(ranks, outcomes, bits):
    if bits not in outcomes:
        outcomes[bits] = ranks(2, compare, list(FEATURES), bits, timeout_s=300)
    return outcomes[bits]


@pytest.mark.parametrize("feature", FEATURES)
def test_uncompressed_it_is_ddp_to_the_last_bit(ranks, outcomes, feature):
    for outcome in parity(ranks, outcomes, 32):
        exact, ours, ratio, _ = outcome[feature]
        assert len(exact) == len(ours) == STEPS
        assert all(torch.equal(one, other) for one, other in zip(exact, ours, strict=True))
        assert ratio == 1.0


@pytest.mark.parametrize("feature", FEATURES)
def test_compressed_it_is_near_and_the_same_everywhere(ranks, outcomes, feature):
    both = parity(ranks, outcomes, 8)
    for outcome in both:
        exact, ours, ratio, steps = outcome[feature]
        assert ratio > 1.5
        assert steps >= STEPS
        # The first step's gradients differ by rounding only; later ones by what that did to the weights.
        for step, bound in zip(range(STEPS), (0.02, 0.05, 0.1), strict=True):
            assert (ours[step] - exact[step]).norm() < bound * exact[step].norm()
            assert not torch.equal(ours[step], exact[step])
    if feature != "join":  # where rank 0 keeps the gradients of its last own step
        for one, other in zip(both[0][feature][1], both[1][feature][1], strict=True):
            assert torch.equal(one, other)


def half_precision(bits):
    outcome = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        run, ddp, optimizer = model_of("plain", dtype)
        exact = run(ddp, dist.get_rank(), optimizer)
        del ddp
        run, ddp, optimizer = model_of("plain", dtype)
        plait.compress.attach(ddp, bits=bits, decline=False)
        outcome[dtype] = exact, run(ddp, dist.get_rank(), optimizer)
        del ddp
    return outcome


def test_gradients_of_other_types(ranks):
    for outcome in ranks(2, half_precision, 8):
        for dtype, (exact, ours) in outcome.items():
            if dtype == torch.float64:  # left to DDP
                assert all(torch.equal(one, other) for one, other in zip(exact, ours, strict=True))
            else:
                assert (ours[0] - exact[0]).norm() < 0.03 * exact[0].norm()


# NaN and Inf arrive, so that a GradScaler skips the step; error feedback forgets them.


def poisoned(bits):
    _, ddp, optimizer = model_of("plain")
    plait.compress.attach(ddp, bits=bits, decline=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [p.detach().clone() for p in ddp.parameters()]
    found = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(ddp, step, dist.get_rank())
        if step == 1 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(flat(ddp).isfinite().all().item())
    moved = any(not torch.equal(one, other) for one, other in zip(before, ddp.parameters(), strict=True))
    return found, scaler.get_scale(), moved, all(p.isfinite().all().item() for p in ddp.parameters())


@pytest.mark.parametrize("bits", [2, 4])
def test_what_is_not_finite_reaches_the_scaler_on_every_rank(ranks, bits):
    for found, scale, moved, finite in ranks(2, poisoned, bits):
        assert found == [True, False, True]
        assert scale == 4.0
        assert moved
        assert finite


def odd_parameters():
    """A complex parameter, one that is frozen late, and a last bucket that is left to DDP."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(40, 48, sparse=True)
            self.mix = nn.Parameter(torch.randn(48, 48, dtype=torch.complex64))
            self.frozen = nn.Linear(48, 48)
            self.head = nn.Linear(48, 40)

        def forward(self, tokens):
            return self.head(self.frozen((self.embed(tokens).to(torch.complex64) @ self.mix).real))

    found = {}
    for attached in (False, True):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Odd(), bucket_cap_mb=0.01)
        if attached:
            ddp.module.frozen.weight.requires_grad_(False)
            quick = Adaptation(warmup_steps=1, every_steps=2, observe_steps=1)
            attachment = plait.compress.attach(ddp, bits="auto", adaptation=quick, decline=False)
            ddp.module.frozen.weight.requires_grad_(True)
        for step in range(4):
            ddp.zero_grad()
            loss_of(ddp, step, dist.get_rank()).backward()
        found[attached] = ddp.module.head.weight.grad, torch.view_as_real(ddp.module.mix.grad)
        if attached:
            found["decisions"] = len(attachment.log.decisions)
        del ddp
    return found


def test_parameters_of_other_kinds(ranks):
    for found in ranks(2, odd_parameters):
        for exact, ours in zip(found[False], found[True], strict=True):
            assert (ours - exact).norm() < 0.3 * exact.norm()
        assert found["decisions"] >= 1


def stalling(how):
    _, ddp, optimizer = model_of("plain")
    plait.compress.attach(ddp, bits=4, decline=False, settings=Settings(timeout_s=3.0))
    list(steps_of(ddp, dist.get_rank(), optimizer))  # by now DDP has rebuilt its buckets, which is gloo's
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        store.wait(["rank 0 has given up"], timedelta(seconds=60))
        return "late"
    try:
        next(steps_of(ddp, dist.get_rank(), optimizer))
    except Exception as error:
        shutdown()
        store.set("rank 0 has given up", "")
        return f"{type(error).__name__}: {error}"
    return "went on"


def test_a_peer_that_stalls_ends_the_step_with_an_error(ranks):
    text = ranks(2, stalling, "stalls")[0]
    assert "WorkerError: nothing came from rank 1" in text
    assert "3" in text


def test_a_peer_that_dies_does_too(ranks):
    with pytest.raises(RuntimeError, match="rank"):
        ranks(2, stalling, "dies")
