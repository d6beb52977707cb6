"""Parameters updated one at a time have the bits of an update of all."""

import functools

import pytest
import torch
from torch import nn

from plait.errors import UsageError
from plait.factory import Factory
from plait.job import Job
from plait.spill.update import Updater, clip, initial_state, learn_state, total_norm

ADAM = functools.partial(torch.optim.Adam, lr=0.01)


def job(optimizer, **changes):
    return Job(name="j", model="torch.nn:Identity", data="builtins:list", loss="plait.losses:cross_entropy",
               optimizer=optimizer, batch=1, steps=1, **changes)  # fmt: skip


def parameters(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [
        (f"p{i}", nn.Parameter(torch.randn(shape, generator=generator))) for i, shape in enumerate(shapes)
    ]


def global_scale(parameters, *, lr):
    return GlobalScale(parameters, lr)


class GlobalScale(torch.optim.SGD):
    """Divides by the norm of all gradients: parameters cannot take turns."""

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient.div_(norm)
        return super().step(closure)


def counting(parameters, *, lr):
    return Counting(parameters, lr)


class Counting(torch.optim.SGD):
    """Counts steps in its groups."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize(
    "optimizer",
    [functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), ADAM, functools.partial(ADAM, fused=True),
     functools.partial(ADAM, foreach=True), functools.partial(torch.optim.NAdam, lr=0.01),
     functools.partial(torch.optim.ASGD, lr=0.01), functools.partial(torch.optim.Rprop, lr=0.01)],
)  # fmt: skip
def test_one_at_a_time_is_as_all_at_once(optimizer):
    schedule = Factory("torch.optim.lr_scheduler:ExponentialLR", gamma=0.5)
    known = job(optimizer, schedule=schedule)
    together, alone = parameters((37, 5), (3,), ()), dict(parameters((37, 5), (3,), ()))
    plain = known.build_optimizer(together)
    moving = known.build_schedule(plain)
    updater = Updater(known, alone.items())
    states = {name: {} for name in alone}
    for step in range(4):
        updater.at(step)
        assert updater.learning_rate == plain.param_groups[0]["lr"]
        for name, parameter in together:
            parameter.grad = torch.full_like(parameter, 0.3 + step)
            alone[name].grad = parameter.grad.clone()
        plain.step()
        moving.step()
        for name in alone:
            states[name] = updater.update(name, alone[name], states[name])
    for name, parameter in together:
        assert torch.equal(parameter, alone[name])
        for key, value in plain.state[parameter].items():
            assert torch.equal(value, states[name][key])


def test_a_step_can_be_gone_back_to():
    known = job(ADAM, schedule=Factory("torch.optim.lr_scheduler:StepLR", step_size=2, gamma=0.1))
    updater = Updater(known, parameters((2,)))
    rates = []
    for step in (0, 5, 2, 3):
        updater.at(step)
        rates.append(updater.learning_rate)
    assert rates == pytest.approx([0.01, 0.0001, 0.001, 0.001])


def test_what_an_optimizer_keeps():
    adam = learn_state(job(ADAM), parameters((4, 5), ()))
    assert adam.entries["p0"] == (
        ("step", False, "float32"), ("exp_avg", True, "float32"), ("exp_avg_sq", True, "float32"),
    )  # fmt: skip
    assert not adam.eager
    assert learn_state(job(functools.partial(torch.optim.SGD, lr=0.1)), parameters((3,))).entries == {
        "p0": ()
    }
    adagrad = job(functools.partial(torch.optim.Adagrad, initial_accumulator_value=0.5))
    assert learn_state(adagrad, parameters((4, 5))).eager
    found = initial_state(adagrad, "p0", torch.zeros(4, 5))
    assert torch.equal(found["sum"], torch.full((4, 5), 0.5))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (functools.partial(torch.optim.LBFGS, lr=0.1), r"LBFGS cannot step by itself.*closure"),
        (functools.partial(torch.optim.Adafactor, lr=0.1), r"Adafactor keeps a tensor of shape \(3, 1\)"),
        (
            functools.partial(global_scale, lr=0.1),
            "GlobalScale gives other numbers when parameters take turns",
        ),
        (functools.partial(counting, lr=0.1), "Counting counts in its groups"),
    ],
)
def test_optimizers_that_cannot_be_used_are_refused(optimizer, message):
    with pytest.raises(UsageError, match=message) as refused:
        learn_state(job(optimizer), parameters((4, 5), (6, 7)))
    assert refused.value.setting == "optimizer"


@pytest.mark.parametrize("limit", [0.5, 1e9])
def test_clipping_is_torch_s_own(limit):
    ours, theirs = parameters((37, 5), (3, 300), (11,)), parameters((37, 5), (3, 300), (11,))
    for (name, one), (_, other) in zip(ours, theirs, strict=True):
        one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(len(name)))
        other.grad = one.grad.clone()
    theirs.append(("unused", nn.Parameter(torch.ones(2))))
    norm = torch.nn.utils.clip_grad_norm_([p for _, p in theirs], limit)
    norms = [(float(torch.linalg.vector_norm(p.grad, 2.0)), torch.float32) for _, p in ours]
    total = total_norm(norms)
    assert torch.equal(total, norm)
    for (_, one), (_, other) in zip(ours, theirs, strict=False):
        clip(one.grad, total, limit)
        assert torch.equal(one.grad, other.grad)
    assert float(total_norm([])) == 0
