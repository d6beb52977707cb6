"""The question that most tests here ask: does a chain do what its model does, to the bit?"""

import copy

import pytest
import torch

from plait.chain import Chain
from plait.compat import tree_leaves, tree_map
from plait.visit import Walk

ACCUMULATION = 2


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Thread count changes bits, and small models are slower on two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def loss_of(output):
    """A number that every floating tensor of an output has its own part in."""
    parts = []
    for tensor in tensors(output):
        if tensor.is_floating_point():
            weights = torch.linspace(0.5, 1.5, tensor.numel(), dtype=torch.float64).view(tensor.shape)
            parts.append((tensor.double() * weights).pow(2).mean())
    return sum(parts)


def inputs_for(chain, batch, number):
    """Inputs of a batch size, other ones for each number: floats drawn, rows of integers shuffled."""
    generator = torch.Generator().manual_seed(number)

    def other(leaf):
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim:
            return leaf
        if leaf.is_floating_point():
            return torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
        return leaf[torch.randperm(len(leaf), generator=generator)]

    return tree_map(other, chain.example(batch))


def state_of(model):
    return {name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}


def reset(model, state):
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_(state[name])
    for parameter in model.parameters():
        parameter.grad = None


def history(model, run, backward, inputs, steps):
    """Everything that training shows: losses, outputs, every gradient, every buffer, after each pass."""
    named = dict(model.named_parameters())
    optimizer = torch.optim.SGD([p for p in named.values() if p.requires_grad], lr=0.01, momentum=0.9)
    seen = {}
    for step in range(steps):
        for part in range(ACCUMULATION):
            args, kwargs = inputs(step * ACCUMULATION + part)
            torch.manual_seed(100 * step + part)
            output = run(*args, **kwargs)
            loss = loss_of(output)
            backward(loss)
            at = f"step {step}.{part}"
            seen[f"{at}: loss"] = loss.detach().clone()
            for place, tensor in enumerate(tensors(output)):
                seen[f"{at}: output {place}"] = tensor.detach().clone()
            for name, parameter in named.items():
                gradient = parameter.grad
                seen[f"{at}: gradient of {name}"] = None if gradient is None else gradient.clone()
            for name, buffer in model.named_buffers():
                seen[f"{at}: buffer {name}"] = buffer.clone()
        optimizer.step()
        optimizer.zero_grad()
    return seen


def assert_same(expected, found, what):
    assert list(expected) == list(found), what
    for key, tensor in expected.items():
        other = found[key]
        assert (tensor is None) == (other is None), f"{what}, {key}: {tensor} and {other}"
        if tensor is not None:
            tensor, other = tensor.to_dense(), other.to_dense()
            assert tensor.dtype == other.dtype, f"{what}, {key}"
            equal = torch.equal(tensor, other)
            assert equal, f"{what}, {key}: up to {(tensor - other).abs().max()} apart"


def plain_backward(loss):
    loss.backward()


def ways(chain, pick_cuts):
    """The chain run whole and block by block, as it is and cut anew, each with a forward and a backward."""
    cuts = pick_cuts(len(chain))
    cut, carrying = chain.cut(cuts), chain.cut(cuts, carry=True)
    yield "whole", chain, chain, plain_backward
    yield "whole after a cut", cut, cut, plain_backward
    for name, one in {"": chain, " after a cut with carry": carrying}.items():
        walk = Walk(one)
        yield f"block by block{name}", one, walk.forward, walk.backward


def check_values(chain, batch):
    """Sizes and differentiability are what they were said to be."""
    args, kwargs = chain.example(batch)
    chain.train()
    values, sizes = chain.start(*args, **kwargs), chain.cut_bytes(batch)
    for place, block in enumerate(chain):
        for name in chain.live(place) if place else ():
            value, tensor = chain.values[name], values[name]
            assert value.shape(batch) == tuple(tensor.shape), name
            assert f"torch.{value.dtype}" == str(tensor.dtype), name
            assert value.nbytes(batch) == tensor.nbytes, name
            assert value.differentiable == tensor.requires_grad, name
        if place:
            assert sizes[place - 1] == sum(values[name].nbytes for name in chain.live(place))
        values.update(zip(block.writes, block(*(values[name] for name in block.reads)), strict=True))


def some_cuts(n):
    return sorted({place for place in (n // 3, n // 2, n - 1) if 0 < place < n})


def same(factory, args=(), kwargs=None, *, batches=(3,), steps=3, evaluates=True, pick_cuts=some_cuts):
    """Assert that the chain of a model trains and evaluates as the model does, and return the chain.

    ``batches`` may also give each batch size a number of steps of its own.
    """
    torch.manual_seed(0)
    model = factory()
    traced = copy.deepcopy(model)
    before, generator = state_of(traced), torch.get_rng_state()
    chain = Chain.trace(traced, args, kwargs)
    assert torch.equal(generator, torch.get_rng_state()), "tracing drew random numbers"
    assert_same(before, state_of(traced), "after tracing")
    plan = batches if isinstance(batches, dict) else dict.fromkeys(batches, steps)
    for batch, count in plan.items():
        reset(model, before)

        def inputs(number, batch=batch):
            return inputs_for(chain, batch, number)

        expected = history(model, model, plain_backward, inputs, count)
        for name, one, run, backward in ways(chain, pick_cuts):
            reset(traced, before)
            found = history(traced, run, backward, inputs, count)
            assert_same(expected, found, f"{name}, batch {batch}")
            assert list(one.state_dict()) == list(model.state_dict())
        if evaluates:
            model.eval()
            for name, one, run, _ in ways(chain, pick_cuts):
                one.eval()
                with torch.no_grad():
                    expected, found = (flat(r(*a, **k)) for r in (model, run) for a, k in [inputs(9)])
                assert_same(expected, found, f"{name}, evaluation, batch {batch}")
                one.train()
            model.train()
        check_values(chain, batch)
    return chain


def flat(output):
    return dict(enumerate(tensors(output)))


@pytest.fixture(scope="session", name="same")
def same_fixture():
    return same
