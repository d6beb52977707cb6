"""Chains of modules as they stand: `nn.Sequential` taken apart, and lists of blocks."""

import pytest
import torch
from torch import nn

from plait import deferred
from plait.chain import Chain
from plait.errors import TraceError, UsageError
from plait.visit import Walk

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))


class PreActivation(nn.Module):
    """Changes what it is given in place."""

    def __init__(self):
        super().__init__()
        self.act, self.layer = nn.ReLU(inplace=True), nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(self.act(x))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("n", torch.zeros(()))
        self.register_buffer("k", torch.zeros(()))

    def forward(self, x):
        self.n.add_(1)
        self.k = self.k + 1
        return self.layer(x) * self.n / self.k


def plain():
    act = nn.ReLU()
    return nn.Sequential(nn.Linear(8, 8), act, nn.Dropout(0.3), nn.Linear(8, 8), act, nn.Linear(8, 3))


def tied():
    layer = nn.Linear(8, 8)
    inner = nn.Sequential(nn.ReLU(inplace=True), nn.Sequential(layer, nn.Tanh()))
    return nn.Sequential(layer, nn.Tanh(), layer, nn.BatchNorm1d(8), nn.Linear(8, 8), inner)


def frozen_norm():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8).eval(), nn.Linear(8, 8), nn.BatchNorm1d(8))


def changing():
    return nn.Sequential(nn.Linear(8, 8), PreActivation(), PreActivation(), Counting())


SEQUENTIALS = {
    plain: ["0", "3", "5"],
    tied: ["0", "2", "4", "5.1.0"],
    frozen_norm: ["0", "2"],
    changing: ["0", "1", "2", "3"],
}


@pytest.mark.parametrize("factory", SEQUENTIALS, ids=lambda factory: factory.__name__)
def test_a_sequential_is_taken_apart(factory, same):
    chain = same(factory, X)
    assert [block.name for block in chain] == SEQUENTIALS[factory]
    assert [chain.live(place) for place in range(1, len(chain) + 1)] == [(n,) for n in SEQUENTIALS[factory]]


def test_a_module_that_is_there_twice_runs_twice():
    act = nn.Tanh()
    model = nn.Sequential(nn.Linear(8, 8), act, nn.Linear(8, 8), act)
    assert torch.equal(Chain.trace(model, X)(X), model(X))


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x), x


class First(nn.Module):
    def forward(self, pair):
        return pair[0]


def test_a_sequential_that_passes_more_than_a_tensor_is_recorded_instead(same):
    chain = same(lambda: nn.Sequential(Both(), First(), nn.Linear(8, 8)), X)
    assert [block.name for block in chain] == ["0.layer", "2"]


def test_a_hook_on_a_sequential_is_not_lost():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)))
    model[1].register_forward_hook(lambda module, given, found: found * 2)
    assert torch.equal(Chain.trace(model, X)(X), model(X))
    model.register_forward_hook(lambda module, given, found: found + 1)
    assert torch.equal(Chain.trace(model, X)(X), model(X))


def test_a_frozen_module_stays_frozen_and_others_switch():
    chain = Chain.trace(frozen_norm(), X)
    for mode in (False, True, False, True):
        chain.train(mode)
        chain(X)
        assert [module.training for module in chain.model] == [mode, False, mode, mode]
    assert chain.model[1].num_batches_tracked == 0
    assert chain.model[3].num_batches_tracked == 2


class Split(nn.Module):
    def forward(self, x):
        return x[:, :3], x[:, 3:]


class Join(nn.Module):
    def forward(self, left, right):
        return torch.cat([right, left], 1)


def test_blocks_may_pass_several_tensors():
    layer = nn.Linear(8, 8)
    chain = Chain.of([layer, Split(), Join(), Split()], X)
    assert [block.writes for block in chain] == [("0",), ("1:0", "1:1"), ("2",), ("3:0", "3:1")]
    assert chain.cut_bytes(3) == (96, 96, 96)
    walk = Walk(chain)
    left, right = walk.forward(X)
    assert torch.equal(torch.cat([left, right], 1), Join()(*Split()(layer(X))))
    walk.backward((left * 2).sum() + right.sum())
    expected = torch.autograd.grad((chain(X)[0] * 2).sum() + chain(X)[1].sum(), layer.weight)[0]
    assert torch.equal(layer.weight.grad, expected)


def test_several_inputs():
    chain = Chain.of([Join(), nn.Linear(8, 8)], (X[:, :3], X[:, 3:]))
    assert chain.inputs == ("input:0", "input:1")
    assert torch.equal(chain(X[:, :3], X[:, 3:]), chain.model[1](Join()(X[:, :3], X[:, 3:])))


def test_without_an_example_it_runs_but_has_no_sizes():
    chain = Chain.of([nn.Linear(8, 8), nn.ReLU()])
    assert torch.equal(chain(X), chain.model(X))
    for call in (lambda: chain.cut_bytes(1), lambda: chain.example(1)):
        with pytest.raises(UsageError, match="example inputs"):
            call()


def test_without_an_example_several_tensors_are_an_error_that_says_so():
    chain = Chain.of([nn.Linear(8, 8), Split(), Join()])
    with pytest.raises(TraceError, match=r"block '1' gave 2 where 1 tensor") as caught:
        chain(X)
    assert "example_inputs" in caught.value.works


def test_names_of_parameters_are_those_of_a_sequential():
    blocks = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)]
    assert list(Chain.of(blocks).state_dict()) == list(nn.Sequential(*blocks).state_dict())


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Chain.of([]), "at least one block"),
        (lambda: Chain.of([nn.ReLU(), torch.relu]), "block 1 is a builtin_function_or_method"),
        (lambda: Chain.of([nn.ReLU()], {"x": X}), r"takes no keyword inputs, and the example has \['x'\]"),
        (lambda: Chain.of([nn.ReLU()], (X, 3)), "example input 1 is a int, not a tensor"),
        (lambda: Chain.of([nn.ReLU()], torch.zeros(0, 8)), "a batch of zero"),
    ],
)
def test_lists_that_are_no_blocks(make, what):
    with pytest.raises(UsageError, match=what) as caught:
        make()
    assert caught.value.works


class Shapes(nn.Module):
    def forward(self, x):
        return x.shape


@pytest.mark.parametrize(
    ("blocks", "what"),
    [
        ([nn.Linear(8, 4), nn.Linear(8, 4)], "block '1' fails on the example inputs: mat1 and mat2 shapes"),
        ([nn.Linear(8, 4), First(), Shapes()], "block '2' returns something else than a tensor"),
    ],
    ids=["shapes", "outputs"],
)
def test_blocks_that_do_not_fit(blocks, what):
    with pytest.raises(TraceError, match=what):
        Chain.of(blocks, X)


@pytest.mark.parametrize("given", [(), (X, X)], ids=len)
def test_called_with_other_inputs(given):
    with pytest.raises(UsageError, match=f"takes 1 positional inputs; it got {len(given)}"):
        Chain.of([nn.Linear(8, 8)], X)(*given)


@pytest.mark.parametrize("given", [X[:0], X[None], X.expand(3, 2, 8)], ids=lambda x: str(tuple(x.shape)))
def test_blocks_of_its_own_modules_take_what_these_take(given):
    model = plain().eval()
    assert torch.equal(Chain.trace(model, X)(given), model(given))


def test_blocks_of_its_own_modules_fail_as_these_do():
    model = plain()
    chain = Chain.trace(model, X)
    for given in (X[:, :3], X.double()):
        with pytest.raises(RuntimeError) as expected:
            model(given)
        with pytest.raises(RuntimeError) as found:
            chain(given)
        assert str(found.value) == str(expected.value)


def test_blocks_in_evaluation_can_be_switched_to_training():
    chain = Chain.of([nn.Linear(8, 8), nn.Dropout(0.9)])
    chain.eval()
    again = Chain.of(list(chain.model))
    assert torch.equal(again(X), chain.model(X))
    again.train()
    assert not torch.equal(again(X), chain.model[0](X))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(4096, 8, batch_first=True)

    def forward(self, x):
        return self.layer(x[:, None])[0][:, 0]


def test_sizes_of_a_model_that_does_not_exist():
    def factory():
        return nn.Sequential(nn.Linear(8, 4096), nn.BatchNorm1d(4096), Recurrent(), nn.Linear(8, 8))

    chain = Chain.trace(deferred.construct(factory), X)
    assert all(parameter.is_meta for parameter in chain.parameters())
    assert chain.cut_bytes(3)[0] == 3 * 4096 * 4
    for place in range(len(chain)):
        chain.create(place, seed=1)
    whole = deferred.build(factory, seed=1)
    assert torch.equal(chain(X), whole(X))
    assert torch.equal(chain.model(X), whole(X)), "the model has its parameters, the GRU too"


def test_an_example_run_draws_nothing_and_counts_nothing():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), Counting())
    before = torch.get_rng_state()
    Chain.of(list(model), X[:1])
    assert torch.equal(before, torch.get_rng_state())
    assert model[2].num_batches_tracked == 0
    assert (model[3].n, model[3].k) == (0, 0)
