"""Shard by shard, in memory that shifts: the bits of plain training, whatever the job and the cut."""

import dataclasses
import functools
import itertools
import json
import math
import random

import pytest
import torch
from executor_jobs import (
    ADAM,
    ADAMW,
    ALL,
    COSINE,
    CYCLE,
    EVALUATION,
    FOREACH,
    FUSED,
    GPT2,
    MODES,
    MOMENTUM,
    again,
    decayed,
    job,
    net,
    points,
    sequential,
    steep,
    transposed,
)

from plait import losses, reference
from plait.errors import NonfiniteError
from plait.spill import units
from plait.spill.executor import execute, tensors
from plait.spill.runner import Runner
from plait.spill.store import Store
from plait.spill.units import Head


@dataclasses.dataclass(frozen=True)
class Part:
    first: int
    end: int
    activations: str = "keep"
    saved_bytes: int = 1 << 14


@dataclasses.dataclass(frozen=True)
class Cut:
    shards: tuple


def cut(edges, modes):
    """Shards between the edges, with activations in turn."""
    pairs = zip(itertools.pairwise(edges), itertools.cycle(modes), strict=False)
    return Cut(tuple(Part(first, end, mode) for (first, end), mode in pairs))


RUNNER = Runner(memoryview(b""))
"""One for all tests: it records each model once."""
COPYING = Runner(memoryview(b""), "cpu:0")
"""One that copies segments to other memory and back, as a GPU's does."""
KNOWN = {}


def trained(job):
    if job.digest not in KNOWN:
        KNOWN[job.digest] = reference.train(job)
    return KNOWN[job.digest]


def check(job, plan, store, runner=RUNNER, **options):
    """Train it both ways, and compare every bit."""
    runner.map(store.memory)
    description = runner.describe(job)
    plan = plan(len(description.blocks)) if callable(plan) else plan
    head = execute(job, plan, store, runner=runner, description=description, **options)
    compare(job, description, plan, head, store)
    return head


def compare(job, description, plan, head, store):
    """What is in the store, with what plain training has."""
    expected = trained(job)
    assert head.losses == expected.losses or all(map(same, head.losses, expected.losses))
    assert head.skipped == expected.skipped
    assert [dict(e) for e in head.evaluations] == [dataclasses.asdict(e) for e in expected.evaluations]
    groups = expected.optimizer["param_groups"]
    names = {i: name for g in groups for i, name in zip(g["params"], g["param_names"], strict=True)}
    model = dict([*expected.model.named_parameters(), *expected.model.named_buffers()])
    states = {names[i]: s for i, s in expected.optimizer["state"].items()}
    states = {
        (name, key): value for name, s in states.items() for key, value in s.items() if value is not None
    }
    for name, state, tensor in tensors(description, plan, head, store):
        wanted = model.pop(name) if state is None else states.pop((name, state))
        assert (tensor.shape, tensor.dtype) == (wanted.shape, wanted.dtype)
        assert torch.equal(bits(tensor), bits(wanted)), (name, state)
    assert not model, "every parameter and buffer is in the store"
    assert not states, "and all of the optimizer's state"


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def same(one, other):
    return one == other or (math.isnan(one) and math.isnan(other))


def every(count):
    return lambda blocks: cut(range(blocks + 1), MODES[count % 4 :] + MODES[: count % 4])


def whole(mode):
    return lambda blocks: cut([0, blocks], [mode])


def halves(mode):
    return lambda blocks: cut([0, blocks // 2, blocks], [mode])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [whole, halves, lambda mode: lambda n: cut(range(n + 1), [mode])],
                         ids=["whole", "halves", "each"])  # fmt: skip
def test_every_mode_and_cut(mode, shape, shifting):
    check(job(model=ALL, optimizer=MOMENTUM, accumulate=3), shape(mode), shifting())


@pytest.mark.parametrize("seed", range(4))
def test_any_cut(seed, shifting):
    draws = random.Random(seed)

    def plan(blocks):
        edges = sorted({0, blocks, *draws.sample(range(1, blocks), draws.randrange(1, blocks))})
        return cut(edges, draws.choices(MODES, k=blocks))

    clip_norm = draws.choice([None, 0.3])
    check(job(model=ALL, optimizer=ADAM, accumulate=2, clip_norm=clip_norm), plan, shifting(seed=seed))


FEATURES = {
    "sgd": {},
    "momentum": {"optimizer": MOMENTUM},
    "adam": {"optimizer": ADAM},
    "adamw": {"optimizer": ADAMW},
    "fused": {"optimizer": FUSED},
    "foreach": {"optimizer": FOREACH},
    "dropout": {"model": functools.partial(net, dropout=0.4)},
    "batch norm": {"model": functools.partial(net, norm=True), "accumulate": 2},
    "tied": {"model": functools.partial(net, tied=True), "accumulate": 2},
    "frozen": {"model": functools.partial(net, frozen=True)},
    "clipped": {"clip_norm": 0.3, "optimizer": ADAM, "accumulate": 3},
    "clipped and tied": {"clip_norm": 0.3, "model": ALL, "accumulate": 2},
    "scheduled": {"optimizer": ADAMW, "schedule": COSINE},
    "one cycle": {"optimizer": MOMENTUM, "schedule": CYCLE, "steps": 5},
    "bf16": {"precision": "bf16", "model": functools.partial(net, dropout=0.2), "accumulate": 2},
    "fp64": {"precision": "fp64", "model": ALL},
    "evaluated": {"evaluation": EVALUATION, "model": ALL, "steps": 5, "accumulate": 2},
    "masked": {"data": functools.partial(points, masked=True), "accumulate": 8},
    "uneven": {"batch": 7, "accumulate": 3, "model": ALL},
    "adagrad": {"optimizer": functools.partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5)},
    "rmsprop": {"optimizer": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True)},
    "nadam": {"optimizer": functools.partial(torch.optim.NAdam, lr=0.01)},
    "groups": {"optimizer": decayed, "schedule": COSINE},
    "layouts": {"model": transposed, "optimizer": ADAM},
    "sequential": {"model": sequential, "optimizer": ADAM, "accumulate": 2},
    "bf16 and tied": {"precision": "bf16", "model": again, "accumulate": 2},
    "recurrent": {"model": functools.partial(again, recurrent=True)},
    "threads": {"threads": 2, "model": ALL},
}


@pytest.mark.parametrize(("place", "feature"), list(enumerate(FEATURES)), ids=list(FEATURES))
@pytest.mark.parametrize("runner", [RUNNER, COPYING], ids=["mapped", "copied"])
def test_every_feature(runner, place, feature, shifting):
    check(job(**FEATURES[feature]), every(place), shifting(seed=place), runner)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("runner", [RUNNER, COPYING], ids=["mapped", "copied"])
def test_a_hugging_face_model(runner, mode, shifting):
    check(GPT2, lambda blocks: cut(range(blocks + 1), [mode]), shifting(), runner)


def test_a_hugging_face_model_in_bf16_with_its_loss_outside(shifting):
    plain = job(GPT2, loss=losses.next_token, weight=None, clip_norm=None, precision="bf16")
    check(plain, lambda blocks: cut([0, 1, 4, blocks], MODES), shifting())


def test_a_step_that_is_not_finite_is_left_out(shifting):
    broken = functools.partial(points, broken_at=9)
    base = job(model=ALL, data=broken, nonfinite="skip", steps=5, optimizer=ADAM, schedule=COSINE)
    head = check(base, every(0), shifting())
    assert head.skipped
    clipped = check(job(base, clip_norm=0.5, accumulate=2), every(1), shifting())
    assert clipped.skipped


def test_gradients_that_are_not_finite_are_seen_where_they_are_clipped(shifting):
    base = job(model=steep, nonfinite="skip", clip_norm=1.0)
    assert check(base, every(0), shifting()).skipped == (0, 1, 2)


def test_a_step_of_no_weight_is_left_out_before_it_begins(shifting):
    nothing = functools.partial(points, masked=True, count=40)
    base = job(model=ALL, data=nothing, batch=2, steps=6, nonfinite="skip", optimizer=MOMENTUM)
    head = check(base, every(2), shifting())
    assert 0 < len(head.skipped) < 6
    assert all(math.isnan(head.losses[step]) for step in head.skipped)


@pytest.mark.parametrize("changes", [{}, {"clip_norm": 1.0}])
def test_a_loss_that_is_not_finite_ends_the_job(changes, shifting):
    broken = job(data=functools.partial(points, broken_at=9), steps=5, **changes)
    with pytest.raises(NonfiniteError) as plain:
        reference.train(broken)
    with pytest.raises(NonfiniteError) as spilled:
        check(broken, every(0), shifting())
    assert str(spilled.value) == str(plain.value)


def test_a_norm_that_is_not_finite_ends_the_job(shifting):
    base = job(model=steep, clip_norm=1.0)
    with pytest.raises(NonfiniteError) as plain:
        reference.train(base)
    RUNNER.map((store := shifting()).memory)
    with pytest.raises(NonfiniteError) as spilled:
        execute(base, cut([0, 1, 2, 3], ["keep"]), store, runner=RUNNER)
    assert str(spilled.value) == str(plain.value)


@pytest.mark.parametrize("memory", [48 << 12, 1 << 24], ids=["tight", "plenty"])
def test_in_a_real_store(memory, tmp_path):
    base = job(model=ALL, optimizer=ADAM, accumulate=2, evaluation=EVALUATION)
    with Store.create(tmp_path / "store", memory_bytes=memory) as store:
        check(base, every(2), store)
        peak = store.statistics().peak_bytes
    assert peak <= memory


def test_it_goes_on_from_a_commit(tmp_path):
    base = job(
        model=ALL,
        optimizer=ADAM,
        accumulate=2,
        clip_norm=0.5,
        schedule=COSINE,
        steps=5,
        evaluation=EVALUATION,
    )

    class Stopped(Exception):
        pass

    def stop(unit, head):
        if unit.step == 3 and unit.phase == "update":
            raise Stopped

    RUNNER.map(memoryview(b""))
    description = RUNNER.describe(base)
    plan = every(1)(len(description.blocks))
    with Store.create(tmp_path / "store", memory_bytes=1 << 22) as store:
        RUNNER.map(store.memory)
        with pytest.raises(Stopped):
            execute(base, plan, store, runner=RUNNER, commit_every=1, on_unit=stop)
        RUNNER.map(memoryview(b""))
        store.close(keep=True)
    with Store.open(tmp_path / "store", memory_bytes=1 << 22) as store:
        check(base, plan, store, commit_every=1)
        RUNNER.map(memoryview(b""))


def test_jobs_take_turns_on_several_devices(shifting):
    """Two jobs of one model, unit by unit in any order, on any device that is not refused to them."""
    jobs = [
        job(name="one", model=ALL, optimizer=ADAM, accumulate=2, evaluation=EVALUATION),
        job(name="two", model=ALL, optimizer=MOMENTUM, clip_norm=0.5, seed=4, threads=1),
    ]
    draws = random.Random(0)
    store, runners = shifting(), [RUNNER, COPYING]
    heads, known, plans = {}, {}, {}
    for runner in runners:
        runner.map(store.memory)
        for each in jobs:
            known[each.name] = runner.describe(each)
            plans.setdefault(each.name, every(len(plans))(len(known[each.name].blocks)))
            runner.adopt(each, plans[each.name], known[each.name])
    for each in jobs:
        heads[each.name] = Head(job=each.name)
        for segment in units.segments(known[each.name], plans[each.name]):
            store.define(segment)
    moved, stayed = 0, 0
    while True:
        going = [name for name, head in heads.items() if head.stage != "done"]
        if not going:
            break
        name = draws.choice(going)
        description, plan, head = known[name], plans[name], heads[name]
        unit = units.next_unit(description, plan, head)
        device = units.bound_to(description, plan, head, unit)
        stayed += device is not None
        moved += device is None
        device = draws.randrange(2) if device is None else device
        for segment in units.scratch_for(description, plan, unit, head):
            store.define(segment)
        store.expect(units.upcoming(description, plan, head, 5))
        lease = store.request(units.requests(description, plan, unit, head)).result()
        report = runners[device].perform(unit, lease.places, head, lease.extents)
        lease.release()
        heads[name] = Head.from_json(json.loads(json.dumps(
            units.advance(description, plan, head, unit, report, device=device).to_json())))  # fmt: skip
        for key in units.drops(description, plan, unit, head, heads[name]):
            store.drop(key)
    assert moved > 10
    assert stayed > 10
    for each in jobs:
        compare(each, known[each.name], plans[each.name], heads[each.name], store)
