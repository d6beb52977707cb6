"""A traced chain is called as its model is: with the inputs it was traced for, in both modes."""

import pytest
import torch
from torch import nn

from plait.chain import Chain
from plait.errors import TraceError, UsageError

X, WORDS = torch.randn(2, 8), torch.arange(6).view(2, 3)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.a, self.b = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, words, scale=1.0, bias=None):
        x = torch.relu(self.a(x)) + self.words(words).mean(1) * scale
        return self.b(x if bias is None else x + bias)


@pytest.fixture(scope="module")
def chain():
    return Chain.trace(Model(), (X, WORDS), {"scale": 0.5, "bias": torch.ones(8)})


BIAS = torch.ones(8)


def test_keywords_may_come_in_any_order(chain):
    expected = chain.model(X, WORDS, 0.5, BIAS)
    assert torch.equal(chain(X, WORDS, bias=BIAS, scale=0.5), expected)
    assert torch.equal(chain(X, WORDS, scale=0.5, bias=BIAS), expected)


def test_inputs_have_names(chain):
    assert chain.inputs == ("input:0", "input:1", "input:scale", "input:bias")
    assert "input:scale" not in chain.values, "a constant has no size"


@pytest.mark.parametrize(
    ("args", "kwargs", "what"),
    [
        ((X,), {"scale": 0.5, "bias": BIAS}, "1 positional inputs and keywords ['bias', 'scale'], and was"),
        ((X, WORDS), {"scale": 0.5}, "keywords ['scale'], and was traced with 2 and ['bias', 'scale']"),
        ((X, WORDS), {"scale": 0.6, "bias": BIAS}, "input:scale is 0.6, and the chain was traced with 0.5"),
        ((X, WORDS), {"scale": 0.5, "bias": None}, "input:bias is NoneType, and the chain was traced with"),
        ((X.double(), WORDS), {"scale": 0.5, "bias": BIAS}, "input:0 is torch.float64, and"),
        ((X, WORDS.int()), {"scale": 0.5, "bias": BIAS}, "input:1 is torch.int32, and"),
        (
            (X[:, :4], WORDS),
            {"scale": 0.5, "bias": BIAS},
            "input:0 has shape (2, 4) in a batch of 2, and the",
        ),
        ((X, WORDS[:, :2]), {"scale": 0.5, "bias": BIAS}, "traced for (batch, 3)"),
        ((X, WORDS[:1]), {"scale": 0.5, "bias": BIAS}, "input:1 has shape (1, 3) in a batch of 2"),
        ((X, WORDS), {"scale": 0.5, "bias": BIAS[:1]}, "input:bias has shape (1,)"),
        ((X[:0], WORDS[:0]), {"scale": 0.5, "bias": BIAS}, "input:0 has a batch of zero"),
        ((X[0], WORDS), {"scale": 0.5, "bias": BIAS}, "input:0 has shape (8,)"),
    ],
)
def test_other_inputs_than_traced_are_refused(chain, args, kwargs, what):
    with pytest.raises(UsageError) as caught:
        chain(*args, **kwargs)
    assert what in str(caught.value)
    assert caught.value.works


def test_a_frozen_module_stays_frozen_and_others_switch():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.m, self.n = nn.Linear(8, 8), nn.BatchNorm1d(8).eval(), nn.BatchNorm1d(8)

        def forward(self, x):
            return self.n(self.m(self.a(x)))

    chain = Chain.trace(Normed(), X)
    for mode in (False, True, True, False):
        chain.train(mode)
        assert (chain.model.training, chain.model.m.training, chain.model.n.training) == (mode, False, mode)
        assert torch.equal(chain(X), chain.model(X))
    assert chain.model.m.num_batches_tracked == 0
    assert chain.model.n.num_batches_tracked == 4


class Different(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.a, self.b = how, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = torch.relu(self.a(x))
        if self.how == "outputs":
            return (self.b(x), x) if self.training else (self.b(x), None)
        if self.how == "structure":
            return {"x": self.b(x)} if self.training else [self.b(x)]
        if self.how == "constant":
            return self.b(x), self.training
        if self.how == "blocks":
            return self.b(x) if self.training else x
        return self.b(x).double() if self.training else self.b(x)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("outputs", "it returns something else in evaluation than in training"),
        ("structure", "it returns something else in evaluation than in training"),
        ("constant", "it returns something else in evaluation than in training"),
        ("blocks", "2 blocks in training, 1 in evaluation"),
        ("type", "or other sizes"),
    ],
)
def test_a_model_that_is_another_in_evaluation_is_refused(how, what):
    with pytest.raises(TraceError, match=what) as caught:
        Chain.trace(Different(how), X)
    assert "Different is not the same chain in both modes" in str(caught.value)
    assert "Chain.of" in caught.value.works
