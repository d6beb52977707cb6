"""Orders against brute force, and against torch's own lowering."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import UsageError
from plait.pipeline import orders
from plait.pipeline.orders import Action, Order, depth, gpipe, kfkb, listed, one_f_one_b, per_link_depth
from plait.pipeline.orders import work_conserving as capped


def text(order, stage):
    return " ".join(f"{kind}{micro_batch}" for kind, micro_batch in order.actions(stage))


def test_the_lists_of_1f1b():
    order = one_f_one_b(3, 4)
    assert text(order, 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert text(order, 1) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert text(order, 2) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert order == kfkb(3, 4, 1)
    assert order.steps == depth(3, 4, 1).steps


def test_groups_of_two_where_two_does_not_divide_five():
    order = kfkb(3, 5, 2)
    assert text(order, 0) == "F0 F1 F2 F3 F4 B0 B1 B2 B3 B4"
    assert text(order, 1) == "F0 F1 F2 F3 B0 B1 F4 B2 B3 B4"
    assert text(order, 2) == "F0 F1 B0 B1 F2 F3 B2 B3 F4 B4"


def test_gpipe_is_one_group():
    assert gpipe(2, 3).steps == ("FFFBBB", "FFFBBB")


def test_depth_adds_to_the_warm_up_link_by_link():
    assert per_link_depth(3, 6, [2, 1]).steps == ("FFFFBFBFBBBB", "FFBFBFBFBFBB", "FBFBFBFBFBFB")
    assert depth(3, 6, 2) == per_link_depth(3, 6, [2, 2])
    assert per_link_depth(3, 3, [0, 0]).steps == ("FBFBFB",) * 3


@pytest.mark.parametrize("stages", range(1, 7))
def test_in_flight_is_what_the_formulas_say(stages):
    for micro_batches in range(1, 17):
        for k in range(1, micro_batches + 1):
            order = kfkb(stages, micro_batches, k)
            for r in range(stages):
                assert order.in_flight(r) == min(micro_batches, k * (stages - r))
        for delta in range(4):
            order = depth(stages, micro_batches, delta)
            for r in range(stages):
                assert order.in_flight(r) == min(micro_batches, 1 + delta * (stages - 1 - r))


def test_every_forward_and_backward_is_there_once():
    for stages, micro_batches in itertools.product(range(1, 6), range(1, 10)):
        made = [kfkb(stages, micro_batches, k) for k in range(1, micro_batches + 1)]
        made += [depth(stages, micro_batches, delta) for delta in range(5)]
        for order, stage in itertools.product(made, range(stages)):
            wanted = {Action(kind, m) for kind in "FB" for m in range(micro_batches)}
            assert len(order.actions(stage)) == 2 * micro_batches
            assert set(order.actions(stage)) == wanted


def test_a_capped_stage_prefers_backward_and_respects_its_cap():
    order = capped(3, 4, 2)
    assert order.steps is None
    assert order.actions(0) is None
    assert order.choices(0, 0, 0) == ("F",)
    assert order.choices(0, 1, 0) == ("B", "F")
    assert order.choices(0, 2, 0) == ("B",)
    assert order.choices(0, 4, 3) == ("B",)
    assert order.choices(0, 4, 4) == ()
    assert order.choices(2, 1, 0) == ("B",)  # the last stage has its gradient at once
    assert order.next(0, 1, 0, {"F", "B"}) == Action("B", 0)
    assert order.next(0, 1, 0, {"F"}) == Action("F", 1)
    assert order.next(0, 2, 0, {"F"}) is None
    assert [order.in_flight(stage) for stage in range(3)] == [2, 2, 1]
    assert [capped(4, 9, [5, 2, 4, 3]).in_flight(stage) for stage in range(4)] == [5, 2, 2, 1]


def test_a_list_waits_for_what_comes_next_in_it():
    order = one_f_one_b(2, 2)
    assert order.choices(0, 2, 0) == ("B",)
    assert order.next(0, 2, 0, {"F"}) is None
    assert order.next(0, 2, 0, {"B"}) == Action("B", 0)
    assert order.choices(0, 2, 2) == ()


@pytest.mark.parametrize(
    ("order", "label"),
    [
        (one_f_one_b(4, 8), "1F1B"),
        (kfkb(4, 8, 3), "3F3B"),
        (gpipe(4, 8), "GPipe"),
        (depth(4, 8, 2), "depth 2"),
        (per_link_depth(4, 8, [1, 3, 1]), "depth 1-3-1"),
        (capped(4, 8, 4), "capped 4"),
        (capped(3, 8, [4, 3, 1]), "capped 4-3-1"),
        (listed(["FFBB", "FBFB"]), "listed"),
    ],
)
def test_labels_and_files(order, label):
    assert order.label == label
    assert str(order.stages) in str(order)
    data = json.loads(json.dumps(order.to_json()))
    assert Order.from_json(data) == order
    assert Order.from_json(data).digest == order.digest


def test_digests_differ_where_orders_do():
    made = [kfkb(s, m, k) for s in (2, 3) for m in (4, 5) for k in (1, 2, 3)]
    made += [depth(s, m, d) for s in (2, 3) for m in (4, 5) for d in (1, 2)]
    made += [capped(s, m, c) for s in (2, 3) for m in (4, 5) for c in (1, 2)]
    assert len({order.digest for order in made}) == len(made)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: kfkb(2, 4, 5), "k = 5 of only 4 .*works: 1 to 4"),
        (lambda: kfkb(2, 4, 0), "k is 0"),
        (lambda: kfkb(0, 4, 1), "stages is 0"),
        (lambda: one_f_one_b(2, 0), "micro_batches is 0"),
        (lambda: depth(2, 4, -1), "delta is -1"),
        (lambda: per_link_depth(4, 8, [1, 2]), "2 depths for the 3 links.*works: .1, 1, 1"),
        (lambda: per_link_depth(3, 8, [1, 1.5]), "depths is 1.5"),
        (lambda: capped(2, 4, 0), "caps is 0"),
        (lambda: capped(3, 4, [1, 2]), "2 caps for 3 stages"),
        (lambda: listed([]), "no stage"),
        (lambda: listed(["FFBB", "FB"]), "stage 1 has the list 'FB', stage 0 has 2 forwards"),
        (lambda: listed(["FXBB"]), "stage 0"),
        (lambda: listed(["FBBF"]), "stage 0 runs B1 before its forward"),
        (lambda: Order.from_json({"family": "zigzag"}), "'zigzag' is no family"),
        (lambda: Order.from_json({"family": "kfkb", "stages": 2}), "fields"),
        (
            lambda: Order.from_json({"family": "listed", "stages": 3, "micro_batches": 2, "steps": ["FFBB"]}),
            "not of 3 stages",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, says):
    with pytest.raises(UsageError, match=says):
        make()


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 8), st.data())
def test_receives_posted_ahead_are_never_too_few_nor_idle(stages, micro_batches, data):
    """A neighbour that goes as far as its list lets it has sent just what there are receives for."""
    depths = data.draw(st.lists(st.integers(0, 3), min_size=stages - 1, max_size=stages - 1))
    order = data.draw(
        st.sampled_from(
            [per_link_depth(stages, micro_batches, depths)]
            + [kfkb(stages, micro_batches, k) for k in range(1, micro_batches + 1)]
        )
    )
    for stage in range(1, stages):
        for backwards in range(micro_batches + 1):
            sent = 0
            for kind, micro_batch in order.actions(stage - 1):
                if kind == "B" and micro_batch >= backwards:
                    break
                sent += kind == "F"
            assert order.inputs_ahead(stage, backwards) == sent
    for stage in range(stages - 1):
        for forwards in range(micro_batches + 1):
            sent = 0
            for kind, micro_batch in order.actions(stage + 1):
                if kind == "F" and micro_batch >= forwards:
                    break
                sent += kind == "B"
            assert order.gradients_ahead(stage, forwards) == sent
    assert order.inputs_ahead(0, 0) == micro_batches
    assert order.gradients_ahead(stages - 1, micro_batches) == micro_batches


@pytest.mark.parametrize("stages", range(1, 7))
def test_torch_accepts_every_list(stages):
    """torch's lowering adds the transfers and plays it all; `_validate_schedule` would accept deadlocks."""
    from torch.distributed.pipelining import schedules as of_torch

    kinds = {"F": of_torch.FORWARD, "B": of_torch.FULL_BACKWARD}
    for micro_batches in range(1, 33):
        made = [kfkb(stages, micro_batches, k) for k in range(1, micro_batches + 1)]
        made += [depth(stages, micro_batches, 2), per_link_depth(stages, micro_batches, range(stages - 1))]
        for order in made:
            compute = {
                stage: [of_torch._Action(stage, kinds[kind], m) for kind, m in order.actions(stage)]
                for stage in range(stages)
            }
            whole = of_torch._add_send_recv(compute, lambda stage: stage, stages)
            played = of_torch._simulate_comms_compute(whole, lambda stage: stage, stages)
            assert {
                stage: sum(a is not None and a.is_compute_op for a in played[stage]) for stage in played
            } == dict.fromkeys(range(stages), 2 * micro_batches)


def test_families_are_those_that_exist():
    assert {"kfkb", "depth", "capped", "listed"} == set(orders.FAMILIES)
