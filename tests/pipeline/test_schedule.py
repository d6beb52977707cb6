"""Gradients through real stages in real processes, against the model in one piece."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, SplitPoint, pipeline

from plait.errors import UsageError
from plait.pipeline import ScheduleKFKB, orders
from plait.timeline import Timeline


class Part(nn.Module):
    """Passes a differentiable value, a value in a second tensor, and a mask that has no gradient."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, skipped, mask):
        return torch.tanh(self.linear(x)) * mask, skipped + x, mask


class Ends(nn.Module):
    def forward(self, x, skipped, mask):
        return x + skipped


class Model(nn.Module):
    """Stages as a user writes them by hand: ``stage(n, of)``."""

    def __init__(self, width=6, parts=8):
        super().__init__()
        self.parts = nn.ModuleList(Part(width) for _ in range(parts))
        self.ends = Ends()

    def stage(self, place, count):
        size = len(self.parts) // count
        part = list(self.parts[place * size :] if place == count - 1 else self.parts[place * size :][:size])
        return Run(part + ([self.ends] if place == count - 1 else []))

    def forward(self, *values):
        return self.stage(0, 1)(*values)


class Run(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *values):
        for part in self.parts:
            values = part(*values)
        return values


def model():
    torch.manual_seed(3)
    return Model().double()


def batch(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, skipped = (torch.randn(rows, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    mask = (torch.rand(rows, 6, generator=generator) > 0.2).double()
    return (x, skipped, mask), torch.randn(rows, 6, dtype=torch.float64, generator=generator)


def loss(output, target):
    return (output - target).square().mean()


def stage_of(one, place=None):
    place = dist.get_rank() if place is None else place
    count = dist.get_world_size()
    return PipelineStage(one.stage(place, count), place, count, torch.device("cpu"))


def call(schedule, rows, seed=0, losses=None, run="step"):
    inputs, target = batch(rows, seed)
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    given = inputs if rank == 0 else ()
    asked = {"target": target, "losses": losses} if rank == last else {}
    return getattr(schedule, run)(*given, **asked)


def difference(stage, rows, seed=0):
    """How far this rank's gradients are from those of the whole model."""
    count, place = stage.num_stages, stage.stage_index
    one = model()
    inputs, target = batch(rows, seed)
    loss(one(*inputs), target).backward()
    expected = [p.grad for p in one.stage(place, count).parameters()]
    return max(
        (p.grad - e).abs().max().item() for p, e in zip(stage.submod.parameters(), expected, strict=True)
    )


def all_orders(stages, m):
    made = [orders.kfkb(stages, m, k) for k in (1, 2, 3, m)]
    made += [orders.depth(stages, m, 2), orders.per_link_depth(stages, m, [2, 1, 3][: stages - 1])]
    made += [orders.work_conserving(stages, m, cap) for cap in (1, 3)]
    return made


def run_all_orders():
    """Every order on the same stage, one after the other, with the numbers of micro-batches in turn."""
    stage = stage_of(model())
    schedule = ScheduleKFKB(stage, 8, loss)
    found = []
    for step, (rows, m) in enumerate([(16, 8), (13, 8), (12, 5), (16, 16)]):
        for order in all_orders(stage.num_stages, m):
            schedule.change(order=order)
            stage.submod.zero_grad()
            losses = []
            output = call(schedule, rows, step, losses)
            found.append((order.label, rows, m, difference(stage, rows, step)))
            if stage.is_last:
                assert output.shape == (rows, 6)
                assert len(losses) == m
                assert not losses[0].requires_grad
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_gradients_are_those_of_the_whole_model_in_every_order(ranks, world):
    for found in ranks(world, run_all_orders):
        assert len(found) == 4 * 8
        assert max(entry[-1] for entry in found) < 1e-10, found


def test_one_stage_is_a_pipeline_too(ranks):
    assert ranks(1, run_all_orders)[0][0][-1] < 1e-10


def as_torch_does():
    """Stock Schedule1F1B and ours on equal stages: gradients, losses, outputs."""
    found = []
    for make in (Schedule1F1B, ScheduleKFKB):
        stage = stage_of(model())
        schedule, losses = make(stage, 8, loss), []
        for _ in range(2):
            stage.submod.zero_grad()
            output = call(schedule, 16, losses=losses)
        found.append(([p.grad for p in stage.submod.parameters()], losses, output))
    stage.submod.zero_grad()
    call(Schedule1F1B(stage, 4, loss), 16)  # on a stage that was ours, and ours again
    stage.submod.zero_grad()
    call(schedule, 16)
    worst = difference(stage, 16)
    (stock, stock_losses, stock_output), (ours, losses, output) = found
    for a, b in zip(stock, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert worst < 1e-12
    if output is not None:
        torch.testing.assert_close(stock_output, output, rtol=0, atol=0)
        torch.testing.assert_close(torch.stack(stock_losses), torch.stack(losses), rtol=0, atol=0)
    assert (output is None) == (dist.get_rank() == 0)


def test_it_is_a_drop_in_for_torchs_own(ranks):
    ranks(2, as_torch_does)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.b(torch.relu(self.a(x))))


def stages_of_pipeline():
    torch.manual_seed(0)
    one = Plain().double()
    (x, _, _), target = batch(12)
    loss(one(x), target).backward()
    expected = {name: p.grad.clone() for name, p in one.named_parameters()}
    one.zero_grad()
    pipe = pipeline(one, (x[:3],), split_spec={"b": SplitPoint.BEGINNING})
    rank = dist.get_rank()
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = ScheduleKFKB(stage, 4, loss, k=2)
    schedule.step(*([x] if rank == 0 else []), **({} if rank == 0 else {"target": target}))
    found = dict(stage.submod.named_parameters())
    assert len(found) == 2
    for name, parameter in found.items():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-12)


def test_stages_that_torch_has_cut(ranks):
    ranks(2, stages_of_pipeline)


def many_uses():
    stage = stage_of(model())
    schedule = ScheduleKFKB(stage, 6, loss, k=2, timeline=Timeline())
    before = call(schedule, 12, run="eval")
    call(schedule, 12)
    after = call(schedule, 12, run="eval")
    call(schedule, 12, seed=0)  # gradients accumulate, and what was there is not scaled again
    expected = difference(stage_half(stage), 12)
    if stage.is_last:
        torch.testing.assert_close(before, after, rtol=0, atol=0)
        inputs, _ = batch(12)
        torch.testing.assert_close(after, model()(*inputs), rtol=0, atol=1e-12)
    stage.submod.zero_grad()
    other = ScheduleKFKB(stage, 4, loss, k=4)
    call(other, 12)
    again = difference(stage, 12)
    stage.submod.zero_grad()
    with torch.no_grad():
        call(schedule, 12, run="eval")
    call(schedule, 12)
    names = [span.name for span in schedule.timeline.spans if span.info["step"] == 2]
    return expected, again, difference(stage, 12), names, schedule.record.step_ms


def stage_half(stage):
    for parameter in stage.submod.parameters():
        parameter.grad /= 2
    return stage


def test_accumulation_evaluation_and_several_schedules_on_one_stage(ranks):
    first, last = ranks(2, many_uses)
    for accumulated, again, final, _, step_ms in (first, last):
        assert max(accumulated, again, final) < 1e-10
        assert step_ms > 0
    assert first[3] == ["F0", "F1", "F2", "F3", "B0", "B1", "F4", "F5", "B2", "B3", "B4", "B5"]
    assert last[3] == ["F0", "F1", "B0", "B1", "F2", "F3", "B2", "B3", "F4", "F5", "B4", "B5"]


def weights():
    """Rows count by how many of their numbers are known; losses are means over those."""
    (inputs, target), known = batch(11), torch.arange(66).reshape(11, 6) % 5 != 0

    def masked(output, both):
        return ((output - both["y"]).square() * both["known"]).sum() / both["known"].sum()

    one = model()
    masked(one(*inputs), {"y": target, "known": known}).backward()
    rank = dist.get_rank()
    expected = [p.grad for p in one.stage(rank, 2).parameters()]
    stage = stage_of(model())
    schedule = ScheduleKFKB(stage, 4, masked, weight=lambda both: both["known"].sum())
    schedule.step(
        *(inputs if rank == 0 else ()), **({"target": {"y": target, "known": known}} if rank else {})
    )
    found = [p.grad for p in stage.submod.parameters()]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    stage = stage_of(model())
    schedule = ScheduleKFKB(stage, 4, lambda output, y: (output - y).square().sum() / 66, scale_grads=False)
    schedule.step(*(inputs if rank == 0 else ()), **({"target": target} if rank else {}))
    assert difference(stage, 11) < 1e-10


def test_losses_are_weighted_exactly(ranks):
    ranks(2, weights)


def two_pipelines():
    """Two stages of two replicas each: DDP sums between replicas, the pipelines are groups of their own."""
    rank = dist.get_rank()
    replica, place = divmod(rank, 2)
    pipes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    copies = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    one = model()
    submod = nn.parallel.DistributedDataParallel(one.stage(place, 2), process_group=copies[place])
    stage = PipelineStage(submod, place, 2, torch.device("cpu"), group=pipes[replica])
    schedule = ScheduleKFKB(stage, 4, loss, k=2)
    inputs, target = batch(16)
    rows = slice(8 * replica, 8 * replica + 8)
    given = [value[rows] for value in inputs] if place == 0 else []
    for _ in range(2):
        submod.zero_grad()
        schedule.step(*given, **({"target": target[rows]} if place else {}))
    return difference(stage, 16)


def test_replicas_of_a_pipeline(ranks):
    assert max(ranks(4, two_pipelines)) < 1e-10


def frozen_stage():
    one = model()
    for part in one.parts[:4]:
        part.requires_grad_(False)
    stage = stage_of(one)
    schedule = ScheduleKFKB(stage, 4, loss, k=2)
    call(schedule, 8)
    if stage.is_first:
        assert all(p.grad is None for p in stage.submod.parameters())
        return 0.0
    return difference(stage, 8)


def test_a_stage_with_nothing_to_learn(ranks):
    assert max(ranks(2, frozen_stage)) < 1e-10


def frozen_later():
    """Weights are frozen and set free again between steps, on the first stage and on one in the middle."""
    stage, rank = stage_of(model()), dist.get_rank()
    schedule = ScheduleKFKB(stage, 4, loss, k=2)
    found = []
    for frozen in ((), (0,), (0, 1), (1,), ()):
        stage.submod.zero_grad()
        stage.submod.requires_grad_(rank not in frozen)
        call(schedule, 8)
        if rank in frozen:
            assert all(parameter.grad is None for parameter in stage.submod.parameters())
        else:
            found.append(difference(stage, 8))
    return max(found)


def test_weights_that_are_frozen_and_set_free_between_steps(ranks):
    assert max(ranks(3, frozen_later)) < 1e-10


def table_looked_up():
    """A conjugated tensor crosses, and so does the sparse gradient of a table that another stage looks up."""

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(4, 3))

        def forward(self, x):
            return self.table * 1.0, torch.complex(x, x).conj()

    class Last(nn.Module):
        def forward(self, table, x):
            places = torch.zeros(x.shape[0], dtype=torch.long)
            return nn.functional.embedding(places, table, sparse=True) * x.imag

    rank = dist.get_rank()
    stage = PipelineStage(First() if rank == 0 else Last(), rank, 2, torch.device("cpu"))
    schedule = ScheduleKFKB(stage, 2, lambda output, y: (output - y).mean())
    schedule.step(*[torch.ones(4, 3)][: rank == 0], **({"target": torch.zeros(4, 3)} if rank else {}))
    return stage.submod.table.grad if rank == 0 else None


def test_tensors_of_odd_kinds_cross(ranks):
    found, _ = ranks(2, table_looked_up)
    torch.testing.assert_close(found, torch.tensor([[-1 / 3] * 3, [0.0] * 3, [0.0] * 3, [0.0] * 3]))


def refusals():
    stage = stage_of(model())
    schedule = ScheduleKFKB(stage, 4, loss)
    wrong = [
        lambda: ScheduleKFKB(stage, 4, loss, k=5),
        lambda: ScheduleKFKB(stage, 0, loss),
        lambda: ScheduleKFKB(stage, 4, loss, order=orders.kfkb(3, 4, 1)),
        lambda: ScheduleKFKB(stage, 4, loss, k=2, order=orders.kfkb(1, 4, 1)),
        lambda: ScheduleKFKB(stage, 4, loss, order="1F1B"),
        lambda: ScheduleKFKB(stage, 4, loss, timeout_s=0),
        lambda: ScheduleKFKB(stage, 4, loss, timeout_s=None),
        lambda: ScheduleKFKB(stage, 4, loss, timeout_s=float("inf")),
        lambda: ScheduleKFKB(stage, 4, "loss"),
        lambda: ScheduleKFKB(stage, 4, loss, weight=3),
        lambda: ScheduleKFKB(model(), 4, loss),
        lambda: schedule.change(k=0),
        lambda: schedule.change(order="1F1B"),
        lambda: schedule.change(n_microbatches=0),
    ]
    with torch.no_grad():
        wrong.append(lambda: torch.no_grad()(schedule.step)())
    found = []
    for make in wrong:
        with pytest.raises(UsageError) as caught:
            make()
        found.append(str(caught.value))
    return found


def test_what_cannot_be_is_refused_before_anything_is_sent(ranks):
    (found,) = ranks(1, refusals)
    assert [text.split(" (setting: ")[1].split(")")[0] for text in found] == [
        "k", "n_microbatches", "order", "k", "order", "timeout_s", "timeout_s", "timeout_s", "loss_fn",
        "weight", "stage", "k", "order", "n_microbatches", "step",
    ]  # fmt: skip


def too_few():
    with pytest.raises(UsageError) as caught:
        ScheduleKFKB(stage_of(model()), 1, loss)
    return str(caught.value)


def test_as_many_micro_batches_as_stages(ranks):
    assert ranks(2, too_few)[0] == "1 micro-batches for 2 stages (setting: n_microbatches); works: 2 or more"
