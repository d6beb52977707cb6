"""Measuring a chain: bytes against torch's own ledger, and nothing left changed behind."""

import copy

import pytest
import torch
from torch import nn

from plait import deferred
from plait.chain import Chain
from plait.compat import allocations
from plait.errors import UsageError
from plait.profile import Profile


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=100, n_positions=64, n_embd=64, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0
    )
    config.loss_type, config.use_cache = "ForCausalLM", False
    tokens = torch.randint(0, 100, (2, 64))
    return GPT2LMHeadModel(config), (), {"input_ids": tokens, "labels": tokens.clone()}


def resnet():
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], num_labels=10)
    return ResNetForImageClassification(config), (torch.randn(2, 3, 32, 32),), {}


@pytest.mark.parametrize("make", [gpt2, resnet])
def test_saved_bytes_are_what_is_alive_after_forward(make):
    model, args, kwargs = make()
    model.train()
    chain = Chain.trace(model, args, kwargs)
    profile = Profile.measure(chain, (8,), repetitions=1)
    args, kwargs = chain.example(8)
    with allocations() as ledger:
        output = model(*args, **kwargs)
    saved = 8 * sum(block.saved_bytes_per_sample for block in profile.blocks)
    assert saved == pytest.approx(sum(ledger), rel=0.1)
    del output


def small():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))


def test_measuring_changes_nothing():
    model = small()
    model[0].weight.grad = torch.ones(16, 8)
    chain = Chain.trace(model, torch.randn(4, 8))
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    generator, threads = torch.get_rng_state(), torch.get_num_threads()
    Profile.measure(chain, (2, 4), repetitions=2, threads=1)
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.get_num_threads() == threads
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(16, 8))
    assert model[4].weight.grad is None


def test_sizes_of_a_plain_network_are_exact():
    chain = Chain.trace(small(), torch.randn(4, 8))
    profile = Profile.measure(chain, (2, 4), repetitions=1, threads=1)
    first, last = profile.blocks
    assert first.parameter_bytes == 4 * (8 * 16 + 16 + 16 + 16)
    assert last.parameter_bytes == 4 * (16 * 4 + 4)
    assert last.optimizer_bytes == 2 * last.parameter_bytes + 4 * 2  # two moments, a step count a tensor
    assert (first.output_bytes_per_sample, last.output_bytes_per_sample) == (4 * 16, 4 * 4)
    assert profile.batch_sizes == (2, 4)
    assert profile.threads == 1
    assert all(
        row.forward > 0 and row.repetitions == 1 for b in profile.blocks for row in b.milliseconds.values()
    )


def test_the_optimizer_that_is_given_is_measured():
    chain = Chain.trace(small(), torch.randn(4, 8))
    profile = Profile.measure(
        chain, (2,), repetitions=1, optimizer=lambda parameters: torch.optim.SGD(parameters, momentum=0.9)
    )
    assert [b.optimizer_bytes for b in profile.blocks] == [b.parameter_bytes for b in profile.blocks]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.hidden(self.embed(tokens)))


def test_a_tied_weight_is_counted_once_and_named_in_both():
    chain = Chain.trace(Tied(), torch.randint(0, 10, (4, 5)))
    profile = Profile.measure(chain, (2,), repetitions=1)
    assert sum(b.parameter_bytes for b in profile.blocks) == 4 * (60 + 36 + 6)
    assert [b.tied for b in profile.blocks] == [("embed.weight",), (), ("embed.weight",)]


def test_a_model_that_does_not_exist_yet_is_measured_block_by_block():
    model = deferred.construct(small)
    chain = Chain.trace(model, torch.randn(4, 8))
    profile = Profile.measure(chain, (2,), repetitions=1)
    assert profile.device == "cpu"
    assert profile.blocks[0].milliseconds[2].forward > 0
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"batch_sizes": (0, 2)}, r"\[0, 2\]"), ({"batch_sizes": ()}, r"\[\]"), ({"repetitions": 0}, "0 times"),
     ({"threads": 0}, "0 threads")],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(changes, message):
    chain = Chain.trace(small(), torch.randn(4, 8))
    with pytest.raises(UsageError, match=message):
        Profile.measure(chain, **({"batch_sizes": (2,)} | changes))


def test_a_chain_without_an_example_cannot_be_measured():
    with pytest.raises(UsageError, match="no example inputs"):
        Profile.measure(Chain.of([nn.Linear(4, 4)]), (2,))
