"""Plain attributes: what one call leaves for another to compute with is refused, the rest is not."""

import warnings

import pytest
import torch
from torch import nn

from plait import deferred
from plait.chain import Chain
from plait.errors import TraceError

X = torch.randn(2, 8)


class Stateful(nn.Module):
    """Adds what it has kept, if anything, and keeps something new."""

    first = None

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.kept = self.first

    def forward(self, x):
        x = self.a(x)
        if self.kept is not None:
            x = x + self.kept
        self.kept = x.detach().mean(0)
        return self.b(x)


class FromZero(Stateful):
    first = torch.zeros(8)


class EmptyBuffer(Stateful):
    def __init__(self):
        super().__init__()
        del self.kept
        self.register_buffer("kept", None)


class Counting(Stateful):
    """No data in it, but another number each time."""

    def forward(self, x):
        self.kept = torch.zeros(()) if self.kept is None else self.kept + 1
        return self.b(self.a(x) * self.kept)


class FirstBatch(Stateful):
    """Made once, from data."""

    def forward(self, x):
        x = self.a(x)
        if self.kept is None:
            self.kept = x.detach().std(0)
        return self.b(x / self.kept)


class OnlyEvaluationReads(Stateful):
    first = torch.zeros(8)

    def forward(self, x):
        x = self.a(x)
        if self.training:
            self.kept = x.detach().mean(0)
        else:
            x = x - self.kept
        return self.b(x)


class InTuple(Stateful):
    def __init__(self):
        super().__init__()
        self.a = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        x, state = self.a(x[:, None], self.kept)
        self.kept = tuple(tensor.detach() for tensor in state)
        return self.b(x[:, 0])


class InList(Stateful):
    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, x):
        x = self.a(x)
        if self.kept:
            x = x + self.kept[-1]
        self.kept.append(x.detach().mean(0))
        return self.b(x)


KINDS = [Stateful, FromZero, EmptyBuffer, Counting, FirstBatch, OnlyEvaluationReads, InTuple, InList]


@pytest.mark.parametrize("make", [lambda kind: kind(), deferred.construct], ids=["existing", "constructed"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_a_call_leaves_for_the_next_is_refused(kind, make):
    model, generator = make(kind), torch.get_rng_state()
    with pytest.raises(TraceError, match="computes with what an earlier one left in 'kept'") as caught:
        Chain.trace(model, X)
    assert caught.value.setting == "model"
    assert caught.value.works.startswith("self.register_buffer('kept', tensor)")
    assert torch.equal(generator, torch.get_rng_state())
    assert model.training
    if kind is InList:
        assert model.kept == []
    else:
        assert model.kept is None or torch.equal(model.kept, torch.zeros(8))


def test_the_module_is_named():
    with pytest.raises(TraceError, match=r"left in '1\.kept'.*self\.register_buffer\('kept', tensor\)"):
        Chain.trace(Around(nn.Linear(8, 8), Stateful()), X)


class Around(nn.Sequential):
    """No plain Sequential, so it is recorded."""

    def forward(self, x):
        return super().forward(x)


def test_the_way_out():
    class Registered(Stateful):
        def __init__(self):
            super().__init__()
            del self.kept
            self.register_buffer("kept", torch.zeros(8))

    model = Registered()
    chain = Chain.trace(model, X)
    found = [chain(X) for _ in range(3)]
    model.kept.zero_()
    assert all(torch.equal(model(X), one) for one in found)


def test_a_tensor_that_is_changed_in_place_is_shared_with_the_model():
    class Averaging(FromZero):
        def __init__(self):
            super().__init__()
            self.kept = torch.zeros(8)

        def forward(self, x):
            x = self.a(x) + self.kept
            self.kept.mul_(0.5).add_(x.detach().mean(0))
            return self.b(x)

    model = Averaging()
    chain = Chain.trace(model, X)
    found = [chain(X) for _ in range(3)]
    model.kept.zero_()
    assert all(torch.equal(model(X), one) for one in found)


def test_a_weight_that_a_hook_computes_anew_is_no_state():
    model = Around(nn.Linear(8, 8), nn.Linear(8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(model[0])
    chain = Chain.trace(model, X)
    with torch.no_grad():
        model[0].weight_g.mul_(2)
    assert torch.equal(chain(X), model(X))


def test_lists_and_tuples_are_left_as_they_were():
    class Looking(Stateful):
        def __init__(self):
            super().__init__()
            self.seen, self.pair, self.named = [torch.ones(1)], (torch.ones(1), 2), {"x": torch.ones(1)}

        def forward(self, x):
            x = self.a(x)
            self.seen.append(x)
            self.pair, self.named["y"] = (x, 3), x
            return self.b(x)

    model = Looking()
    seen, pair, named, one = model.seen, model.pair, model.named, model.seen[0]
    Chain.trace(model, X)
    assert model.seen is seen
    assert len(seen) == 1
    assert seen[0] is one
    assert model.pair is pair
    assert model.named is named
    assert list(named) == ["x"]
