"""Branches on a random draw: those that go one way only are recorded, with the draw, others refused."""

import inspect

import pytest
import torch
from torch import nn

from plait.chain import Chain
from plait.errors import TraceError

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


class LayerDrop(nn.Module):
    def __init__(self, probability=0.0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.probability = probability

    def drops(self):
        return torch.rand([]) < self.probability

    def forward(self, x):
        for layer in self.layers:
            if self.training and self.drops():
                continue
            x = torch.dropout(torch.relu(layer(x)), 0.5, self.training)
        return x


class Kept(LayerDrop):
    def drops(self):
        return not (torch.rand(1) >= self.probability)


class Reflected(LayerDrop):
    def drops(self):
        return self.probability > torch.empty(()).uniform_()


@pytest.mark.parametrize("kind", [LayerDrop, Kept, Reflected])
def test_a_probability_of_zero_is_recorded(kind, same):
    """The draws stay: the dropout after each comes from the same state of the generator."""
    chain = same(kind, X, batches=(1, 3))
    assert len(chain) == 3


def test_comparisons_that_are_computed_with_are_left_alone(same):
    class Weighted(LayerDrop):
        def forward(self, x):
            draw = torch.rand(x.shape[0], 1)
            keep = (draw >= self.probability).to(x.dtype) + (torch.rand([]) < 0.5)
            return super().forward(x) * keep

    same(Weighted, X, evaluates=False)


@pytest.mark.parametrize("kind", [LayerDrop, Kept, Reflected])
def test_another_probability_is_refused_with_the_way_out(kind):
    with pytest.raises(TraceError) as caught:
        Chain.trace(kind(0.125), X)
    _, first = inspect.getsourcelines(LayerDrop.forward)
    at = f"{__file__}:{first + 2}" if kind is not Kept else f"{__file__}:"
    assert f"with probability 0.125, as LayerDrop does ({at}" in str(caught.value)
    assert "layerdrop=0.0" in caught.value.works


@pytest.mark.parametrize(
    "drawn",
    [lambda: torch.rand([]).sub_(1), lambda: torch.rand([]) - 1, lambda: torch.empty(()).uniform_(-1, 1)],
)
def test_what_may_be_below_zero_is_not_decided(drawn):
    class Below(LayerDrop):
        def drops(self):
            return drawn() < self.probability

    with pytest.raises(TraceError, match="data-dependent"):
        Chain.trace(Below(), X)
