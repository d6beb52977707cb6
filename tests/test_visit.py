"""Block by block, forward and backward, with the bits of the whole model."""

import pytest
import torch
from torch import nn

from plait.chain import Chain
from plait.errors import UsageError
from plait.timeline import Timeline
from plait.visit import Boundary, Visit, Walk

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


class Thrice(nn.Module):
    """A tensor and a weight that three blocks use, the weight twice in the first of them."""

    def __init__(self):
        super().__init__()
        self.shared, self.first = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

    def forward(self, x):
        kept = torch.tanh(self.first(x))
        x = torch.tanh(self.shared(self.shared(kept) * kept))
        for place, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if place % 3 == 2:
                x = torch.tanh(self.shared(x)) * kept
        return x


@pytest.fixture(scope="module")
def chain():
    torch.manual_seed(0)
    chain = Chain.trace(Thrice(), X)
    assert len(chain.tied["shared.weight"]) > 2
    assert sum("first" in block.reads for block in chain) > 2
    return chain


@pytest.fixture(autouse=True)
def no_gradients(chain):
    chain.model.zero_grad()


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_gradients_of_what_is_used_thrice_have_the_same_bits(chain):
    for batch in (1, 2, 5):
        (x,), _ = chain.example(batch)
        chain.model(x).square().sum().backward()
        expected = gradients(chain.model)
        chain.model.zero_grad()
        walk = Walk(chain)
        walk.backward(walk.forward(x).square().sum())
        found = gradients(chain.model)
        chain.model.zero_grad()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_gradients_accumulate_in_place(chain):
    walk = Walk(chain)
    walk.backward(walk.forward(X).square().sum())
    held = {name: (p.grad, p.grad.clone()) for name, p in chain.named_parameters()}
    walk.backward(walk.forward(X).square().sum())
    for name, parameter in chain.named_parameters():
        gradient, once = held[name]
        assert parameter.grad is gradient, f"{name}: whoever holds the gradient sees it grow"
        assert torch.equal(gradient, once * 2)


def test_hooks_of_a_shared_parameter_run_once_with_the_whole_gradient(chain):
    seen, weight = [], chain.model.shared.weight
    hook = weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    walk = Walk(chain)
    walk.backward(walk.forward(X).square().sum())
    hook.remove()
    assert len(seen) == 1
    assert torch.equal(seen[0], weight.grad)


def test_inputs_get_their_gradients(chain):
    expected, found = X.clone().requires_grad_(), X.clone().requires_grad_()
    chain.model(expected).square().sum().backward()
    walk = Walk(chain)
    walk.backward(walk.forward(found).square().sum())
    assert torch.equal(found.grad, expected.grad)


def test_a_loss_may_have_parameters_of_its_own(chain):
    judge = nn.Linear(8, 1)
    judge(chain.model(X)).sum().backward()
    expected = {**gradients(chain.model), **gradients(judge)}
    chain.model.zero_grad()
    judge.zero_grad()
    walk = Walk(chain)
    walk.backward(judge(walk.forward(X)).sum())
    found = {**gradients(chain.model), **gradients(judge)}
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_only_values_and_gradients_pass_between_visits(chain):
    """Each visit on its own, with everything between them gone through a copy."""
    walk = Walk(chain)
    walk.backward(walk.forward(X).square().sum())
    expected = gradients(chain.model)
    chain.model.zero_grad()
    shared, values, visits = frozenset(chain.tied), chain.start(X), []
    for place, block in enumerate(chain):
        visits.append(Visit(block, values, shared=shared))
        values.update(visits[-1].writes)
        values = {n: values[n].clone().detach().requires_grad_(chain.values[n].differentiable)
                  for n in chain.live(place + 1)}  # fmt: skip
    (output,) = values.values()
    passed = {chain.outputs[0]: 2 * output.detach()}
    while visits:
        visits.pop().backward(passed)
        passed = {name: gradient.clone() for name, gradient in passed.items()}
    shares = {name: passed.pop(f"parameter:{name}") for name in shared}
    assert not passed, "nothing else is left over"
    for name, parameter in chain.named_parameters():
        assert torch.equal(shares.get(name, parameter.grad), expected[name])


def test_the_layout_of_a_gradient_is_kept():
    """A gradient that comes back transposed is passed on so: sums of it would have other bits."""

    class Transposed(nn.Module):
        def forward(self, x):
            return x.transpose(1, 2)

    chain = Chain.of([nn.Conv1d(3, 5, 3), Transposed(), nn.Linear(5, 4)], torch.randn(2, 3, 9))
    (x,), _ = chain.example(4)
    visits, values = [], chain.start(x)
    for block in chain:
        visits.append(Visit(block, values))
        values = visits[-1].writes
    passed = {"2": torch.ones_like(values["2"])}
    visits.pop().backward(passed)
    visits.pop().backward(passed)
    assert passed["0"].stride() != values["2"].new_empty(passed["0"].shape).stride()


class ChannelsLast(nn.Module):
    """Convolutions on what a LayerNorm over channels has left in channels-last order."""

    def __init__(self):
        super().__init__()
        self.stem, self.down, self.end = nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 16, 2, 2), nn.Linear(16, 5)
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for channels in (8, 16))

    def forward(self, x):
        for conv, norm in zip((self.stem, self.down), self.norms, strict=True):
            x = norm(conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.end(x.mean((-2, -1)))


@pytest.mark.parametrize("batch", [1, 2])
def test_channels_last_values_stay_so(batch):
    """With one row, the stride of the batch is all that tells channels-last from plain order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    chain = Chain.trace(ChannelsLast(), torch.randn(2, 3, 64, 64))
    assert [block.name for block in chain] == ["stem", "down", "end"]
    x = torch.randn(batch, 3, 64, 64)
    chain.model(x).square().mean().backward()
    expected = gradients(chain.model)
    chain.model.zero_grad()
    walk = Walk(chain)
    walk.backward(walk.forward(x).square().mean())
    found = gradients(chain.model)
    torch.set_num_threads(threads)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_boundary_keeps_every_stride():
    value = torch.randn(1, 6, 6, 8).permute(0, 3, 1, 2).requires_grad_()
    assert value.view_as(value).stride() != value.stride(), "or this shows nothing"
    boundary = Boundary()
    entered = boundary.enter("x", value)
    assert entered.stride() == value.stride()
    (entered * 2).sum().backward()
    assert torch.equal(boundary.gradients["x"], torch.full_like(value, 2.0))
    assert value.grad is None


def test_a_backward_needs_a_forward(chain):
    walk = Walk(chain)
    with pytest.raises(UsageError, match="backward needs a forward"):
        walk.backward(torch.ones(()))
    loss = walk.forward(X).sum()
    walk.backward(loss)
    with pytest.raises(UsageError, match="backward needs a forward"):
        walk.backward(loss)


def test_without_gradients_nothing_is_kept(chain):
    with torch.no_grad():
        output = Walk(chain).forward(X)
    assert not output.requires_grad
    assert torch.equal(output, chain.model(X))


def test_sparse_gradients_of_a_tied_embedding():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(9, 8, sparse=True)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

        def forward(self, words):
            x = self.words(words)
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x * self.words(words)

    words = torch.arange(8).view(2, 4)
    chain = Chain.trace(Sparse(), words)
    assert chain.tied
    chain.model(words).square().sum().backward()
    expected = chain.model.words.weight.grad.to_dense()
    chain.model.zero_grad()
    walk = Walk(chain)
    walk.backward(walk.forward(words).square().sum())
    assert torch.equal(chain.model.words.weight.grad.to_dense(), expected)


def test_a_timeline_gets_a_span_for_every_visit(chain):
    timeline = Timeline()
    walk = Walk(chain, timeline, track="here")
    walk.backward(walk.forward(X).sum())
    names = [block.name for block in chain]
    spans = [(span.track, span.name, span.info["block"]) for span in timeline.spans]
    assert spans == [("here", "forward", n) for n in names] + [("here", "backward", n) for n in names[::-1]]


def test_state_may_come_from_outside(chain):
    """Copies of the parameters, for each visit its own, with the sums of what is shared handed on."""
    walk = Walk(chain)
    walk.backward(walk.forward(X).square().sum())
    expected = gradients(chain.model)
    chain.model.zero_grad()
    shared, values, visits = frozenset(chain.tied), chain.start(X), []
    for block in chain:
        state = {name: block.state(name).detach().clone().requires_grad_() for name in block.state_names}
        visits.append((Visit(block, values, shared=shared, state=state), state))
        values.update(visits[-1][0].writes)
    passed, found = {chain.outputs[0]: 2 * values[chain.outputs[0]].detach()}, {}
    while visits:
        visit, state = visits.pop()
        visit.backward(passed)
        found.update({name: tensor.grad for name, tensor in state.items()})
        passed.update({f"parameter:{name}": state[name].grad for name in shared.intersection(state)})
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(parameter.grad is None for parameter in chain.parameters())
