"""What cannot be recorded is refused, in one line that says where and what helps."""

import inspect
import logging

import pytest
import torch
from torch import nn

from plait import deferred
from plait.chain import Chain
from plait.errors import TraceError

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


def test_custom_backwards_work_again_afterwards():
    with pytest.raises(TraceError):
        Chain.trace(CustomBackward(), X)
    x = X.clone().requires_grad_()
    hook = x.register_hook(lambda gradient: gradient * 3)
    Reversed.apply(x).sum().backward()
    hook.remove()
    assert torch.equal(x.grad, torch.full_like(x, -3.0))
