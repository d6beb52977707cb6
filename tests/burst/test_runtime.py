"""Gradients are those of one device, whatever the plan; so are weights after any change of plans."""

import copy
import random
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from plait import Chain, Timeline, losses
from plait.burst import BurstParallel, BurstPlan
from plait.compress.collectives import CompressedCollective
from plait.data import share
from plait.errors import UsageError

CLOSE = 1e-10


def dense():
    torch.manual_seed(0)
    widths = [6, 8, 8, 8, 5]
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


class Residual(nn.Module):
    """A value that skips blocks, one that all rows share, and a parameter that is used three times."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.bias = nn.Parameter(torch.randn(6))
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        table = (self.bias * 2).tanh()
        a = self.first(x) + table
        b = self.second(a.tanh()) + self.bias
        c = self.third(b.tanh()) * table
        return (a + c) @ self.first.weight


def residual():
    torch.manual_seed(0)
    return Residual().double()


def images():
    torch.manual_seed(0)
    return nn.Sequential(
        # No bias before BatchNorm: its gradient is zero but for rounding, of which Adam makes a step.
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 5),
    ).double()  # fmt: skip


def plan_of(chain, widths, rows):
    return BurstPlan.of([block.name for block in chain], widths, batch=rows)


def random_widths(chain, rows, seed):
    draw = random.Random(seed)
    return [draw.randint(1, min(dist.get_world_size(), rows)) for _ in chain]


def batch_of(rows, shape=(6,), seed=0):
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (rows,), generator=draw)
    labels[1::4] = losses.IGNORED  # so that ranks weigh differently
    return torch.randn(rows, *shape, dtype=torch.float64, generator=draw), labels


def gradients_of(model, batch):
    loss = losses.cross_entropy(model(batch[0]), batch)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def off(found, expected):
    """How far two gradients, or states, are apart; infinite where one has none."""
    if found is None or expected is None:
        return 0.0 if found is expected else float("inf")
    return float((found - expected).detach().abs().max()) if found.numel() else 0.0


def worst(parallel, expected):
    return max([off(p.grad, expected[n]) for n, p in parallel.named_parameters() if n in expected] or [0.0])


def random_plans(count):
    """Steps of the dense model under random plans; the largest difference from one device."""
    wrong = 0.0
    for seed in range(count):
        rows = random.Random(seed).choice([4, 7, 9])
        batch = batch_of(rows, seed=seed)
        loss, expected = gradients_of(dense(), batch)
        chain = Chain.trace(dense(), batch[0])
        parallel = BurstParallel(
            chain, plan_of(chain, random_widths(chain, rows, seed), rows), loss=losses.cross_entropy
        )
        held = {name for name, _ in parallel.named_parameters()}
        mine = {n for place in parallel.plan.held(dist.get_rank()) for n in chain[place].state_names}
        assert held == (mine or {"plait.idle"})
        assert dist.get_rank() == 0 or all(p.is_meta for n, p in chain.named_parameters() if n not in mine)
        wrong = max(wrong, abs(parallel.step(*batch) - loss), worst(parallel, expected))
        parallel.step(batch)  # gradients add up
        wrong = max(wrong, worst(parallel, {name: 2 * gradient for name, gradient in expected.items()}))
        assert parallel.record.step_ms > 0
        assert len(parallel.gaps) == dist.get_world_size()
        parallel.close()
    return wrong


def more_ways(rows):
    """Micro-batches, another batch size, clipping, a timeline; on one plan."""
    batch = batch_of(rows)
    loss, expected = gradients_of(dense(), batch)
    chain, timeline = Chain.trace(dense(), batch[0]), Timeline()
    widths = [1, dist.get_world_size(), 2, 1]
    parallel = BurstParallel(
        chain, plan_of(chain, widths, rows), loss=losses.cross_entropy, timeline=timeline
    )
    parts = rows // dist.get_world_size()
    wrong = max(abs(parallel.step(batch, micro_batches=parts) - loss), worst(parallel, expected))
    model = dense()
    gradients_of(model, batch)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    wrong = max(wrong, off(parallel.clip_grad_norm_(0.05), norm))
    wrong = max(wrong, worst(parallel, {name: p.grad for name, p in model.named_parameters()}))
    for parameter in parallel.parameters():
        parameter.grad = None
    fewer = batch_of(rows - 1, seed=3)
    loss, expected = gradients_of(dense(), fewer)
    wrong = max(wrong, abs(parallel.step(fewer) - loss), worst(parallel, expected))
    names = {span.name for span in timeline.spans}
    assert dist.get_rank() >= 2 or {"forward 2", "backward 2", "sync 2"} <= names, names
    with pytest.raises(UsageError, match=r"1 rows are too few for the widest block"):
        parallel.step(batch_of(1))
    return wrong


def tell(count, rows):
    return random_plans(count), more_ways(rows)


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_are_those_of_one_device(ranks, world):
    for found in ranks(world, tell, 4, 9):
        assert max(found) < CLOSE


def branches(seeds):
    wrong = []
    for seed in seeds:
        x = batch_of(7, seed=seed)
        model = residual()
        loss, expected = gradients_of(model, x)
        chain = Chain.trace(residual(), x[0])
        assert chain.tied
        parallel = BurstParallel(
            chain, plan_of(chain, random_widths(chain, 7, seed), 7), loss=losses.cross_entropy
        )
        for _ in range(2):  # the second time, receives are posted ahead
            for parameter in parallel.parameters():
                parameter.grad = None
            wrong.append(max(abs(parallel.step(*x) - loss), worst(parallel, expected)))
        parallel.close()
    return max(wrong)


def norms(kind):
    """BatchNorm of a rank's own rows, or of all rows; and its statistics."""
    rows, world = 7, dist.get_world_size()
    batch = batch_of(rows, (1, 8, 8))
    model, wrong = images(), 0.0
    if kind == "synchronized":
        loss, expected = gradients_of(model, batch)
    else:  # as data parallelism does it: each part by itself, weighed
        total, loss, parts = losses.targets(batch), 0.0, []
        for rank in range(world):
            mine = share(rows, rank, world)
            part = tuple(t[mine.start : mine.stop] for t in batch)
            replica = copy.deepcopy(model)
            weight = int(losses.targets(part)) / int(total)
            value, found = gradients_of(replica, part)
            loss += value * weight
            parts.append({name: gradient * weight for name, gradient in found.items()})
            if rank == 0:
                statistics = replica
        expected = {name: sum(part[name] for part in parts) for name in parts[0]}
        model = statistics
    chain = Chain.trace(images(), batch[0])
    widths = [world] * len(chain) if kind == "local" else [world, *[2] * (len(chain) - 2), 1]
    parallel = BurstParallel(chain, plan_of(chain, widths, rows), loss=losses.cross_entropy, batch_norm=kind)
    wrong = max(abs(parallel.step(*batch) - loss), worst(parallel, expected))
    state = parallel.state_dict()
    for name, value in model.state_dict().items() if dist.get_rank() == 0 else ():
        wrong = max(wrong, off(state[name], value))
    parallel.close()
    return wrong


def changes():
    """Adam under three plans, one of which is resumed by others; weights and state are one device's."""
    torch.manual_seed(0)
    world, rows, first = dist.get_world_size(), 7, dist.get_rank() == 0
    batches = [batch_of(rows, (1, 8, 8), seed) for seed in range(6)]
    alone = images()
    groups = lambda named: [  # noqa: E731
        {"params": [p for n, p in named if "weight" in n], "lr": 0.01},
        {"params": [p for n, p in named if "weight" not in n], "lr": 0.02, "weight_decay": 0.1},
    ]
    whole = torch.optim.AdamW(groups(list(alone.named_parameters())))
    for batch in batches:
        whole.zero_grad()
        losses.cross_entropy(alone(batch[0]), batch).backward()
        whole.step()

    def more(parallel, optimizer, some):
        for batch in some:
            optimizer.zero_grad()
            parallel.step(*batch)
            optimizer.step()

    chain = Chain.trace(images(), batches[0][0])
    draw = random.Random(5)
    plans = [plan_of(chain, [draw.randint(1, world) for _ in chain], rows) for _ in range(4)]
    settings = {"loss": losses.cross_entropy, "batch_norm": "synchronized"}
    parallel = BurstParallel(chain, plans[0], **settings)
    optimizer = torch.optim.AdamW(groups(list(parallel.named_parameters())))
    more(parallel, optimizer, batches[:2])
    for plan, batch in zip(plans[1:3], batches[2:4], strict=True):
        parallel.change(plan, optimizer)
        more(parallel, optimizer, [batch])
    saved = parallel.state_dict(), parallel.optimizer_state(optimizer)
    assert bool(saved[0]) == first
    saved = copy.deepcopy(saved)
    more(parallel, optimizer, batches[4:])  # which the saved state must not see
    parallel.close()

    chain = Chain.trace(images(), batches[0][0])
    resumed = BurstParallel(chain, plans[3], **settings)
    optimizer = torch.optim.AdamW(groups(list(resumed.named_parameters())))
    resumed.load_state_dict(saved[0] if first else None)
    resumed.load_optimizer_state(optimizer, saved[1] if first else None)
    more(resumed, optimizer, batches[4:])
    expected = dict(alone.named_parameters())
    wrong = max([off(p, expected[n]) for n, p in resumed.named_parameters() if n in expected] or [0.0])
    if first:
        for name, value in alone.state_dict().items():
            wrong = max(wrong, off(resumed.state_dict()[name], value))
        ours, theirs = resumed.optimizer_state(optimizer), whole.state_dict()
        assert [g["params"] for g in ours["param_groups"]] == [g["params"] for g in theirs["param_groups"]]
        for place, state in theirs["state"].items():
            for key, value in state.items():
                wrong = max(wrong, off(ours["state"][place][key], value))
    resumed.close()
    return wrong


def three():
    return branches(range(3)), norms("local"), norms("synchronized"), changes()


def test_branches_norms_changes_and_resumes_on_three(ranks):
    for found in ranks(3, three):
        assert max(found) < CLOSE, found


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=31, n_positions=8, use_cache=False, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


def language_model():
    """Hugging Face's GPT-2, whose word embedding is its output layer too; and compressed gradients."""
    tokens = torch.randint(31, (5, 8), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[0, 4:] = losses.IGNORED
    batch = {"input_ids": tokens, "labels": labels}
    model = gpt2()
    loss = losses.next_token(model(input_ids=tokens), batch)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    chain = Chain.trace(gpt2(), {"input_ids": tokens[:2]})
    widths = [1 + place % 2 for place in range(len(chain))]
    parallel = BurstParallel(chain, plan_of(chain, widths, 5), loss=losses.next_token)
    wrong = max(abs(parallel.step(batch) - loss.item()), worst(parallel, expected))
    parallel.change(plan_of(chain, widths[::-1], 5))
    wrong = max(wrong, abs(parallel.step(batch) - loss.item()), worst(parallel, expected))
    parallel.close()
    return wrong


def compressed():
    """Gradients in 8 bits: near those of one device, and the same on both ranks."""
    batch = [t.float() if t.is_floating_point() else t for t in batch_of(8)]
    _, expected = gradients_of(dense().float(), batch)
    chain = Chain.trace(dense().float(), batch[0])
    parallel = BurstParallel(
        chain,
        plan_of(chain, [2, 2, 2, 1], 8),
        loss=losses.cross_entropy,
        collective=CompressedCollective(bits=8),
    )
    parallel.step(*batch)
    wrong = max(
        off(p.grad, expected[n]) / float(expected[n].abs().max()) for n, p in parallel.named_parameters()
    )
    found = {n: p.grad.clone() for n, p in parallel.named_parameters()}
    parallel.close()
    return wrong, found


def two():
    return language_model(), compressed()


def test_a_language_model_and_compressed_gradients(ranks):
    first, second = ranks(2, two)
    assert max(first[0], second[0]) < CLOSE
    assert 0 < first[1][0] < 0.05
    for name, gradient in second[1][1].items():
        assert torch.equal(first[1][1][name], gradient)


def test_one_process_needs_no_group():
    batch = batch_of(5)
    loss, expected = gradients_of(dense(), batch)
    chain = Chain.trace(dense(), batch[0])
    parallel = BurstParallel(chain, plan_of(chain, [1] * len(chain), 5), loss=losses.cross_entropy)
    assert parallel.step(*batch) == loss
    assert worst(parallel, expected) == 0
    parallel.close()


def test_forward_and_loss_run_in_bf16_where_asked():
    x, y = batch_of(5)
    model = dense().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = losses.cross_entropy(model(x.float()), (x, y)).item()
    chain = Chain.trace(dense().float(), x.float())
    plan = plan_of(chain, [1] * len(chain), 5)
    parallel = BurstParallel(chain, plan, loss=losses.cross_entropy, bf16=True)
    assert parallel.step(x.float(), y) == expected
    assert all(parameter.grad.dtype == torch.float32 for parameter in parallel.parameters())
    parallel.close()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"batch_norm": "global"}, "there is no batch_norm 'global'"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"collective": "ring"}, "the collective given is str"),
    ],
)
def test_settings_that_cannot_be(wrong, says):
    chain = Chain.trace(dense(), batch_of(5)[0])
    with pytest.raises(UsageError, match=says):
        BurstParallel(chain, plan_of(chain, [1] * 4, 5), loss=losses.cross_entropy, **wrong)


def test_plans_of_something_else():
    chain = Chain.trace(dense(), batch_of(5)[0])
    names = [block.name for block in chain]
    for plan, says in [
        (BurstPlan.of(names[:-1], [1] * 3, batch=5), "the plan has 3 blocks and the chain 4"),
        (
            BurstPlan.of([*names[:-1], "x"], [1] * 4, batch=5),
            "block 3 is 'x' in the plan and '6' in the chain",
        ),
        (BurstPlan.of(names, [1, 2, 1, 1], batch=5), "widest block is on 2 devices, and there are 1 ranks"),
    ]:
        with pytest.raises(UsageError, match=says):
            BurstParallel(chain, plan, loss=losses.cross_entropy)


def test_a_chain_that_does_not_exist_yet_needs_a_seed():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 5))
    chain = Chain.of(list(model))
    plan = plan_of(chain, [1], 5)
    with pytest.raises(UsageError, match="does not exist yet") as caught:
        BurstParallel(chain, plan, loss=losses.cross_entropy)
    assert caught.value.setting == "seed"
    parallel = BurstParallel(chain, plan, loss=losses.cross_entropy, seed=0)
    assert parallel.step(torch.randn(5, 6), torch.arange(5)) > 0
    parallel.close()
