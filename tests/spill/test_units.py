"""The order of units, what each needs, and what is known afterwards."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import NonfiniteError
from plait.spill import units
from plait.spill.description import BlockShape, Buffer, Description, Evaluations, Parameter
from plait.spill.homes import homes
from plait.spill.plan import Shard
from plait.spill.units import Head, Report, Unit
from plait.value import Value


class Cut:
    def __init__(self, *shards):
        self.shards = tuple(Shard(first=f, end=e, activations=a, saved_bytes=100) for f, e, a in shards)


def parameter(name, *blocks, trained=True, state=(("momentum", True, "float32"),)):
    return Parameter(name=name, shape=(4, 4), stride=(4, 1), dtype="float32", trained=trained, blocks=blocks,
                     state=state if trained else ())  # fmt: skip


def description(parameters, buffers=(), blocks=4, **changes):
    """Blocks in a row, each reading what the one before wrote, the last one also what the first did."""
    shapes = [BlockShape(name=f"b{i}", reads=(f"v{i - 1}",) if i else (), writes=(f"v{i}",), kind=str(i))
              for i in range(blocks)]  # fmt: skip
    if blocks > 2:
        last = shapes[-1]
        shapes[-1] = BlockShape(name=last.name, reads=(*last.reads, "v0"), writes=last.writes, kind="end")
    values = tuple(Value(f"v{i}", "float32", 4, ((1, 0), (0, 5)), True) for i in range(blocks))
    given = {
        "job": "j", "digest": "", "base": "", "blocks": tuple(shapes), "parameters": tuple(parameters),
        "buffers": tuple(buffers), "values": values, "inputs": ("x",), "outputs": (f"v{blocks - 1}",),
        "micro_batches": (2, 2), "steps": 2, "clips": False, "skips": False,
    }  # fmt: skip
    return Description(**{**given, **changes})


PLAIN = description([parameter(f"w{i}", i) for i in range(4)])
EACH = Cut((0, 1, "keep"), (1, 2, "recompute"), (2, 3, "spill"), (3, 4, "keep"))


def drawn(order):
    letters = {"forward": "F", "turn": "T", "backward": "B", "update": "U"}
    return " ".join(f"{letters[phase]}{s}" for phase, s in order)


def test_the_order_of_a_step():
    three = description([parameter(f"w{i}", i) for i in range(3)], blocks=3)
    cut = Cut((0, 1, "keep"), (1, 2, "keep"), (2, 3, "keep"))
    assert drawn(units.step_order(three, cut)) == "F0 F1 T2 U2 B1 U1 B0 U0"
    clipped = description(three.parameters, blocks=3, clips=True)
    assert drawn(units.step_order(clipped, cut)) == "F0 F1 T2 B1 B0 U2 U1 U0"
    assert drawn(units.step_order(three, Cut((0, 3, "keep")))) == "T0 U0"


def test_shards_that_train_nothing_do_not_go_back():
    parameters = [parameter("w0", 0, trained=False), parameter("w1", 1), parameter("w2", 2, trained=False),
                  parameter("w3", 3)]  # fmt: skip
    values = tuple(Value(f"v{i}", "float32", 4, ((1, 0),), i > 0) for i in range(4))
    frozen = description(parameters, values=values)
    assert drawn(units.step_order(frozen, EACH)) == "F0 F1 F2 T3 U3 B2 B1 U1"


def test_where_tensors_live():
    parameters = [
        parameter("own", 0), parameter("shared", 0, 3), parameter("still", 1, trained=False),
        parameter("table", 1, 2, trained=False), parameter("unused"), parameter("twice", 2, 2),
    ]  # fmt: skip
    buffers = [
        Buffer(name="mean", shape=(4,), stride=(1,), dtype="float32", saved=True, blocks=(1,), changes=(1,)),
        Buffer(name="mask", shape=(4,), stride=(1,), dtype="bool", saved=False, blocks=(0, 2), changes=()),
    ]
    known = description(parameters, buffers)
    found = homes(known, EACH)
    assert {name: home.key for name, home in found.parameters.items()} == {
        "own": "j/weights/0", "shared": "j/tied/0", "still": "j/frozen/1", "table": "j/frozen-tied/0",
        "unused": "j/weights/rest", "twice": "j/weights/2",
    }  # fmt: skip
    assert {home.key for home in found.states.values()} == {"j/moments/0", "j/moments-tied/0", "j/moments/2"}
    assert {name: home.key for name, home in found.buffers.items()} == {
        "mean": "j/buffers/1", "mask": "j/buffers/0",
    }  # fmt: skip
    assert found.parameter_keys(3) == ["j/tied/0"]
    assert found.buffer_keys(1) == {"j/buffers/1": True}
    assert found.buffer_keys(2) == {"j/buffers/0": False}
    together = homes(known, Cut((0, 4, "keep")))
    assert not together.tied, "one shard has all that use it"
    assert sum(s.nbytes for s in found.persistent) == sum(s.nbytes for s in units.segments(known, EACH))


def test_what_is_frozen_can_be_shared():
    from dataclasses import replace

    known = description([parameter("w", 0), parameter("still", 1, trained=False)])
    keys = [homes(replace(known, job=job, shares=True), EACH).parameters["still"].key for job in ("a", "b")]
    assert keys[0] == keys[1]
    assert keys[0].startswith("_shared-")
    other = homes(replace(known, shares=True), Cut((0, 4, "keep"))).parameters["still"].key
    assert other != keys[0], "other cuts lie otherwise"


def keys(requests, mode):
    return {request.key for request in requests if request.mode == mode}


def test_what_units_ask_for():
    head = Head(job="j", stage="step")
    forward = units.requests(PLAIN, EACH, Unit("j", 0, "forward", 0), head)
    assert keys(forward, "read") == {"j/weights/0"}
    assert keys(forward, "write") == {"j/value/v0/0", "j/value/v0/1"}
    spilled = units.requests(PLAIN, EACH, Unit("j", 0, "forward", 2), head)
    assert "j/saved/2/1" in keys(spilled, "write")
    turn = units.requests(PLAIN, EACH, Unit("j", 0, "turn", 3), head)
    assert {"j/weights/3", "j/value/v2/0", "j/value/v0/1"} <= keys(turn, "read")
    assert keys(turn, "write") == {f"j/gradient/{v}/{m}" for v in ("v0", "v2") for m in (0, 1)}
    later = Head(
        job="j",
        stage="step",
        references={0: ("j/weights/0", "j/value/v0/0"), 2: ("j/saved/2/0",)},
        layouts={f"j/gradient/{v}/{m}": ((), (), "", False) for v in ("v0", "v1", "v2") for m in (0, 1)},
    )
    back = units.requests(PLAIN, EACH, Unit("j", 0, "backward", 0), later)
    assert keys(back, "read") == {"j/weights/0", "j/value/v0/0", "j/gradient/v0/0", "j/gradient/v0/1"}
    again = units.requests(PLAIN, EACH, Unit("j", 0, "backward", 1), later)
    assert {"j/weights/1", "j/value/v0/0", "j/gradient/v1/0"} <= keys(again, "read")
    assert keys(again, "change") == {"j/gradient/v0/0", "j/gradient/v0/1"}, "a later shard gave some already"
    assert keys(units.requests(PLAIN, EACH, Unit("j", 0, "backward", 2), later), "change") >= {"j/saved/2/0"}
    update = units.requests(PLAIN, EACH, Unit("j", 0, "update", 1), head)
    assert (keys(update, "change"), keys(update, "write")) == ({"j/weights/1"}, {"j/moments/1"})
    second = Head(job="j", stage="step", present={"j/moments/1": "1"})
    update = units.requests(PLAIN, EACH, Unit("j", 0, "update", 1), second)
    assert keys(update, "change") == {"j/weights/1", "j/moments/1"}


def played(description, plan, reports=None):
    """All units of a job, with the scratch that is there during each."""
    head, found, there = Head(job="j"), [], set()
    while (unit := units.next_unit(description, plan, head)) is not None:
        made = units.scratch_for(description, plan, unit, head)
        assert there.isdisjoint(segment.key for segment in made)
        there |= {segment.key for segment in made}
        persistent = {segment.key for segment in units.segments(description, plan)}
        for request in units.requests(description, plan, unit, head):
            assert request.key in there | persistent, (unit, request)
        told = (reports or {}).get((unit.step, unit.phase, unit.shard), Report())
        if unit.phase == "turn" and told.loss is None and told.weight is None:
            told = Report(loss=1.0, weight=4.0)
        if unit.phase == "evaluate" and unit.shard == len(plan.shards) - 1:
            last = unit.part == len(units.evaluation_parts(description, plan)) - 1
            told = Report(evaluated={"step": unit.step} if last else None)
        before, head = head, units.advance(description, plan, head, unit, told)
        gone = units.drops(description, plan, unit, before, head)
        assert set(gone) <= there, unit
        there -= set(gone)
        assert there == set(head.scratch)
        found.append((unit, set(there)))
    assert not there
    return found, head


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_scratch_comes_and_goes_whatever_the_cut(data):
    blocks = data.draw(st.integers(1, 6))
    edges = sorted({0, blocks, *data.draw(st.lists(st.integers(0, blocks), max_size=5))})
    modes = data.draw(
        st.lists(st.sampled_from(["keep", "thrift", "spill", "recompute"]), min_size=6, max_size=6)
    )
    plan = Cut(*((a, b, mode) for a, b, mode in zip(edges, edges[1:], modes, strict=False)))
    parameters = [
        parameter(f"w{i}", i, trained=data.draw(st.booleans()) or i == blocks - 1) for i in range(blocks)
    ]
    parameters.append(parameter("tied", *data.draw(st.sets(st.integers(0, blocks - 1), min_size=1))))
    every, rows, batch = st.none() | st.integers(1, 3), st.integers(1, 20), st.integers(1, 4)
    evaluation = data.draw(st.none() | st.builds(Evaluations, every=every, rows=rows, batch=batch))
    known = description(parameters, blocks=blocks, clips=data.draw(st.booleans()), evaluation=evaluation)
    found, head = played(known, plan)
    assert (head.stage, head.step, len(head.losses)) == ("done", 2, 2)
    assert sum(unit.phase == "turn" for unit, _ in found) == 2
    assert head.rests
    for phase in ("create", "forward"):
        count = len(plan.shards) - (phase == "forward")
        assert sum(unit.phase == phase for unit, _ in found) == count * (1 if phase == "create" else 2)
    if evaluation is not None:
        assert head.evaluations[-1] == {"step": 2}


def test_a_value_lives_until_nobody_needs_it():
    found, _ = played(PLAIN, EACH)
    last = [unit for unit, there in found if "j/value/v0/0" in there and unit.step == 0][-1]
    assert (last.phase, last.shard) == ("update", 1), "until the backward of the shard that wrote it"


def test_what_comes_is_known_ahead():
    head = Head(job="j", stage="step", position=3, scratch=("j/value/v0/0",))
    ahead = units.upcoming(PLAIN, EACH, head, 12)
    assert len(ahead) == 12
    assert keys(ahead[0], "read") == {"j/weights/3", "j/value/v0/0"}, "scratch that exists, and no other"
    order = units.step_order(PLAIN, EACH)
    assert keys(ahead[len(order) - 3], "read") == {"j/weights/0"}, "and the next step's first"
    back = order.index(("backward", 0))
    assert "j/weights/0" in keys(ahead[back - 3], "read"), "though its forward has yet to say what it needs"
    nearly = Head(job="j", stage="step", step=1, position=len(order) - 1)
    assert len(units.upcoming(PLAIN, EACH, nearly, 12)) == 1, "and no step that does not come"
    assert units.upcoming(PLAIN, EACH, Head(job="j", stage="done"), 3) == []
    create = units.upcoming(PLAIN, EACH, Head(job="j"), 5)
    assert [keys(requests, "write") for requests in create[:4]] == [{f"j/weights/{i}"} for i in range(4)]
    assert keys(create[4], "read") == {"j/weights/0"}


def test_a_step_that_is_lost():
    skipping = description(PLAIN.parameters, skips=True)
    lost = {(0, "turn", 3): Report(loss=math.inf, weight=4.0)}
    found, head = played(skipping, EACH, lost)
    assert head.skipped == (0,)
    assert head.losses == (math.inf, 1.0)
    assert not [unit for unit, _ in found if unit.step == 0 and unit.phase in ("backward", "update")]
    with pytest.raises(NonfiniteError, match="'j' has a loss of inf over a weight of 4 at step 0"):
        played(PLAIN, EACH, lost)
    nothing = {(1, "forward", 0): Report(weight=0.0)}
    _, head = played(skipping, EACH, nothing)
    assert head.skipped == (1,)
    assert math.isnan(head.losses[1])
    clipped = description(PLAIN.parameters, clips=True)
    with pytest.raises(NonfiniteError, match="gradients of norm inf at step 0"):
        played(clipped, EACH, {(0, "backward", 0): Report(norm=math.inf)})


def test_who_must_run_a_unit():
    head = Head(job="j", stage="step")
    for position, (phase, shard) in enumerate(units.step_order(PLAIN, EACH)):
        unit = Unit("j", 0, phase, shard)
        bound = units.bound_to(PLAIN, EACH, head, unit)
        free = phase in ("forward", "turn") or (phase, shard) == ("backward", 1)
        assert bound == (None if free else head.devices[shard]), unit
        report = Report(loss=1.0, weight=1.0) if phase == "turn" else Report()
        head = units.advance(PLAIN, EACH, head, unit, report, device=position % 3 if bound is None else bound)


def test_a_head_survives_json():
    _, head = played(description(PLAIN.parameters, evaluation=Evaluations(every=1, rows=7, batch=2)), EACH)
    head = Head(**{**vars(head), "layouts": {"a": ((1,), (1,), "float32", True)}, "references": {3: ("k",)},
                   "devices": {1: 0}, "casts": {0: ("w",)}})  # fmt: skip
    assert Head.from_json(json.loads(json.dumps(head.to_json()))) == head


def test_an_evaluation_goes_in_parts():
    evaluation = Evaluations(every=None, rows=21, batch=2)
    parts = units.evaluation_parts(description(PLAIN.parameters, evaluation=evaluation), EACH)
    assert [row for part in parts for rows in part for row in rows] == list(range(21))
    assert len(parts) > 1
    small = description([parameter("w", 0, state=())], evaluation=evaluation, micro_batches=(1,))
    assert all(len(part) == 1 for part in units.evaluation_parts(small, EACH))
    assert len(units.evaluation_parts(small, Cut((0, 4, "keep")))) == 1, "nothing is stored between shards"
