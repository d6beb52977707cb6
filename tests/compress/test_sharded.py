"""Compression attached to FSDP2: what a training script may do with it, and what is refused."""

import pytest
import torch
import torch.distributed as dist
from fsdp_net import (
    LOSSY,
    Net,
    backward,
    checksums,
    compressed,
    gradients,
    parts,
    reference,
    same,
    sharded,
    through,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard

from plait import Timeline
from plait.compress.adapt import Adaptation, Log
from plait.compress.compression import Compression
from plait.compress.rules import Rule
from plait.compress.sharded import attach_fsdp
from plait.compress.sparse import TopK
from plait.errors import FileError, UsageError, WorkerError

# What a training script may do.


def accumulated():
    narrow = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for factor, policy in ((None, narrow), (3.0, MixedPrecisionPolicy())):
        stock, ours = sharded(mp_policy=policy), sharded(mp_policy=policy)
        compressed(ours, bits=32)
        if factor is not None:
            for module in (ours, *ours.blocks):
                module.set_gradient_divide_factor(factor)
        for model in (stock, ours):
            model.set_requires_gradient_sync(False)
            backward(model, 0, expert=True)
            model.set_requires_gradient_sync(True)
            backward(model, 1)
            backward(model, 2)
        scale = 1.0 if factor is None else dist.get_world_size() / factor
        wanted, got = gradients(stock), gradients(ours)
        assert "expert.weight" in wanted
        for name in wanted:
            assert torch.allclose(wanted[name] * scale, got[name], rtol=1e-6, atol=1e-8), (factor, name)


def test_accumulation_and_a_divisor_of_the_user_s(ranks):
    ranks(2, accumulated)


def conditional():
    """Only one rank uses the expert; the other sends zeros."""
    stock, ours = sharded(), sharded()
    attachment = compressed(ours, bits=32)
    for model in (stock, ours):
        model.set_reduce_scatter_unused_params(True)
        backward(model, expert=dist.get_rank() == 0)
    wanted, got = gradients(stock), gradients(ours)
    assert got["expert.weight"].abs().max() > 0
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)
    assert attachment.report().scatter.operations == 3


def test_parameters_that_not_all_ranks_use(ranks):
    ranks(2, conditional)


def partly():
    """Modules that are sharded together, frozen parameters among them, in a model that is not sharded."""
    model, other = Net(), Net()
    for each in (model, other):
        each.blocks[0].up.weight.requires_grad_(False)
        each.blocks = nn.Sequential(*each.blocks)
        fully_shard([each.blocks[0], each.blocks[1]])
        fully_shard(each.blocks)
    attachment = compressed(model, bits=32, gather_bits=32)
    assert "head.weight" not in attachment.bits
    assert "blocks.0.up.weight" not in attachment.bits
    assert attachment.gather_bits["blocks.0.up.weight"] == 32
    for each in (model, other):
        x = torch.randn(2, 48, generator=torch.Generator().manual_seed(dist.get_rank()))
        each.blocks(x).square().sum().backward()
    for name, parameter in other.blocks.named_parameters():
        got = dict(model.blocks.named_parameters())[name].grad
        assert (got is None) == (parameter.grad is None)
        assert got is None or torch.equal(got.full_tensor(), parameter.grad.full_tensor())
    assert attachment.report().scatter.operations == 1
    # What is trained only later on is exact.
    model.blocks[0].up.weight.requires_grad_()
    model.blocks(x).square().sum().backward()
    assert model.blocks[0].up.weight.grad is not None
    assert attachment.report().scatter.operations == 2


def test_modules_sharded_together_and_frozen_parameters(ranks):
    ranks(2, partly)


def detached():
    stock, ours = sharded(), sharded()
    before = [module._get_fsdp_state()._fsdp_param_groups[0]._reduce_scatter_comm for module in ours.blocks]
    timeline = Timeline()
    attachment = attach_fsdp(ours, Compression(bits=4, gather_bits=8, decline=False), timeline)
    backward(ours)
    gradients(ours)
    with pytest.raises(UsageError, match=r"compressed already.*detach\(\) it first"):
        compressed(ours)
    attachment.detach()
    after = [module._get_fsdp_state()._fsdp_param_groups[0]._reduce_scatter_comm for module in ours.blocks]
    assert before == after
    sent, recorded = attachment.report().scatter.operations, len(timeline.spans)
    assert recorded > 0
    assert backward(ours) == backward(stock)
    for (name, wanted), got in zip(gradients(stock).items(), gradients(ours).values(), strict=True):
        assert torch.equal(wanted, got), name
    assert attachment.report().scatter.operations == sent
    again = compressed(ours, bits=4)
    attachment.detach()  # once more changes nothing
    attachment.load_state_dict(attachment.state_dict())
    backward(ours)
    assert again.report().scatter.operations == 3
    assert len(timeline.spans) == recorded  # which is not for others


def test_detach_gives_the_model_back(ranks):
    ranks(2, detached)


def train(model, optimizer, steps):
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def resumed():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def start():
        model = sharded(mesh=mesh)
        return model, torch.optim.SGD(model.parameters(), 0.1), compressed(model, bits=4, gather_bits=8)

    model, optimizer, _ = start()
    train(model, optimizer, range(4))
    first, optimizer, attachment = start()
    train(first, optimizer, range(2))
    saved, weights = attachment.state_dict(), first.state_dict()
    finals = [model]
    for state in (saved, None):
        again, optimizer, attachment = start()
        again.load_state_dict(weights)
        if state is not None:
            attachment.load_state_dict(state)
        train(again, optimizer, (2, 3))
        finals.append(again)
    straight, resumed, careless = (
        {name: each.full_tensor() for name, each in each.named_parameters()} for each in finals
    )
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert not torch.equal(straight["head.weight"], careless["head.weight"])
    return checksums(straight)


def test_a_resumed_run_is_the_same_to_the_last_bit(ranks):
    assert same(ranks(4, resumed))


def declined():
    """Whatever is measured: all ranks leave the same to torch, and say so."""
    model, stock = sharded(), sharded()
    attachment = compressed(model, bits=4, gather_bits=8, decline=True)
    backward(model)
    backward(stock)
    report = attachment.report()
    assert set(report.declined) <= {4, 8}
    assert (report.scatter.operations == 0) == (4 in report.declined)
    assert (report.gather.operations == 0) == (8 in report.declined)
    assert report.bits["head.weight"] == (32 if 4 in report.declined else 4)
    assert report.gather_bits.get("head.weight") == (None if 8 in report.declined else 8)
    # The decision is a part of the state.
    state = attachment.state_dict()
    for group in state["groups"].values():
        group["declined"] = {"scatter": [4], "gather": [8]}
    unmoved = compressed(sharded(), bits=4, gather_bits=8)
    unmoved.load_state_dict(state)
    assert not unmoved.declined  # who does not want it does not get it
    attachment.load_state_dict(state)
    gradients(model), gradients(stock)
    assert backward(model) == backward(stock)
    wanted, got = gradients(stock), gradients(model)
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)
    assert str(attachment).endswith("uncompressed: uncompressed is faster on this network")
    return report.declined


def test_what_is_not_worth_it_is_left_to_torch(ranks):
    assert same(ranks(2, declined))


# What cannot be used is refused before anything is sent.


def refused():
    for fields, message in (
        ({"bits": "auto"}, r'bits="auto".*works: bits=4'),
        ({"rules": [Rule(pattern="up", bits="auto")]}, r'bits="auto".*works: bits=4'),
        ({"replay": Log()}, r"schedule of bits.*works: replay=None"),
        ({"error_feedback": True}, r"whole gradient.*works: error_feedback=False"),
        ({"codec": TopK()}, r"TopK.*no error feedback.*setting: codec.*error_feedback=False"),
        ({"bits": 3}, r"3 bits.*setting: bits.*bits=4, or error_feedback=False"),
        ({"rules": [Rule(pattern="up", bits=2)]}, r"2 bits.*setting: rules, pattern 'up'"),
        ({"gather_bits": "auto"}, r"setting: gather_bits.*works: 1 to 8, 16, 32"),
        ({"gather_bits": 9}, r"gather_bits is 9.*1 to 8"),
        ({"rules": [Rule(pattern="nowhere", bits=8)]}, r"no parameter fits.*nowhere"),
    ):
        with pytest.raises(UsageError, match=message):
            compressed(sharded(), **fields)
    with pytest.raises(UsageError, match=r"no module of the Net is sharded.*fully_shard"):
        compressed(Net())
    with pytest.raises(UsageError, match=r"torch.float64.*works: torch.float32"):
        compressed(sharded(Net().double()))
    together = Net()
    fully_shard([together.blocks[0], together.blocks[1]])
    with pytest.raises(UsageError, match=r"'weight' of a LayerNorm.*works: the model that holds both"):
        compressed(together.blocks[0])
    alone = sharded()
    attachment = compressed(alone, bits=2, error_feedback=False, gather_bits=8)
    backward(alone)
    assert attachment.report().scatter.operations == 0  # one rank sends nothing
    good = attachment.state_dict()
    other = {name: {"step": 9, "declined": {}} for name in good["groups"]}
    for state, message in (
        ({**good, "format": "x"}, "format 'x'"),
        ({**good, "groups": {"": good["groups"][""]}}, r"only the model has a sharded module 'blocks.0'"),
        ({**good, "groups": {**good["groups"], "x": {}}}, r"only the state has a sharded module 'x'"),
        ({**good, "groups": {**good["groups"], "": {"step": -1, "declined": {}}}}, r"step of ''"),
        ({**good, "groups": {**good["groups"], "": {"step": 5}}}, "no 'declined'"),
        ({**good, "groups": {**good["groups"], "": {"declined": {}}}}, "no 'step'"),
        ({**good, "groups": {**good["groups"], "": 5}}, "no 'step'"),
        ({**good, "groups": {**other, "": {"step": 5, "declined": {"scatter": 4}}}}, "4 bits declined"),
        ({**good, "groups": {**other, "": {"step": 5, "declined": {"scatter": [99]}}}}, "99.*declined"),
        ({**good, "groups": {**other, "": {"step": 5, "declined": {"x": [4]}}}}, "declined for 'x'"),
        ({**good, "groups": 5}, "groups is 5"),
        ({"format": good["format"]}, "no 'groups'"),
        (None, "format 'NoneType'"),
    ):
        with pytest.raises((UsageError, FileError), match=message):
            attachment.load_state_dict(state)
        assert attachment.state_dict() == good  # nothing is half loaded
    with pytest.raises(UsageError, match=r"compression is '4'.*works: Compression\(bits=4\)"):
        attach_fsdp(alone, "4")


def test_bad_inputs(ranks):
    ranks(1, refused)


def on_two_meshes():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("many", "one"))
    infos = [FSDPMeshInfo(mesh[name], shard_mesh_dim=0) for name in ("many", "one")]
    module = nn.Linear(8, 8)
    fully_shard(
        module,
        mesh=mesh["many"],
        shard_placement_fn=lambda each: ShardPlacementResult(Shard(0), infos[each.ndim - 1]),
    )
    with pytest.raises(UsageError, match=r"parameters on 2 meshes.*setting: shard_placement_fn"):
        compressed(module)


def test_parameters_on_several_meshes_in_one_module(ranks):
    ranks(2, on_two_meshes)


def few_bits():
    model = sharded()
    adaptation = Adaptation(warmup_steps=0)
    attachment = compressed(model, bits=2, error_feedback=False, adaptation=adaptation)
    assert attachment.bits["head.weight"] == 2
    backward(model)
    assert attachment.report().scatter.ratio > 6
    assert attachment.memory_bytes == attachment.report().memory_bytes > 0
    report = attachment.report()
    assert report.steps == 1
    assert report.exposed_s > 0
    assert report.errors.keys() == LOSSY
    assert all(0 < error < 2 for error in report.errors.values())
    assert str(attachment).startswith("plait compresses gradients of 7 of 16 parameters")
    assert attachment.report().to_json()["scatter"]["operations"] == 3


def sparse():
    """Any codec will do: what a rank has itself of its part arrives whole, and of the others' the largest."""
    model = sharded()
    attachment = compressed(model, codec=TopK(), error_feedback=False)
    backward(model)
    gradient = gradients(model)["head.weight"]
    local = [reference(rank)["head.weight"] for rank in range(2)]
    wanted = [(parts(local[i], 2)[i] + through(TopK(), parts(local[1 - i], 2)[i])) / 2 for i in range(2)]
    assert torch.equal(gradient.flatten(), torch.cat(wanted)[: gradient.numel()])
    assert attachment.report().errors == {}


def test_other_codecs(ranks):
    ranks(2, sparse)


def test_few_bits_without_error_feedback_if_asked_for(ranks):
    ranks(2, few_bits)


def disagreeing(shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    with pytest.raises(WorkerError) as caught:
        compressed(sharded(mesh=mesh), bits=8 if dist.get_rank() == 1 else 4)
    return str(caught.value)


def test_every_rank_hears_of_a_disagreement(ranks):
    errors = ranks(4, disagreeing, (2, 2))
    assert all("rank 1 has bits 8 and rank 0 has 4" in errors[rank] for rank in (0, 1, 2)), errors
    assert "rank 3 has bits 4 and rank 1 has 8" in errors[3]
