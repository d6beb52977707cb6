"""FSDP2 among real processes: against torch's own to the last bit, and against the description."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard

from plait import Timeline, native
from plait.compress.adapt import Adaptation, Log
from plait.compress.codec import Quantizer
from plait.compress.compression import Compression
from plait.compress.exchange import PARTIAL
from plait.compress.rounding import stream_key
from plait.compress.rules import Rule
from plait.compress.sharded import attach_fsdp
from plait.compress.sparse import TopK
from plait.errors import FileError, UsageError, WorkerError

LOSSY = {"embed.weight", "head.weight"} | {
    f"blocks.{i}.{name}.weight" for i in range(2) for name in ("up", "down")
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(48)
        self.up = nn.Linear(48, 51)  # 51 rows: parts are filled up
        self.down = nn.Linear(51, 48)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(67, 48)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(48, 67, bias=False)
        self.expert = nn.Linear(48, 48)

    def forward(self, tokens, expert=False, depth=2):
        x = self.embed(tokens)
        for block in self.blocks[:depth]:
            x = block(x)
        return self.head(self.expert(x) if expert else x)


def sharded(model=None, *, root=True, **options):
    model = model or Net()
    for block in model.blocks:
        fully_shard(block, **options)
    if root:
        fully_shard(model, **options)
    return model


def compressed(model, **fields):
    return attach_fsdp(model, Compression(**{"decline": False, "bucket": 1024, **fields}))


def batch(step=0, rank=None):
    generator = torch.Generator().manual_seed(1000 * step + (dist.get_rank() if rank is None else rank))
    return torch.randint(67, (2, 17), generator=generator)


def backward(model, step=0, rank=None, **options):
    tokens = batch(step, rank)
    logits = model(tokens[:, :-1], **options).float()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.item()


def gradients(model):
    """The whole gradients, taken out of the model."""
    found = {
        name: each.grad.full_tensor() for name, each in model.named_parameters() if each.grad is not None
    }
    model.zero_grad()
    return found


def reference(rank, **options):
    """A rank's own gradients, from a model that is in one piece."""
    model = Net()
    backward(model, rank=rank, **options)
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def checksums(tensors):
    return {name: native.checksum(each.detach().contiguous().float()) for name, each in tensors.items()}


def same(outcomes):
    return all(outcome == outcomes[0] for outcome in outcomes)


def parts(tensor, world):
    """The parts of workers, filled up with zeros, as torch cuts them."""
    rows = -(-len(tensor) // world)
    filled = torch.zeros(rows * world, *tensor.shape[1:])
    filled[: len(tensor)] = tensor
    return [filled[i * rows : (i + 1) * rows].flatten() for i in range(world)]


def through(codec, values, key=0):
    payload = torch.empty(codec.payload_bytes(len(values)), dtype=torch.uint8)
    codec.compress(values, payload, key=key)
    decoded = torch.empty_like(values)
    codec.extract(payload, decoded)
    return decoded


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
