"""A model as a chain: cutting it, reading it, running it, and one that does not exist yet."""

import copy
import pickle
import weakref
from itertools import product

import pytest
import torch
from torch import nn

from plait import deferred
from plait.chain import Chain
from plait.errors import UsageError

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """A stream of eight layers with a skip from the first to the last, and a tied weight."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        self.norm = nn.BatchNorm1d(8)
        self.layers[7].weight = self.layers[0].weight

    def forward(self, x, *, scale):
        first = x = torch.relu(self.layers[0](x))
        for layer in self.layers[1:7]:
            x = torch.dropout(torch.relu(layer(x)), 0.2, self.training)
        x = self.norm(x)
        return {"x": self.layers[7](torch.cat([x, first], 0)), "scale": scale * 2}


SCALE = torch.arange(2.0)


@pytest.fixture
def chain(traced):
    """The traced chain with the weights it was made with, in training."""
    chain, state = traced
    chain.load_state_dict(state)
    return chain.train()


@pytest.fixture(scope="module")
def traced():
    torch.manual_seed(0)
    chain = Chain.trace(Model(), X, {"scale": SCALE})
    return chain, copy.deepcopy(chain.state_dict())


def run(model, seed=0):
    torch.manual_seed(seed)
    return model(X, scale=SCALE)["x"]


def test_it_reads_as_a_sequence_of_blocks(chain):
    assert len(chain) == 8
    assert list(chain) == [chain[place] for place in range(8)]
    assert [block.name for block in chain] == [f"layers.{place}" for place in range(8)]


def test_live_values(chain):
    assert chain.live(0) == ("input:0", "input:scale")
    assert chain.live(1) == ("input:scale", "layers.0")
    assert chain.live(4) == ("input:scale", "layers.0", "layers.3")
    assert chain.live(8) == chain[7].writes
    assert set(chain.outputs) == set(chain.live(8))


@pytest.mark.parametrize("place", [-1, 9, 17, 1.5, "a", None, True])
def test_a_cut_that_is_not_there(chain, place):
    with pytest.raises(UsageError, match=f"no cut before block {place!r} in a chain of 8 blocks") as caught:
        chain.live(place)
    assert caught.value.works == "0 to 8"


def test_what_is_no_module_is_no_model():
    with pytest.raises(UsageError, match=r"the model is a function, not an nn\.Module"):
        Chain.trace(lambda x: x, X)


def test_bytes_of_every_cut(chain):
    row, scale = 8 * 4, 4
    assert chain.cut_bytes(5) == (5 * (row + scale), *[5 * (2 * row + scale)] * 6)


@pytest.mark.parametrize("batch", [0, -1, 1.5, 2.0, "a", None, True])
def test_what_is_no_batch_size(chain, batch):
    for ask in (chain.cut_bytes, chain.example):
        with pytest.raises(UsageError, match=f"a batch of {batch!r} is no whole number") as caught:
            ask(batch)
        assert (caught.value.setting, caught.value.works) == ("batch", "1")


def test_a_cut_joins_the_blocks_between(chain):
    cut = chain.cut([2, 3])
    assert [block.name for block in cut] == ["layers.0..layers.1", "layers.2", "layers.3..layers.7"]
    assert cut[2].reads == ("layers.2", "layers.0", "input:scale")
    assert [cut.live(place) for place in range(4)] == [chain.live(place) for place in (0, 2, 3, 8)]
    assert cut.cut_bytes(3) == tuple(chain.cut_bytes(3)[place - 1] for place in (2, 3))
    assert cut.tied == {"layers.0.weight": (0, 2)}
    assert torch.equal(run(cut), run(chain))


def test_with_carry_one_blocks_output_is_the_next_ones_input(chain):
    cut = chain.cut([2, 3, 6], carry=True)
    for place in range(1, 4):
        assert cut[place].reads == cut[place - 1].writes == cut.live(place)
    assert [cut.live(place) for place in range(5)] == [chain.live(place) for place in (0, 2, 3, 6, 8)]
    assert cut.cut_bytes(3) == tuple(chain.cut_bytes(3)[place - 1] for place in (2, 3, 6))
    assert torch.equal(run(cut), run(chain))


def test_a_cut_can_be_cut_again(chain):
    for carry, then in product((False, True), repeat=2):
        cut = chain.cut([2, 4, 6], carry=carry).cut([1, 3], carry=then)
        once = chain.cut([2, 6], carry=then)
        assert [len(block.steps) for block in cut] == [2, 4, 2]
        for one, other in zip(cut, once, strict=True):
            assert (one.reads, one.writes) == (other.reads, other.writes)
        assert [cut.live(place) for place in range(4)] == [chain.live(place) for place in (0, 2, 6, 8)]
        assert torch.equal(run(cut), run(chain))


def test_cut_into_one(chain):
    cut = chain.cut([])
    assert len(cut) == 1
    assert cut.cut_bytes(2) == ()
    assert torch.equal(run(cut), run(chain))


@pytest.mark.parametrize("at", [[0], [8], [3, 2], [2, 2], [-1], [1, 9]], ids=str)
def test_wrong_cuts(chain, at):
    with pytest.raises(UsageError, match="do not rise from 1 to 7") as caught:
        chain.cut(at)
    assert caught.value.works == "[4]"


@pytest.mark.parametrize("at", [1, None, 1.5, [1.5], ["a"], "a", [None], [True], [[1]]], ids=str)
def test_cuts_that_are_no_list_of_whole_numbers(chain, at):
    with pytest.raises(UsageError) as caught:
        chain.cut(at)
    assert f"cuts {at!r} are no list of whole numbers" in str(caught.value)
    assert (caught.value.setting, caught.value.works) == ("at", "[4]")


@pytest.mark.parametrize("place", [8, 99, -1, 1.5, "a", None, True])
def test_a_block_that_is_not_there(chain, place):
    for ask in (
        lambda: chain.create(place, seed=0),
        lambda: chain.load(place, "model.safetensors"),
        lambda: chain.release(place),
    ):
        with pytest.raises(UsageError, match=f"no block {place!r} in a chain of 8 blocks") as caught:
            ask()
        assert (caught.value.setting, caught.value.works) == ("place", "0 to 7")


@pytest.mark.parametrize("seed", [None, 1.5, "a", -1, True])
def test_what_is_no_seed(chain, seed):
    for ask in (
        lambda: chain.create(0, seed=seed),
        lambda: deferred.construct(Model, seed=seed),
        lambda: deferred.build(Model, seed=seed),
        lambda: deferred.create(Model(), seed=seed),
    ):
        with pytest.raises(UsageError, match=f"seed is {seed!r}, not a whole number") as caught:
            ask()
        assert (caught.value.setting, caught.value.works) == ("seed", "1")


def test_a_chain_of_nothing():
    with pytest.raises(UsageError, match="at least one block"):
        Chain.of([])
    with pytest.raises(UsageError, match="no tensor with a batch dimension"):
        Chain.trace(nn.Sequential(), ())


def test_the_example_at_any_batch(chain):
    (x,), keywords = chain.example(3)
    assert torch.equal(x, X[[0, 1, 0]])
    assert torch.equal(keywords["scale"], SCALE[[0, 1, 0]])


def test_dead_values_are_let_go(chain):
    """In evaluation no more is alive at a time than the blocks at hand need."""
    alive = []

    def count(block, given, found):
        made.extend(weakref.ref(tensor) for tensor in found)
        alive.append(sum(ref() is not None for ref in made))

    made = []
    hooks = [block.register_forward_hook(count) for block in chain]
    with torch.no_grad():
        run(chain)
    for hook in hooks:
        hook.remove()
    assert max(alive) <= 4, alive


def test_a_joined_block_lets_dead_values_go(chain):
    seen, cut = [], chain.cut([], carry=True)
    refs = []

    class Watch:
        def __init__(self, run):
            self.run = run

        def __call__(self, *values):
            found = self.run(*values)
            refs.extend(weakref.ref(tensor) for tensor in found)
            seen.append(sum(ref() is not None for ref in refs))
            return found

    for step in cut[0].steps:
        object.__setattr__(
            step, "training", type(step.training)(step.training.state, Watch(step.training.run))
        )
    try:
        with torch.no_grad():
            run(cut)
    finally:
        for step in cut[0].steps:
            object.__setattr__(
                step, "training", type(step.training)(step.training.state, step.training.run.run)
            )
    assert max(seen) <= 4, seen


def test_state_goes_both_ways(chain):
    other = Model()
    other.load_state_dict(chain.state_dict())
    assert torch.equal(run(other), run(chain))
    fresh = Model()
    chain.load_state_dict(fresh.state_dict())
    assert torch.equal(run(fresh), run(chain))
    assert [name for name, _ in chain.named_parameters()] == [name for name, _ in fresh.named_parameters()]


def test_switching_back_and_forth(chain):
    model = Model()
    model.load_state_dict(chain.state_dict())
    for mode in (True, False, False, True, False):
        chain.train(mode)
        model.train(mode)
        assert torch.equal(run(chain, seed=3), run(model, seed=3))
        assert all(block.training is mode for block in chain)
    assert torch.equal(chain.model.norm.running_mean, model.norm.running_mean)


def test_a_cut_has_the_mode_of_its_chain(chain):
    assert chain.eval().cut([4])[1].training is False
    assert chain.train().cut([4])[1].training is True


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps])
def test_chains_and_blocks_are_not_copied(chain, how):
    for thing in (chain, chain[0]):
        with pytest.raises(UsageError, match="cannot be copied or pickled") as caught:
            how(thing)
        assert caught.value.works == "copy or pickle the model, and trace it again"
    assert how(chain.model)


# --- a model that does not exist yet ----------------------------------------------------------------


@pytest.fixture(scope="module")
def constructed():
    return Chain.trace(deferred.construct(Model), X, {"scale": SCALE})


@pytest.fixture
def absent(constructed):
    """The chain of a model of which no block exists."""
    constructed.model.requires_grad_()
    for place in range(len(constructed)):
        constructed.release(place)
    constructed.model.norm.reset_running_stats()
    return constructed


def exists(chain):
    return [all(not block.state(name).is_meta for name in block.state_names) for block in chain]


def test_blocks_are_created_one_at_a_time(absent):
    assert exists(absent) == [False] * 8
    absent.create(3, seed=1)
    assert exists(absent) == [place == 3 for place in range(8)]
    absent.release(3)
    assert exists(absent) == [False] * 8
    for place in (5, 0, 2, 7, 1, 4, 3, 6):
        absent.create(place, seed=1)
    assert torch.equal(run(absent), run(deferred.build(Model, seed=1)))
    assert torch.equal(run(absent.model), run(deferred.build(Model, seed=1)))


def test_a_tied_weight_comes_and_goes_for_all_its_blocks(absent):
    absent.create(0, seed=1)
    weight = absent.model.layers[0].weight
    assert absent[7].state("layers.0.weight") is weight
    assert absent.model.layers[7].weight is weight
    assert absent[7].state("layers.7.bias").is_meta
    absent.create(7, seed=1)
    assert absent.model.layers[7].weight is weight, "what exists is not made again"
    absent.release(7)
    assert absent[0].state("layers.0.weight").is_meta
    assert not absent[0].state("layers.0.bias").is_meta


def test_creation_is_the_same_in_a_cut(absent):
    cut = absent.cut([4])
    cut.create(0, seed=1)
    cut.create(1, seed=1)
    assert exists(absent) == [True] * 8
    assert torch.equal(run(cut), run(deferred.build(Model, seed=1)))


def test_frozen_parameters_stay_frozen(absent):
    absent.model.layers[2].requires_grad_(False)
    absent.create(2, seed=1)
    assert not absent.model.layers[2].weight.requires_grad
    absent.release(2)
    assert not absent.model.layers[2].weight.requires_grad


def test_a_block_that_does_not_exist_does_not_run(absent):
    absent.create(0, seed=0)
    with pytest.raises(UsageError, match=r"block 'layers\.1' does not exist yet: its 'layers\.1\.weight'"):
        run(absent)


def test_a_model_that_exists_can_be_released_and_created(chain):
    before = chain.model.layers[3].weight.clone()
    norm = {name: buffer.clone() for name, buffer in chain.model.norm.named_buffers()}
    other = chain.model.layers[4].weight.clone()
    chain.release(3)
    chain.create(3, seed=5)
    assert chain.model.layers[3].weight.shape == before.shape
    assert not torch.equal(chain.model.layers[3].weight, before)
    assert torch.equal(chain.model.layers[4].weight, other), "nothing else is initialised again"
    assert all(torch.equal(buffer, norm[name]) for name, buffer in chain.model.norm.named_buffers())
