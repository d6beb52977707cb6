"""A weight that autocast casts once, used in parts that run one after the other."""

import torch
from torch.nn import functional

from plait.spill.casts import CastWatch, copy_of, edge, take

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


def first(x, w):
    return torch.tanh(functional.linear(torch.tanh(functional.linear(x, w)), w))


def second(h, w):
    return (functional.linear(h, w).float() * w[:5]).sum()


def test_the_gradient_of_the_copy_is_summed_as_if_there_were_one():
    whole = W.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = second(first(X, whole), whole)
    loss.backward()
    one, other = W.clone().requires_grad_(), W.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        with CastWatch({"w": one}) as watch:
            passed = first(X, one)
        assert watch.cast == {"w"}
        here = copy_of(one)
    received = passed.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = second(received, other)
        there = copy_of(other)
    taken = {}
    take(there, taken, "w")
    loss.backward()
    assert taken["w"].dtype == torch.bfloat16
    torch.autograd.backward([passed, one, edge(here)], [received.grad, other.grad, taken["w"]])
    assert torch.equal(one.grad, whole.grad)
    apart = W.clone().requires_grad_()
    torch.autograd.backward([functional.linear(X, apart).sum() * 0, apart], [torch.tensor(1.0), other.grad])
    assert not torch.equal(apart.grad, whole.grad)


def test_what_is_not_cast_is_not_noted():
    w = W.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16), CastWatch({"w": w}) as watch:
        functional.embedding(torch.tensor([1, 2]), w)
    assert not watch.cast
    assert copy_of(w) is None, "without autocast there is no copy"
