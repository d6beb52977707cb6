"""Recording a model: in both modes, from any thread, and the model is left as it was."""

import sys
import threading
import warnings

import pytest
import torch
from torch import nn

from plait import deferred
from plait.chain import Chain
from plait.errors import TraceError, UsageError
from plait.tracing.export import at_batch, batch_of, export

X = torch.randn(2, 8)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)


def test_types_that_autocast_makes_one_are_taken():
    class Plain(Two):
        def forward(self, x):
            return self.b(self.a(x))

    model, x = Plain(), X.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(Chain.trace(model, x)(x), model(x))
        with pytest.raises(TraceError, match=r"it multiplies torch\.int64 with torch\.float32 in 'a'"):
            Chain.trace(model, X.long())
    with pytest.raises(TraceError, match=r"it multiplies torch\.bfloat16 with torch\.float32 in 'a'"):
        Chain.trace(model, x)


def test_a_tuple_and_a_dict_that_the_model_takes_as_they_are():
    class Nested(Two):
        def forward(self, xs, options):
            return self.b(self.a(xs[0])) * options["mask"]

    chain = Chain.trace(Nested(), ((X,), {"mask": X}))
    assert torch.equal(chain((X,), {"mask": X}), chain.model((X,), {"mask": X}))


@pytest.mark.parametrize(
    ("inputs", "what"),
    [
        (torch.zeros(0, 8), "a batch of zero"),
        ((), "no tensor with a batch dimension"),
        ((3, "text"), "no tensor with a batch dimension"),
        (torch.tensor(1.0), "no tensor with a batch dimension"),
        ({}, "no tensor with a batch dimension"),
    ],
)
def test_examples_that_hold_no_batch(inputs, what):
    with pytest.raises(UsageError, match=what) as caught:
        Chain.trace(nn.Linear(8, 8), inputs)
    assert caught.value.setting == "example_inputs"


def test_an_example_is_resized_by_repeating_rows():
    tree = ((X, torch.arange(3)), {"n": torch.arange(2), "flag": True, "one": torch.tensor(5)})
    (x, other), options = at_batch(*tree, 5)
    assert batch_of((x, other), options) == 5
    assert torch.equal(x, X[[0, 1, 0, 1, 0]])
    assert torch.equal(options["n"], torch.tensor([0, 1, 0, 1, 0]))
    assert torch.equal(other, torch.arange(3)), "another first dimension is no batch"
    assert options["flag"] is True
    assert other is not tree[0][1], "every tensor is its own"


def test_tracing_leaves_the_model_as_it_was():
    class Keeping(Two):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", None)
            self.register_buffer("n", torch.zeros(()))
            self.table, self.last = torch.ones(8), None

        def forward(self, x):
            if self.cache is None:
                self.cache = torch.ones(8)
            self.table.add_(1)
            self.n = self.n + 1
            self.last = self.new = self.a(x)
            return self.b(self.last * self.table * self.cache)

    model = Keeping()
    model.a.eval()
    table = model.table
    Chain.trace(model, X)
    assert model.cache is None
    assert model.last is None
    assert not hasattr(model, "new")
    assert model.table is table
    assert torch.equal(table, torch.ones(8))
    assert model.n == 0
    assert (model.training, model.a.training, model.b.training) == (True, False, True)
    assert torch.equal(model(X), model.b(model.last * 2))


def test_a_model_in_evaluation_is_recorded_in_both_modes():
    class Dropping(Two):
        def forward(self, x):
            return self.b(nn.functional.dropout(self.a(x), 0.5, self.training))

    model = Dropping().eval()
    chain = Chain.trace(model, X)
    assert not chain[0].training
    assert torch.equal(chain(X), model(X))
    chain.train()
    assert model.training
    torch.manual_seed(0)
    found = chain(X)
    torch.manual_seed(0)
    assert torch.equal(found, model(X))


def test_a_model_on_the_meta_device_is_recorded_for_the_device_of_the_example():
    class Placing(Two):
        def forward(self, x):
            return self.b(self.a(x) + torch.arange(8.0))

    recording = export(deferred.construct(Placing), (X,), {}, training=True)
    factories = [node for node in recording.program.graph.nodes if "device" in node.kwargs]
    assert factories
    assert {str(node.kwargs["device"]) for node in factories} == {"cpu"}


def test_threads_may_trace_at_the_same_time():
    found, models = {}, [Two() for _ in range(4)]
    stderr, filters = sys.stderr, list(warnings.filters)

    def trace(place):
        class Plain(nn.Module):
            def __init__(self):
                super().__init__()
                self.two = models[place]

            def forward(self, x):
                return self.two.b(torch.relu(self.two.a(x)))

        found[place] = Chain.trace(Plain(), X)

    threads = [threading.Thread(target=trace, args=(place,)) for place in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place, model in enumerate(models):
        assert torch.equal(found[place](X), model.b(torch.relu(model.a(X))))
    assert sys.stderr is stderr
    new = [one for one in warnings.filters if one not in filters]
    assert "ignore" not in [action for action, *_ in new], "what libraries add as they are imported may stay"


class Plain(Two):
    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


@pytest.mark.parametrize("make", [Plain, lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))])
def test_traced_in_inference_mode_it_still_trains(make):
    model = make()
    with torch.inference_mode():
        chain = Chain.trace(model, torch.randn(2, 8))
    chain(X).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert [value.differentiable for value in chain.values.values()] == [False, True, True]


def test_traced_under_autocast_the_sizes_are_those_of_autocast():
    class Casting(Two):
        def forward(self, x):
            x = torch.relu(self.a(x))
            return self.b(x.float().to(x.dtype))

    model = Casting()
    with torch.autocast("cpu", torch.bfloat16):
        chain = Chain.trace(model, X)
        assert torch.equal(chain(X), model(X))
        (value,) = chain[0](X)
    assert value.dtype == torch.bfloat16
    assert chain.values["a"].dtype == "bfloat16"
    assert chain.cut_bytes(2) == (value.nbytes,)
