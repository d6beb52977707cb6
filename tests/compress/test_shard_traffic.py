"""What FSDP2 sends, among real processes: torch's own to the last bit, or what the description says."""

import itertools

import pytest
import torch
import torch.distributed as dist
from fsdp_net import (
    LOSSY,
    Net,
    backward,
    batch,
    checksums,
    compressed,
    gradients,
    parts,
    reference,
    same,
    sharded,
    through,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from plait.compress.codec import Quantizer
from plait.compress.exchange import PARTIAL
from plait.compress.rounding import stream_key
from plait.compress.rules import Rule

# Exact, it is torch's own.


def exact():
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        stock, ours = sharded(mp_policy=policy), sharded(mp_policy=policy)
        attachment = compressed(ours, bits=32, gather_bits=32)
        for step, options in enumerate(({"depth": 1}, {"expert": True})):
            assert backward(stock, step, **options) == backward(ours, step, **options)
            wanted, got = gradients(stock), gradients(ours)
            assert wanted.keys() == got.keys()
            for name in wanted:
                assert torch.equal(wanted[name], got[name]), name
        report = attachment.report()
        assert report.scatter.operations == 5  # one block and the root, then two and the root
        assert report.gather.operations >= 5
        assert set(report.bits.values()) == {32}
        # Numbers of 16 bits are sent in 16; pieces start at multiples of some bytes, hence "about".
        assert report.scatter.ratio == pytest.approx(1, rel=0.05)
        assert report.gather.ratio == pytest.approx(1 if policy.param_dtype is None else 2, rel=0.05)


def test_32_bits_are_torch_s_own_to_the_last_bit(ranks):
    ranks(2, exact)


# Compressed, it is what the description says, to the last bit.


def expected(name, owner, local, codec):
    """A part of the mean gradient: the owner's share of it exactly, and the others' through the codec."""
    world = len(local)
    total = parts(local[owner][name], world)[owner].clone()
    for rank in (i for i in range(world) if i != owner):
        sent = parts(local[rank][name], world)[owner]
        parameter = f"{name}[{owner}] of replica 0"
        key = stream_key(seed=7, step=0, rank=rank, phase=PARTIAL, parameter=parameter)
        total += sent if codec is None else through(codec, sent, key)
    return total / world


def described():
    world = dist.get_world_size()
    results = {}
    for bits, expert in ((4, False), (8, True)):
        model = sharded()
        attachment = compressed(model, bits=bits, seed=7)
        assert {name for name, each in attachment.bits.items() if each < 32} == LOSSY | {"expert.weight"}
        local = [reference(rank, expert=expert) for rank in range(world)]
        backward(model, expert=expert)
        got = gradients(model)
        assert got.keys() == local[0].keys()
        for name, gradient in got.items():
            codec = Quantizer(bits=bits) if attachment.bits[name] < 32 else None
            wanted = torch.cat([expected(name, owner, local, codec) for owner in range(world)])
            assert torch.equal(gradient.flatten(), wanted[: gradient.numel()]), name
        assert attachment.report().scatter.ratio > (5 if bits == 4 else 3)
        results |= {(bits, name): total for name, total in checksums(got).items()}
    return results


def test_gradients_agree_with_the_description_to_the_last_bit(ranks):
    assert same(ranks(2, described))


def bounded():
    """Every element within the codec's bound of the exact mean; norms and biases as exact as ever."""
    world = dist.get_world_size()
    local = [reference(i) for i in range(world)]
    results = {}
    for bits, dtype in itertools.product((4, 8), (torch.float32, torch.float16, torch.bfloat16)):
        model = sharded(mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        attachment = compressed(model, bits=bits)
        backward(model)
        got = gradients(model)
        # Numbers of 16 bits are rounded before they are sent, and so is the sum.
        rounding = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
        for name, gradient in got.items():
            mean = sum(each[name] for each in local) / world
            largest = max(each[name].abs().max().item() for each in local)
            unit = 2 * largest / (2**bits - 1) if attachment.bits[name] < 32 else 0.0
            error = (gradient - mean).abs().max().item()
            # fp16 has no small numbers: what is below its least, 2^-24, is lost.
            assert error <= 1.01 * unit + 2 * rounding * largest + 2**-23, (bits, dtype, name, error)
            assert unit == 0 or error > 0
        results |= {(bits, dtype, name): total for name, total in checksums(got).items()}
    return results


def test_the_error_is_bounded_in_every_dtype_and_all_have_the_same(ranks):
    assert same(ranks(3, bounded))


# Weights.


def gathered():
    world = dist.get_world_size()
    whole = dict(Net().named_parameters())
    for asynchronous, dtype in ((False, None), (True, None), (False, torch.bfloat16)):
        model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
        rules = [Rule(name="blocks.1.up.weight", bits=32), Rule(name="head.weight", bits=5)]
        attachment = compressed(model, bits=4, gather_bits=8, rules=rules)
        seen = {"forward": {}, "backward": {}}

        def see(when, name, module, seen=seen):
            seen[when] |= {f"{name}.{own}": p.detach().clone() for own, p in module.named_parameters()}

        for name, block in model.named_children():
            if name != "blocks":
                block.register_forward_hook(lambda m, i, o, n=name: see("forward", n, m))
                block.register_full_backward_hook(lambda m, i, o, n=name: see("backward", n, m))
        for i, block in enumerate(model.blocks):
            for inner in ("norm", "up", "down"):
                module, path = getattr(block, inner), f"blocks.{i}.{inner}"
                module.register_forward_hook(lambda m, i, o, n=path: see("forward", n, m))
                module.register_full_backward_hook(lambda m, i, o, n=path: see("backward", n, m))
        if asynchronous:
            handle = model.unshard(async_op=True)
            handle.wait()
            model.blocks[1].unshard(async_op=True)
        backward(model, expert=True)
        assert seen["forward"].keys() == whole.keys()
        assert seen["backward"].keys() >= LOSSY - {"embed.weight"}
        for name, weight in whole.items():
            weight = weight.detach().to(dtype or torch.float32)
            lossy = name in LOSSY | {"expert.weight"} and name != "blocks.1.up.weight"
            assert attachment.gather_bits[name] == (8 if lossy else 32)
            if lossy:
                codec = Quantizer(bits=8, stochastic=False)
                pieces = [through(codec, part) for part in parts(weight.float(), world)]
                weight = torch.cat(pieces)[: weight.numel()].view_as(weight).to(weight.dtype)
            assert torch.equal(seen["forward"][name], weight), name
            if name in seen["backward"]:
                assert torch.equal(seen["backward"][name], weight), name
        with torch.inference_mode():
            model.eval()
            model(batch()[:, :-1])
        model.reshard()
        # What the optimizer works on is as it was.
        for name, weight in model.named_parameters():
            assert torch.equal(weight.full_tensor(), whole[name]), name
        assert attachment.report().gather.ratio > 2  # one layer is exact


def test_weights_in_8_bits_are_the_same_in_forward_and_backward_and_everywhere(ranks):
    ranks(3, gathered)


def resharded():
    model = Net()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=2)
    fully_shard(model)
    compressed(model, bits=32, gather_bits=8)
    before = {}
    up = model.blocks[0].up
    up.register_forward_hook(lambda module, inputs, output: before.update(forward=module.weight.clone()))
    up.register_full_backward_hook(
        lambda module, inputs, output: before.update(backward=module.weight.clone())
    )
    backward(model)
    assert torch.equal(before["forward"], before["backward"])
    assert not torch.equal(before["forward"], Net().blocks[0].up.weight)
    return checksums(before)


def test_weights_that_are_sharded_otherwise_after_the_forward_pass_are_rounded_once(ranks):
    assert same(ranks(4, resharded))


# Hybrid sharding.


def hybrid(shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    world = dist.get_world_size()
    local = [reference(i) for i in range(world)]
    stock, ours = sharded(mesh=mesh), sharded(mesh=mesh)
    attachment = compressed(ours, bits=32)
    for step in range(2):
        # Accumulated over micro-batches, the first of which replicas keep to themselves.
        for model in (stock, ours):
            model.set_requires_all_reduce(False)
            backward(model, 2 * step)
            model.set_requires_all_reduce(True)
            backward(model, 2 * step + 1)
        for (name, wanted), got in zip(gradients(stock).items(), gradients(ours).values(), strict=True):
            assert torch.allclose(wanted, got, rtol=1e-6, atol=1e-7), name
    assert attachment.report().reduce.operations == 6
    results = {}
    for bits, dtype in ((4, torch.float32), (8, torch.float16)):
        model = sharded(mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        attachment = compressed(model, bits=bits)
        backward(model)
        got = gradients(model)
        for name, gradient in got.items():
            mean = sum(each[name] for each in local) / world
            largest = max(each[name].abs().max().item() for each in local)
            # A rounding on the way to the part's holder, to the adder among replicas, and back.
            unit = 2 * largest / (2**bits - 1) if attachment.bits[name] < 32 else 0.0
            error = (gradient - mean).abs().max().item()
            assert error <= 4 * unit + 2**-9 * largest + 2**-22, (bits, name, error, unit)
            assert unit == 0 or error > 0
        report = attachment.report()
        assert report.reduce.operations == 3
        assert report.reduce.ratio > (5 if bits == 4 else 3)
        assert report.scatter.operations == (3 if shape[1] > 1 else 0)
        results |= {(bits, name): total for name, total in checksums(got).items()}
    # Sharers on one host may do without compression, and replicas on other hosts not.
    before = attachment.report()
    for traffic in attachment._traffics:
        traffic.declined = {"scatter": frozenset([8])}
        traffic.install()
    assert attachment.bits["head.weight"] == 8
    backward(model)
    report, again = attachment.report(), gradients(model)
    assert report.scatter.operations == before.scatter.operations
    assert (report.reduce.operations, report.steps) == (before.reduce.operations + 3, before.steps + 1)
    assert not torch.equal(again["head.weight"], got["head.weight"])
    assert torch.allclose(again["head.weight"], got["head.weight"], atol=0.02)
    attachment.detach()
    sent = attachment.report().total.operations
    stock = sharded(mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
    backward(model), backward(stock)
    assert attachment.report().total.operations == sent
    for (name, wanted), got in zip(gradients(stock).items(), gradients(model).values(), strict=True):
        assert torch.equal(wanted, got), name
    return results


@pytest.mark.parametrize("shape", [(2, 2), (2, 1)])
def test_hybrid_sharding(ranks, shape):
    assert same(ranks(shape[0] * shape[1], hybrid, shape))


def independent():
    """Replicas with the same gradients: errors that were the same too would not average out."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ours, stock = sharded(mesh=mesh), sharded(mesh=mesh)
    compressed(ours, bits=4)
    for model in (ours, stock):
        model.set_requires_all_reduce(False)
    errors = []
    for model in (ours, stock):
        backward(model, rank=dist.get_rank() % 2)
        group = model._get_fsdp_state()._fsdp_param_groups[0]
        errors.append(group._partial_reduce_output.clone())
    return errors[0] - errors[1]


def test_replicas_round_independently(ranks):
    errors = ranks(4, independent)
    for part in (0, 1):
        one, other = errors[part], errors[part + 2]
        assert one.abs().max() > 0
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 0.1
