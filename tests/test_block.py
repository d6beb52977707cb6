"""A block: a module of its own, with the model's names."""

import pytest
import torch
from torch import nn

from plait.chain import Chain
from plait.errors import UsageError

X = torch.randn(2, 8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.register_buffer("table", torch.ones(8), persistent=False)

    def forward(self, x):
        x = torch.relu(self.norm(self.a(x))) * self.table
        return self.b(x * torch.tensor([2.0]))


@pytest.fixture(scope="module")
def chain():
    return Chain.trace(Model(), X)


def test_a_block_is_a_module_with_the_models_names(chain):
    parts = [set(dict(block.named_parameters())) for block in chain]
    assert parts == [{"a.weight", "a.bias", "norm.weight", "norm.bias"}, {"b.weight", "b.bias"}]
    assert dict(chain[0].named_parameters())["a.weight"] is chain.model.a.weight
    assert chain[0].state("norm.running_mean") is chain.model.norm.running_mean


def test_its_state_dict_is_a_part_of_the_models(chain):
    whole = chain.state_dict()
    parts = {name: tensor for block in chain for name, tensor in block.state_dict().items()}
    assert set(parts) == set(whole), "neither constants nor what the model does not save"
    assert all(tensor.data_ptr() == whole[name].data_ptr() for name, tensor in parts.items())


def test_what_it_reads_and_writes_is_printed(chain):
    assert chain[0].extra_repr() == "a: input:0 -> a"


def test_called_with_too_few_values(chain):
    with pytest.raises(UsageError, match="block 'a' takes 1 values, and got 0"):
        chain[0]()


def test_parameters_may_come_from_outside(chain):
    block = chain[1]
    state = {name: torch.zeros_like(block.state(name)) for name in block.state_names}
    (found,) = block.call([X], state)
    assert torch.equal(found, torch.zeros(2, 4))
    assert chain.model.b.weight.abs().sum() > 0


def test_a_module_block_takes_parameters_and_buffers_from_outside():
    chain = Chain.of([nn.BatchNorm1d(8)], X).eval()
    block = chain[0]
    state = {name: torch.full_like(block.state(name), 4) for name in block.state_names}
    (found,) = block.call([X], state)
    assert torch.allclose(found, (X - 4) / 2 * 4 + 4, atol=1e-4)
    assert torch.equal(chain.model[0].running_mean, torch.zeros(8))


def test_blocks_switch_modes_one_by_one(chain):
    before = chain.model.norm.num_batches_tracked.clone()
    chain[0].eval()
    chain[0](X)
    assert chain.model.norm.num_batches_tracked == before
    chain[0].train()
    chain[0](X)
    assert chain.model.norm.num_batches_tracked == before + 1


def test_a_block_can_be_run_again_from_the_same_values():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))
    chain = Chain.of(list(model), X)
    (value,) = chain[0](X)
    before = value.clone()
    first, again = chain[1](value)[0], chain[1](value)[0]
    assert torch.equal(value, before)
    assert torch.equal(first, again)
