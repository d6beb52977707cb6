"""A model whose weights do not exist yet: what is created later is what the constructor would have made."""

import copy
import logging
import resource
import threading

import pytest
import torch
from torch import nn

from plait import deferred
from plait.chain import Chain
from plait.errors import TraceError, UsageError


class Odd(nn.Module):
    """Initialises in every way that models do."""

    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.randn(40, 50) * 0.02)
        self.words = nn.Embedding(60, 50, padding_idx=3)
        self.line, self.round = nn.Linear(50, 50), nn.Linear(50, 50, bias=False)
        self.attention, self.lstm = nn.MultiheadAttention(48, 4), nn.LSTM(20, 30)
        self.given = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.slices = nn.ParameterList(torch.randn(90, 10).split(30))
        self.norm = nn.BatchNorm1d(7)
        self.head = nn.Linear(50, 60, bias=False)
        self.head.weight = self.words.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 5)]
        self.register_buffer("table", torch.tril(torch.ones(4, 4)), persistent=False)
        self.register_buffer("noise", torch.randn(30))
        self.plain, self.several = torch.arange(3) * 2, [torch.ones(2), {"x": torch.zeros(1)}]
        nn.init.orthogonal_(self.round.weight)
        nn.init.trunc_normal_(self.line.weight, std=0.02)
        self.apply(self.special)

    def special(self, module):
        if isinstance(module, nn.LSTM):
            for parameter in module.parameters():
                nn.init.uniform_(parameter, -0.5, 0.5)
        if module is self.line:
            module.bias.data.fill_(0.25)


@pytest.fixture(scope="module")
def built():
    return deferred.build(Odd, seed=1)


def named(model):
    return dict(model.named_parameters())


def test_made_whole_or_by_parts_in_any_order(built):
    model = deferred.construct(Odd, seed=1)
    names = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert set(named(model)) - set(names) == {"given"}, "what is made from numbers exists at once"
    for order in (names, names[::-1], names[::3]):
        for name in order:
            (made,) = deferred.create(model, [name], seed=1).values()
            assert torch.equal(made, named(built)[name]), name
    whole = deferred.create(model, seed=1)
    assert list(whole) == names
    assert all(torch.equal(made, named(built)[name]) for name, made in whole.items())


def test_another_seed_draws_other_weights(built):
    other = deferred.build(Odd, seed=2)
    drawn = [name for name, p in built.named_parameters() if p.std() > 0 and name != "given"]
    for name in drawn:
        assert not torch.equal(named(built)[name], named(other)[name]), name
    assert not torch.equal(built.noise, other.noise)
    assert torch.equal(built.given, other.given)


def test_the_distributions_are_those_of_the_constructor(built):
    torch.manual_seed(0)
    plain = Odd()
    for name, parameter in plain.named_parameters():
        found = named(built)[name]
        assert found.shape == parameter.shape
        assert found.stride() == parameter.stride()
        assert found.requires_grad == parameter.requires_grad
        if parameter.numel() > 500:
            assert torch.isclose(found.std(), parameter.std(), rtol=0.1), name
            assert (found.mean() - parameter.mean()).abs() < 0.1 * parameter.std() + 1e-4, name


def test_what_the_constructor_did_is_done(built):
    assert torch.equal(built.words.weight[3], torch.zeros(50))
    assert torch.equal(built.line.bias, torch.full((50,), 0.25))
    product = built.round.weight @ built.round.weight.t()
    assert torch.allclose(product, torch.eye(50), atol=1e-5)
    assert built.line.weight.abs().max() < 0.2
    assert built.lstm.weight_ih_l0.abs().max() > 0.4
    assert torch.equal(built.given, torch.tensor([1.0, 2.0]))
    assert built.rates == Odd().rates
    assert built.head.weight is built.words.weight


def test_buffers_and_plain_tensors_are_kept():
    model, plain = deferred.construct(Odd), Odd()
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in plain.named_buffers()]
    assert torch.equal(model.table, plain.table)
    assert torch.equal(model.plain, plain.plain)
    assert torch.equal(model.several[0], torch.ones(2))
    assert torch.equal(model.several[1]["x"], torch.zeros(1))
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_an_lstm_runs_once_it_is_built(built):
    assert built.lstm(torch.zeros(2, 1, 20))[0].abs().sum() > 0


def test_random_buffers_differ_from_layer_to_layer():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("noise", torch.randn(5))

    def factory():
        layers = nn.Sequential(Noisy(), Noisy(), Noisy())
        layers[2].noise = layers[0].noise
        return layers

    model = deferred.construct(factory)
    assert not torch.equal(model[0].noise, model[1].noise)
    assert model[2].noise is model[0].noise, "tied buffers stay tied"
    assert not torch.equal(deferred.construct(factory, seed=1)[0].noise, model[0].noise)


def test_a_copy_of_a_weight_equals_it():
    class Teacher(nn.Module):
        def __init__(self):
            super().__init__()
            self.student = nn.Linear(6, 6)
            self.teacher = copy.deepcopy(self.student)
            self.late = nn.Linear(6, 6)
            self.late.load_state_dict(self.student.state_dict())
            self.other = nn.Linear(6, 6)
            self.register_buffer("start", self.student.weight.detach().clone())

    model = deferred.build(Teacher, seed=4)
    for copied in (model.teacher, model.late):
        assert torch.equal(copied.weight, model.student.weight)
        assert torch.equal(copied.bias, model.student.bias)
    assert torch.equal(model.start, model.student.weight)
    assert not torch.equal(model.other.weight, model.student.weight)
    parts = deferred.construct(Teacher, seed=4)
    made = deferred.create(parts, ["teacher.weight"], seed=4)
    assert torch.equal(made["teacher.weight"], model.student.weight)


def test_a_parameter_does_not_depend_on_the_others():
    def factory(*before):
        return nn.ModuleDict({**{name: nn.Linear(4, 4) for name in before}, "last": nn.Linear(4, 4)})

    short, long = deferred.build(factory, seed=1), deferred.build(lambda: factory("a", "b"), seed=1)
    assert torch.equal(short["last"].weight, long["last"].weight)
    assert not torch.equal(long["a"].weight, long["b"].weight)


DRAWS = {
    "randn": lambda: torch.randn(50),
    "rand": lambda: torch.rand(50) * 2,
    "like": lambda: torch.randn_like(torch.ones(50)),
    "randint": lambda: torch.randint(3, 9, (50,)).float(),
    "randperm": lambda: torch.randperm(50).float(),
    "normal": lambda: torch.normal(torch.zeros(50), 2.0),
    "bernoulli": lambda: torch.bernoulli(torch.full((50,), 0.5)),
    "in place": lambda: torch.empty(50).exponential_(),
    "sparse": lambda: nn.init.sparse_(torch.empty(10, 10), 0.5),
    "kaiming": lambda: nn.init.kaiming_normal_(torch.empty(10, 10)),
    "dropout": lambda: nn.functional.dropout(torch.ones(50)),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_every_way_to_draw_is_seeded(draw):
    def factory():
        model = nn.Module()
        model.x = nn.Parameter(draw())
        return model

    before = torch.get_rng_state()
    one, again, other = (deferred.build(factory, seed=seed).x for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state()), "nothing is drawn from the generator of all threads"
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert one.std() > 0


def test_a_factory_that_loads_weights(tmp_path):
    state = nn.Linear(3, 3).state_dict()
    torch.save(state, tmp_path / "weights.pt")

    def factory():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[0].load_state_dict(torch.load(tmp_path / "weights.pt"))
        return model

    model = deferred.build(factory, seed=1)
    assert torch.equal(model[0].weight, state["weight"])
    assert not torch.equal(model[1].weight, state["weight"])


def test_loaded_weights_that_are_changed_afterwards_are_noticed():
    given = torch.ones(3, 3)

    def factory():
        model = nn.Linear(3, 3)
        model.weight.data.copy_(given)
        return model

    model = deferred.construct(factory)
    given.add_(1)
    with pytest.raises(TraceError, match=r"a tensor of shape \(3, 3\).*was changed in place afterwards"):
        deferred.create(model, ["weight"], seed=0)


def test_in_other_types():
    torch.set_default_dtype(torch.float64)
    try:
        model = deferred.build(lambda: nn.Linear(3, 3), seed=1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.weight.dtype == torch.float64
    assert deferred.build(lambda: nn.Linear(3, 3).bfloat16(), seed=1).weight.dtype == torch.bfloat16


def test_a_copied_model_is_created_as_the_first():
    model = deferred.construct(Odd)
    again = copy.deepcopy(model)
    expected, found = deferred.create(model, ["places"], seed=1), deferred.create(again, ["places"], seed=1)
    assert torch.equal(expected["places"], found["places"])


def test_a_name_that_is_none():
    with pytest.raises(UsageError, match=r"'line\.width' is no parameter") as caught:
        deferred.create(deferred.construct(Odd), ["line.width"], seed=0)
    assert caught.value.works.startswith("places, frozen")


def test_parts_of_a_constructed_model_do_not_know_how_they_begin():
    model = deferred.construct(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    chain = Chain.of(list(model), torch.randn(2, 3))
    with pytest.raises(TraceError, match=r"parts of another that plait.deferred.construct built"):
        chain.create(0, seed=0)


def test_threads_may_construct_at_the_same_time(built):
    found = {}

    def construct(place):
        model = deferred.construct(Odd, seed=1)
        found[place] = deferred.create(model, ["line.weight"], seed=1)["line.weight"]

    threads = [threading.Thread(target=construct, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    plain = nn.init.trunc_normal_(torch.empty(1000), std=1.0)  # not recorded, although others record
    for thread in threads:
        thread.join()
    assert plain.std() > 0.5
    assert all(torch.equal(weight, built.line.weight) for weight in found.values())
    assert "recorded" not in nn.init._no_grad_trunc_normal_.__name__, "nothing of torch stays replaced"


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_a_model_larger_than_memory_is_built_traced_and_cut():
    """Over a hundred gigabytes of weights, of which none is ever there."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(60_000, 60_000) for _ in range(8))
            self.head = nn.Linear(60_000, 2)

        def forward(self, x):
            for layer in self.layers:
                x = torch.relu(layer(x)) + x
            return self.head(x)

    Chain.trace(nn.Linear(2, 2), torch.zeros(2, 2))  # what torch loads on first use is not counted
    before = resident_bytes()
    chain = Chain.trace(deferred.construct(Wide), torch.zeros(2, 60_000))
    parts = chain.cut([4])
    assert sum(parameter.nbytes for parameter in chain.parameters()) > 100e9
    assert len(chain) == 9
    assert parts.cut_bytes(3) == (3 * 60_000 * 4,)
    chain.create(8, seed=0)
    assert not chain.model.head.weight.is_meta
    assert resident_bytes() - before < 200e6


# --- a model built under torch.device("meta") -------------------------------------------------------


def test_hugging_face_models_built_on_meta_are_initialised_as_they_would_be():
    transformers = pytest.importorskip("transformers")
    logging.disable(logging.WARNING)
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=8)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    whole = deferred.build(lambda: transformers.GPT2LMHeadModel(config), seed=1)
    logging.disable(logging.NOTSET)
    made = deferred.create(model, seed=1)
    assert list(made) == list(named(whole))
    assert all(torch.equal(made[name], parameter) for name, parameter in whole.named_parameters())
    assert all(parameter.is_meta for parameter in model.parameters()), "creating does not place"


def test_a_buffer_lost_on_meta_is_named():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(TraceError, match=r"buffer '1\.running_mean' was lost") as caught:
        deferred.create(model, seed=0)
    assert "construct" in caught.value.works


def test_a_parameter_that_nothing_initialises_is_named():
    class Custom(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.line = nn.Parameter(torch.ones(3)), nn.Linear(3, 3)

    with torch.device("meta"):
        model = Custom()
    assert deferred.create(model, ["line.weight"], seed=0)["line.weight"].std() > 0
    with pytest.raises(TraceError, match="nothing initialises parameter 'scale'") as caught:
        deferred.create(model, seed=0)
    assert "construct" in caught.value.works
    assert torch.equal(deferred.build(Custom, seed=0).scale, torch.ones(3))


def test_what_exists_is_not_initialised_again():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model.append(nn.BatchNorm1d(3))
    model[0].weight = nn.Parameter(torch.full((3, 3), 7.0))
    model[2].running_mean.fill_(5)
    made = deferred.create(model, ["1.weight"], seed=0)
    assert made["1.weight"].std() > 0
    assert torch.equal(model[0].weight, torch.full((3, 3), 7.0))
    assert torch.equal(model[2].running_mean, torch.full((3,), 5.0))
