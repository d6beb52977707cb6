"""Recording a model: what cannot be recorded is said in one line, and the model is left as it was."""

import inspect
import logging
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


def line(kind, text):
    """The number of the line of a class that begins with a text."""
    lines, first = inspect.getsourcelines(kind)
    (place,) = (place for place, code in enumerate(lines) if code.strip().startswith(text))
    return first + place


class Branching(Two):
    def forward(self, x):
        x = self.a(x)
        if x.sum() > 0:
            return self.b(x)
        return x


def test_a_branch_on_data_has_its_reason_in_one_line_and_two_ways_out(capfd):
    with pytest.raises(TraceError) as caught:
        Chain.trace(Branching(), X)
    what = str(caught.value)
    assert "\n" not in what
    assert "Branching cannot be traced: Could not guard on data-dependent expression" in what
    assert f"({__file__}:{line(Branching, 'if x.sum()')})" in what
    assert "torch.where" in caught.value.works
    assert "Chain.of([block, ...])" in caught.value.works
    assert capfd.readouterr() == ("", ""), "torch's own report is not printed"


def test_the_first_way_out():
    class Choosing(Two):
        def forward(self, x):
            x = self.a(x)
            return torch.where(x.sum() > 0, self.b(x), x)

    chain = Chain.trace(Choosing(), X)
    assert torch.equal(chain(X), chain.model(X))
    assert torch.equal(chain(-X), chain.model(-X))


def test_the_second_way_out():
    model = Branching()
    chain = Chain.of([nn.Linear(8, 8), model], X)
    for x in (X, -X):
        assert torch.equal(chain(x), model(chain.model[0](x)))
    assert chain.cut_bytes(3) == (3 * 8 * 4,)


class Fixed(Two):
    def forward(self, x):
        return self.b(self.a(x)).reshape(2, 2, 4)


class BatchBranching(Two):
    def forward(self, x):
        return self.a(x) if x.shape[0] > 4 else self.b(x)


class Growing(Two):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen = torch.cat([self.seen, self.seen])
        return self.a(x)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class CustomBackward(Two):
    def forward(self, x):
        return self.b(Reversed.apply(self.a(x)))


class TensorHook(Two):
    def forward(self, x):
        x = self.a(x)
        x.register_hook(lambda gradient: gradient * 2)
        return self.b(x)


class ModuleHook(Two):
    def __init__(self):
        super().__init__()
        self.a.register_full_backward_hook(lambda module, given, found: (given[0],))

    def forward(self, x):
        return self.b(self.a(x))


class Counted(Two):
    def forward(self, x):
        return self.b(self.a(x)) / len(x)


class Even(Two):
    def forward(self, x):
        x = self.a(x)
        return self.b(x) if x.shape[0] % 2 == 0 else x


class Compiled(Two):
    def __init__(self):
        super().__init__()
        self.b = torch.jit.script(nn.Linear(8, 8))

    def forward(self, x):
        return self.b(self.a(x))


@torch.library.custom_op("plait_test::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


class Unknown(Two):
    """An operator that says nothing of its result's shape: it runs, and cannot be recorded."""

    def forward(self, x):
        return self.b(unknown(self.a(x)))


class Inferring(Two):
    def forward(self, x):
        with torch.inference_mode():
            y = self.b(x)
        return self.a(x) + y.clone()


class OwnGenerator(Two):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x):
        return self.b(self.a(x) + torch.randn(8, generator=self.generator))


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.LazyLinear(3)

    def forward(self, x):
        return self.a(x)


class Nothing(nn.Module):
    def forward(self, x):
        return 3


class SizeOut(Two):
    def forward(self, x):
        return self.a(x), x.shape[0]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Fixed, f"it fixes the batch size ({__file__}:{line(Fixed, 'return')})"),
        (Counted, f"it fixes the batch size ({__file__}:{line(Counted, 'return')})"),
        (
            BatchBranching,
            f"it does something else at other batch sizes ({__file__}:{line(BatchBranching, 'return')})",
        ),
        (Even, f"it does something else at other batch sizes ({__file__}:{line(Even, 'return')})"),
        (Compiled, "'b' is compiled by torch.jit"),
        (Unknown, "plait_test::unknown"),
        (Growing, "buffer 'seen' changes from (1,) torch.float32 to (2,) torch.float32"),
        (CustomBackward, "torch.autograd.Function 'Reversed'"),
        (TensorHook, "Tensor.register_hook"),
        (ModuleHook, "changes gradients in backward"),
        (Inferring, f"enters torch.inference_mode(), which a recording would lose ({__file__}:"),
        (OwnGenerator, "it computes with an object of its own that is no tensor, a Generator"),
        (Lazy, "uninitialized parameter"),
        (Nothing, "no tensor operation"),
        (SizeOut, "output 1 of the model is a number that follows its batch size"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_what_cannot_be_recorded_is_refused(kind, reason):
    with pytest.raises(TraceError) as caught:
        Chain.trace(kind(), X)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.setting == "model"
    assert "torch.where" not in caught.value.works, "there is no branch on data here"


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_compiled_model_is_refused():
    with pytest.raises(TraceError, match=r"it is compiled by torch\.jit"):
        Chain.trace(torch.jit.script(nn.Linear(8, 8)), X)


class Masked(Two):
    """Fails on inputs of another width, and counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, mask=None):
        self.calls += 1
        x = self.b(torch.dropout(torch.relu(self.a(x)), 0.5, self.training))
        return x if mask is None else x * mask


class Missing(Two):
    def forward(self, x):
        return self.c(x)


class Square(Two):
    def forward(self, x):
        return self.b(x @ self.a.weight)


AT_LINEAR = f"({__file__}:{line(Masked, 'x = self.b')})"
APART = "positional and keyword inputs apart: Chain.trace(model, (x,), {'name': y})"
RUNS = "inputs that the model runs with when it is called"


@pytest.mark.parametrize("make", [lambda kind: kind(), deferred.construct], ids=["existing", "constructed"])
@pytest.mark.parametrize(
    ("kind", "inputs", "reason", "works"),
    [
        (Masked, torch.randn(2, 7), AT_LINEAR, RUNS),
        (Masked, torch.randn(1, 7), AT_LINEAR, RUNS),
        (Masked, {"y": X}, "TypeError: Masked.forward() got an unexpected keyword argument 'y'", RUNS),
        (Masked, ((X,), {"mask": X}), "TypeError: ", APART),
        (
            Missing,
            X,
            f"AttributeError: 'Missing' object has no attribute 'c' ({__file__}:{line(Missing, 'return')})",
            RUNS,
        ),
        (Masked, X.long(), "it multiplies torch.int64 with torch.float32 in 'a'", "inputs of the type of"),
        (
            Masked,
            X.double(),
            "it multiplies torch.float64 with torch.float32 in 'a'",
            "inputs of the type of",
        ),
        (Square, X.double(), "it multiplies torch.float64 with torch.float32", "inputs of the type of"),
    ],
)
def test_an_example_that_the_model_does_not_take(kind, inputs, reason, works, make, capfd):
    model, generator = make(kind), torch.get_rng_state()
    with pytest.raises(TraceError) as caught:
        Chain.trace(model, inputs)
    what = str(caught.value)
    assert f"{kind.__name__} does not take these example inputs: " in what
    assert reason in what
    assert "\n" not in what
    assert caught.value.setting == "example_inputs"
    assert caught.value.works.startswith(works)
    assert capfd.readouterr() == ("", ""), "torch's own report is not printed"
    assert torch.equal(generator, torch.get_rng_state())
    assert kind is not Masked or model.calls == 0


def test_torch_does_not_log_what_the_error_says():
    log, records, handler = logging.getLogger("torch._subclasses.fake_tensor"), [], logging.Handler()
    handler.emit = records.append
    log.addHandler(handler)
    level = log.level
    try:
        with pytest.raises(TraceError):
            Chain.trace(Masked(), torch.randn(2, 7))
    finally:
        log.removeHandler(handler)
    assert [record.getMessage() for record in records] == []
    assert log.level == level


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


def test_custom_backwards_work_again_afterwards():
    with pytest.raises(TraceError):
        Chain.trace(CustomBackward(), X)
    x = X.clone().requires_grad_()
    hook = x.register_hook(lambda gradient: gradient * 3)
    Reversed.apply(x).sum().backward()
    hook.remove()
    assert torch.equal(x.grad, torch.full_like(x, -3.0))


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
