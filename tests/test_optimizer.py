"""Which settings of an optimizer change its work."""

import functools

import pytest
import torch

from plait.factory import Factory
from plait.optimizer import work

SGD = functools.partial(Factory, "torch.optim:SGD")
ADAM = functools.partial(Factory, "torch.optim:Adam")
MUON = functools.partial(Factory, "torch.optim:Muon")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (SGD(lr=0.1), SGD(lr=0.2)),
        (SGD(lr=0.1, momentum=0.8), SGD(lr=0.1, momentum=0.9)),
        (SGD(lr=0.1, momentum=0), SGD(lr=0.1, momentum=0.0)),
        (SGD(lr=0.1, weight_decay=1e-4), SGD(lr=0.1, weight_decay=0.1)),
        (ADAM(betas=[0.9, 0.99], eps=1e-8), ADAM(betas=(0.8, 0.999), eps=1e-6)),
        (Factory("m:f", groups=[{"lr": 0.1}]), Factory("m:f", groups=[{"lr": 0.2}])),
    ],
)
def test_numbers_that_only_scale_do_not_count(one, other):
    assert work(one) == work(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (SGD(lr=0.1), ADAM(lr=0.1)),
        (SGD(lr=0.1), SGD(lr=0.1, momentum=0.9)),
        (SGD(lr=0.1, momentum=0.0), SGD(lr=0.1, momentum=0.9)),
        (SGD(lr=0.1, momentum=0), SGD(lr=0.1, momentum=0.9)),
        (SGD(lr=0.1, weight_decay=0.0), SGD(lr=0.1, weight_decay=0.1)),
        (SGD(lr=0.1), SGD(lr=-0.1)),
        (ADAM(fused=True), ADAM(fused=False)),
        (ADAM(fused=None), ADAM(fused=False)),
        (ADAM(amsgrad=True), ADAM(amsgrad=False)),
        (ADAM(betas=(0.0, 0.9)), ADAM(betas=(0.9, 0.9))),
        (MUON(ns_steps=5), MUON(ns_steps=10)),
        (MUON(adjust_lr_fn="original"), MUON(adjust_lr_fn="match_rms_adamw")),
        (Factory("m:f", groups=[{"momentum": 0.0}]), Factory("m:f", groups=[{"momentum": 0.9}])),
    ],
)
def test_what_switches_work_on_does(one, other):
    assert work(one) != work(other)


def test_optimizers_of_the_same_work_keep_the_same_state():
    """And those of other work do not: what is called alike costs alike."""

    def kept_bytes(made):
        parameter = torch.nn.Parameter(torch.ones(4, 4))
        optimizer = made.load(setting="optimizer")([parameter])
        parameter.grad = torch.ones(4, 4)
        optimizer.step()
        state = optimizer.state[parameter].values()
        return sum(value.nbytes for value in state if isinstance(value, torch.Tensor))

    low, high, off = (SGD(lr=0.1, momentum=m) for m in (0.8, 0.9, 0.0))
    assert kept_bytes(low) == kept_bytes(high) > kept_bytes(off)
