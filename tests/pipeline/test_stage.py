"""Stages cut from traced models: values that skip stages, tied weights, GPT-2."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import plait
from plait import deferred
from plait.cluster import Cluster
from plait.errors import UsageError, WorkerError
from plait.pipeline import ScheduleKFKB, orders, stages
from plait.profile import BlockProfile, Profile, Times


class Skipping(nn.Module):
    """As a U-Net: the last layer reads what the first gave; all read a mask; three share a weight."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.last = nn.Linear(12, 6)
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x, mask):
        first = x = torch.tanh(self.layers[0](x)) * self.scale
        for i, layer in enumerate(self.layers[1:]):
            x = torch.tanh(layer(x)) * mask
            if i in (1, 2):
                x = x * self.scale
        x = self.last(torch.cat([x, first], dim=-1))
        return {"y": x, "mean": x.mean()}


def skipping():
    torch.manual_seed(0)
    return Skipping().double()


def squared(output, target):
    return (output["y"] - target).square().mean()


def data(rows):
    generator = torch.Generator().manual_seed(rows)
    x, y = (torch.randn(rows, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    return (x, (torch.rand(rows, 6, generator=generator) > 0.3).double()), y


def differences(module, model):
    """How far a stage's gradients are from the whole model's, under the same names."""
    whole = dict(model.named_parameters())
    found = {name: (p.grad - whole[name].grad).abs().max().item() for name, p in module.named_parameters()}
    assert found
    return found


def of_a_traced_model(cuts):
    inputs, target = data(10)
    model = skipping()
    squared(model(*inputs), target).backward()
    cut = stages(plait.Chain.trace(skipping(), inputs), cuts=cuts)
    stage = cut.stage()
    schedule = ScheduleKFKB(stage, 4, squared)
    rank, found = dist.get_rank(), []
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    for order in (orders.kfkb(len(cut), 4, 2), orders.work_conserving(len(cut), 4, 2)):
        optimizer.zero_grad()
        schedule.change(order=order)
        output = schedule.step(
            *(inputs if rank == 0 else ()), **({"target": target} if stage.is_last else {})
        )
        found.append(differences(stage.submod, model))
    if stage.is_last:
        torch.testing.assert_close(output["y"], model(*inputs)["y"], rtol=0, atol=1e-12)
        assert output["mean"].shape == (4,)
    optimizer.step()
    scale = dict(stage.submod.named_parameters()).get("scale")
    return found, None if scale is None else scale.detach()


@pytest.mark.parametrize("cuts", [[1, 3], [1, 2, 3]])
def test_values_skip_stages_and_tied_weights_stay_equal(ranks, cuts):
    results = ranks(len(cuts) + 1, of_a_traced_model, cuts)
    for found, _ in results:
        assert max(value for each in found for value in each.values()) < 1e-10, found
    held = [scale for _, scale in results if scale is not None]
    assert len(held) >= 2
    assert all(torch.equal(scale, held[0]) for scale in held)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=3, n_head=2, n_embd=16, vocab_size=50, n_positions=12,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def tokens(rows):
    return torch.randint(0, 50, (rows, 12), generator=torch.Generator().manual_seed(rows))


def by_size(chain):
    """A profile in which time follows the number of weights: the same on every rank."""
    sizes = [sum(p.numel() for p in block.parameters()) for block in chain]
    times = [{1: Times(forward=size / 1e3, backward=size / 500)} for size in sizes]
    blocks = [
        BlockProfile(name=b.name, parameter_bytes=8 * n, output_bytes_per_sample=8, milliseconds=ms)
        for b, n, ms in zip(chain, sizes, times, strict=True)
    ]
    return Profile(blocks=tuple(blocks))


def of_gpt2():
    ids = tokens(6)
    model = deferred.build(gpt2, seed=5).double()
    model(input_ids=ids, labels=ids).loss.backward()
    example = {"input_ids": ids[:2], "labels": ids[:2]}
    chain = plait.Chain.trace(deferred.build(gpt2, seed=5).double(), example)
    cut = stages(chain, by_size(chain), dist.get_world_size())
    stage = cut.stage()
    schedule = ScheduleKFKB(stage, 3, lambda output, target: output.loss)
    found = []
    for change in ({"k": 1}, {"k": 3}, {"n_microbatches": 4, "k": 2}):
        schedule.change(**change)
        stage.submod.zero_grad()
        given = {"input_ids": ids, "labels": ids} if stage.is_first else {}
        output = schedule.step(**given, **({"target": ids} if stage.is_last else {}))
        found.append(differences(stage.submod, model))
    names = [name for name, _ in stage.submod.named_parameters()]
    assert (output is not None) == stage.is_last
    return max(value for each in found for value in each.values()), names


def test_gpt2_with_its_tied_embedding(ranks):
    first, last = ranks(2, of_gpt2)
    assert max(first[0], last[0]) < 1e-10
    assert "transformer.wte.weight" in first[1]
    assert "transformer.wte.weight" in last[1]


def test_stages_say_what_they_are():
    inputs, _ = data(4)
    model = skipping()
    cut = stages(plait.Chain.trace(model, inputs), cuts=[1, 3])
    assert len(cut) == 3
    assert [list(cut.blocks(place)) for place in range(3)] == [[0], [1, 2], [3]]
    names = [set(stage.state_dict()) for stage in cut]
    assert set.union(*names) == set(model.state_dict())
    values = inputs
    for stage in cut:
        values = stage(*values)
    assert torch.equal(values["y"], model(*inputs)["y"])
    assert cut[1].eval().training is False
    with pytest.raises(UsageError, match=r"do not rise from 1 to 3 \(setting: cuts\); works: cuts=\[2\]"):
        stages(plait.Chain.trace(skipping(), inputs), cuts=[9])
    chain = plait.Chain.trace(skipping(), inputs)
    assert stages(chain, by_size(chain), 2).cuts == (2,)
    with pytest.raises(UsageError, match="neither a profile"):
        stages(chain)
    with pytest.raises(UsageError, match=r"cuts before blocks \[2\] make 2 stages, not 3"):
        stages(chain, n=3, cuts=[2])
    with pytest.raises(UsageError, match="cuts is 2"):
        stages(chain, cuts=2)
    with pytest.raises(UsageError, match="the model is a Sequential, not yet a chain"):
        stages(nn.Sequential(), cuts=[1])
    devices = Cluster.uniform(hosts=2, memory="1GiB", bandwidth="1gbit")
    assert stages(chain, by_size(chain), 2, cluster=devices).cuts == (2,)
    with pytest.raises(UsageError, match="3 devices were asked of a cluster of 2"):
        stages(chain, by_size(chain), 3, cluster=devices)
    with pytest.raises(UsageError, match="the profile has 2 blocks and the chain 4"):
        stages(chain, Profile(blocks=by_size(chain).blocks[:2]), 2)


def cut_differently():
    chain = plait.Chain.of([nn.Linear(4, 4) for _ in range(4)])
    with pytest.raises(WorkerError) as apart:
        stages(chain, cuts=[1 + dist.get_rank()]).stage()
    with pytest.raises(UsageError) as too_many:
        stages(chain, cuts=[1, 2]).stage()
    return str(apart.value), str(too_many.value)


def test_ranks_must_cut_alike_and_have_a_stage_each(ranks):
    for apart, too_many in ranks(2, cut_differently):
        assert "rank 1 has cut before blocks (2,), and rank 0 before (1,)" in apart
        assert "3 stages for 2 ranks (setting: n); works: 2" in too_many
