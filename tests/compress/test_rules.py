import pytest
import torch
from torch import nn

from plait.compress.rules import (
    Parameter,
    Rule,
    checked_bits,
    checked_width,
    described,
    parameters_of,
    select,
)
from plait.errors import UsageError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.body = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 4))
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(64, 64).requires_grad_(False)


def bits_of(*rules, bits=4, **options):
    return {each.parameter.name: each.bits for each in select(described(Net()), bits, rules, **options)}


def test_norms_biases_and_small_tensors_stay_exact():
    assert bits_of() == {
        "embed.weight": 4,
        "body.0.weight": 4,
        "body.0.bias": 32,
        "body.1.weight": 32,
        "body.1.bias": 32,
        "body.2.weight": 32,
        "body.2.bias": 32,
        "norm.weight": 32,
        "norm.bias": 32,
    }
    assert bits_of(smallest=0)["body.2.weight"] == 4


def test_the_first_rule_that_fits_decides():
    rules = (
        Rule(name="body.0.bias", bits=8),
        Rule(pattern=r"^body\.", module="Linear", bits=2),
        Rule(module=nn.LayerNorm, bits=16),
        Rule(pattern="embed", bits="auto"),
    )
    found = bits_of(*rules)
    assert found["body.0.bias"] == 8
    assert found["body.0.weight"] == found["body.2.weight"] == found["body.2.bias"] == 2
    assert found["body.1.weight"] == 16
    assert found["embed.weight"] == "auto"
    assert found["norm.weight"] == 32


def test_a_subclass_fits_the_rule_of_its_base():
    class Special(nn.Linear):
        pass

    (weight, _) = select(described(Special(64, 64)), 4, [Rule(module=nn.Linear, bits=7)])
    assert weight.bits == 7


def test_tied_weights_count_once_and_frozen_ones_not_at_all():
    names = list(parameters_of(Net()))
    assert names.count("embed.weight") == 1
    assert "head.weight" not in names
    assert not any(name.startswith("frozen") for name in names)


def test_names_are_those_of_the_model_also_when_it_is_compiled():
    assert list(parameters_of(torch.compile(nn.Linear(3, 4)))) == ["weight", "bias"]
    assert [each.name for each in described(torch.compile(nn.Linear(3, 4)))] == ["weight", "bias"]


def test_every_choice_says_why():
    for each in select(described(Net()), 4, [Rule(pattern="embed", bits=8)]):
        assert each.why
    assert "pattern 'embed'" in select(described(Net()), 4, [Rule(pattern="embed", bits=8)])[0].why


@pytest.mark.parametrize(
    ("call", "setting", "works"),
    [
        (lambda: checked_bits(0), "bits", "auto"),
        (lambda: checked_bits(True), "bits", "auto"),
        (lambda: checked_bits("all"), "bits", "auto"),
        (lambda: Rule(bits=4), "rules", "pattern"),
        (lambda: Rule(pattern="(", bits=4), "pattern", r"\("),
        (lambda: Rule(pattern="a", bits=9), "bits", "1 to 8"),
        (lambda: Rule(name=5, bits=4), "name", "head.weight"),
        (lambda: Rule(pattern=5, bits=4), "pattern", "head"),
        (lambda: Rule(pattern=b"x", bits=4), "pattern", "head"),
        (lambda: Rule(module=[], bits=4), "module", "Linear"),
        (lambda: checked_width("auto"), "bits", "works: 1 to 8, 16, 32"),
        (lambda: checked_width(9, "gather_bits"), "gather_bits", "works: 1 to 8, 16, 32"),
        (lambda: bits_of(Rule(name="body.0.weigth", bits=4)), "rules", "body.0.weight"),
        (lambda: bits_of(Rule(module="Conv2d", bits=4)), "rules", "Linear"),
        (lambda: bits_of(Rule(pattern="conv", bits=4)), "rules", "embed.weight"),
        (lambda: select([], 4, [Rule(pattern="a", bits=4)]), "rules", "trainable"),
    ],
)
def test_mistakes(call, setting, works):
    with pytest.raises(UsageError) as caught:
        call()
    assert caught.value.setting == setting
    assert works in str(caught.value)


def test_a_scalar_has_one_element():
    assert Parameter(name="scale", shape=()).count == 1


def test_gradients_that_cannot_be_compressed_stay_exact_whatever_a_rule_says():
    model = nn.ModuleDict(
        {
            "sparse": nn.Embedding(50, 64, sparse=True),
            "wide": nn.Linear(64, 64).double(),
            "plain": nn.Linear(64, 64),
        }
    )
    chosen = {
        each.parameter.name: each for each in select(described(model), "auto", [Rule(pattern=".", bits=4)])
    }
    assert {name for name, each in chosen.items() if each.bits == 4} == {"plain.weight", "plain.bias"}
    assert "sparse" in chosen["sparse.weight"].why
    assert "float64" in chosen["wide.weight"].why
