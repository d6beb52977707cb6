"""BatchNorm over all rows, whoever has them, as one device does it."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

from plait.burst.norm import SynchronizedNorm


def gatherer(width):
    """Ranks as threads, which hand each other what they have."""
    barrier, slots = threading.Barrier(width), [None] * width

    def gather(rank, tensor):
        slots[rank] = tensor
        barrier.wait()
        found = [slot.clone() for slot in slots]
        barrier.wait()
        return found

    return gather


@pytest.mark.parametrize("shares", [[5], [3, 2], [1, 3, 2]])
@pytest.mark.parametrize("affine", [True, False])
def test_parts_are_normalised_as_the_whole(shares, affine):
    torch.manual_seed(0)
    rows = sum(shares)
    x = torch.randn(rows, 4, 3, 2, dtype=torch.float64) + 100
    gradient = torch.randn_like(x)
    one = nn.BatchNorm2d(4, affine=affine, dtype=torch.float64)
    others = [nn.BatchNorm2d(4, affine=affine, dtype=torch.float64) for _ in shares]
    x.requires_grad_()
    whole = one(x)
    whole.backward(gradient)
    gather, found = gatherer(len(shares)), [None] * len(shares)

    def run(rank):
        start = sum(shares[:rank])
        part = x.detach()[start : start + shares[rank]].clone().requires_grad_()
        with SynchronizedNorm(lambda tensor: gather(rank, tensor)):
            out = others[rank](part)
        out.backward(gradient[start : start + shares[rank]])
        found[rank] = (out.detach(), part.grad)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(shares))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert torch.allclose(torch.cat([out for out, _ in found]), whole, atol=1e-10)
    assert torch.allclose(torch.cat([into for _, into in found]), x.grad, atol=1e-10)
    for other in others:
        assert torch.allclose(other.running_mean, one.running_mean, atol=1e-10)
        assert torch.allclose(other.running_var, one.running_var, atol=1e-10)
    if affine:
        assert torch.allclose(sum(other.weight.grad for other in others), one.weight.grad, atol=1e-10)
        assert torch.allclose(sum(other.bias.grad for other in others), one.bias.grad, atol=1e-10)


def test_evaluation_and_everything_else_are_left_alone():
    norm = nn.BatchNorm1d(3).eval()
    x = torch.randn(4, 3)

    def never(tensor):
        raise AssertionError("nothing is to be gathered")

    with SynchronizedNorm(never):
        assert torch.equal(
            norm(x), functional.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias)
        )
        assert torch.equal(functional.layer_norm(x, (3,)), nn.LayerNorm(3, elementwise_affine=False)(x))
