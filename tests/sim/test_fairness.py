"""Shares of what is shared: by the rule of the pipeline planner, and as a search of all shares has it."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.pipeline.network import Link, Wire
from plait.pipeline.network import Network as PipelineNetwork
from plait.sim.fairness import Flow, rates


def test_flows_on_one_card_share_it_equally_and_leave_what_they_do_not_want():
    flows = [Flow(((0,),)), Flow(((0,),)), Flow(((0,),), cap=10)]
    assert rates(flows, {0: 100}) == [45, 45, 10]


def test_who_crosses_two_cards_that_others_use_grows_half_as_fast():
    flows = [Flow(((0,),)), Flow(((0, 1),)), Flow(((1,),))]
    assert rates(flows, {0: 90, 1: 90}) == pytest.approx([60, 30, 60])


def test_a_card_that_nobody_else_uses_slows_nobody():
    assert rates([Flow(((0, 1),)), Flow(((0, 2),))], {0: 90, 1: 90, 2: 90}) == [45, 45]


def test_a_link_limits_and_does_not_slow():
    flows = [Flow(((0,),), (2,)), Flow(((0,),), (2,)), Flow(((0,),))]
    assert rates(flows, {0: 90, 2: 40}) == [20, 20, 50]


def test_a_ring_has_the_pace_of_its_most_crowded_edge():
    ring = Flow(((0, 5), (1, 6), (2, 7)))
    alone = dict.fromkeys(range(8), 100.0)
    assert rates([ring], alone) == [100]
    # One other on the card of one edge; then others on both cards of it, where the ring is held up twice.
    assert rates([ring, Flow(((0,),))], alone) == [50, 50]
    assert rates([ring, Flow(((0,),)), Flow(((5,),))], alone) == pytest.approx([100 / 3, 200 / 3, 200 / 3])


def test_what_is_used_twice_is_used_twice():
    assert rates([Flow(((0, 2), (0, 3)))], {0: 100, 2: 100, 3: 100}) == [50]
    # Three uses of the card, two of them by the first.
    assert rates([Flow(((0,), (0,))), Flow(((0,),))], {0: 90}) == pytest.approx([30, 30])


def test_nothing_limits_what_has_no_limit():
    assert rates([Flow(()), Flow(((0,),))], {0: math.inf}) == [math.inf, math.inf]
    assert rates([], {}) == []


def test_a_dead_link_stops_its_flows_alone():
    assert rates([Flow(((0,),), (1,)), Flow(((0,),))], {0: 10, 1: 0}) == [0, 10]


RATES = st.floats(1, 1000)


@settings(deadline=None)
@given(st.lists(st.tuples(RATES, RATES), min_size=1, max_size=6), st.data())
def test_it_is_the_rule_of_the_pipelines_planner(pairs, data):
    links = tuple(Link(forward=Wire(bytes_per_s=f), backward=Wire(bytes_per_s=b)) for f, b in pairs)
    hosts = tuple(data.draw(st.integers(0, 3)) for _ in range(len(pairs) + 1))
    cards = tuple(data.draw(RATES) for _ in range(1 + max(hosts)))
    network = PipelineNetwork(links=links, hosts=hosts, egress_bytes_per_s=cards)
    active = data.draw(st.integers(1, 4 ** len(pairs) - 1))
    expected = network.rates(active)
    fastest = {}
    for wire, each in enumerate(network.wires):
        source, target = (hosts[wire // 2], hosts[wire // 2 + 1])[:: -1 if wire % 2 else 1]
        if source != target:
            fastest[target] = max(fastest.get(target, 0), each.bytes_per_s)
    capacities = {100 + host: rate for host, rate in enumerate(cards)}
    capacities |= {200 + host: rate for host, rate in fastest.items()}
    capacities |= {wire: each.bytes_per_s for wire, each in enumerate(network.wires)}
    flows = []
    for wire in expected:
        source, target = (hosts[wire // 2], hosts[wire // 2 + 1])[:: -1 if wire % 2 else 1]
        flows.append(Flow(((100 + source, 200 + target),) if source != target else (), (wire,)))
    found = rates(flows, capacities)
    assert dict(zip(expected, found, strict=True)) == pytest.approx(expected, rel=1e-9)


def feasible(allocation, uses, capacities, caps):
    return all(rate <= cap for rate, cap in zip(allocation, caps, strict=True)) and all(
        sum(rate for rate, its in zip(allocation, uses, strict=True) if r in its) <= capacity
        for r, capacity in capacities.items()
    )


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_where_all_are_held_up_equally_often_it_is_the_best_for_the_worst_off(data):
    """Max-min fair: of all allocations, the one whose smallest rate is largest, then the next smallest."""
    count = data.draw(st.integers(2, 3))
    capacities = {r: data.draw(st.integers(1, 4)) for r in range(3)}
    # Cards as links: they limit, and all grow alike.
    uses = [data.draw(st.sets(st.integers(0, 2), min_size=1)) for _ in range(count)]
    caps = [data.draw(st.sampled_from([1, 2, 4])) for _ in range(count)]
    flows = [Flow((), tuple(its), cap) for its, cap in zip(uses, caps, strict=True)]
    found = rates(flows, capacities)
    # With up to three flows, all shares are multiples of a sixth.
    best = max(
        (
            sorted(allocation)
            for allocation in itertools.product(range(25), repeat=count)
            if feasible(allocation, uses, {r: 6 * c for r, c in capacities.items()}, [6 * c for c in caps])
        ),
    )
    assert sorted(6 * rate for rate in found) == pytest.approx(best)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_nothing_is_over_used_and_nobody_could_have_more(data):
    resources = range(6)
    capacities = {r: data.draw(RATES) for r in resources}
    edge = st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True).map(tuple)
    flows = [
        Flow(
            data.draw(st.lists(edge, min_size=1, max_size=3).map(tuple)),
            data.draw(st.lists(st.integers(4, 5), max_size=1).map(tuple)),
            data.draw(st.one_of(st.just(math.inf), RATES)),
        )
        for _ in range(data.draw(st.integers(1, 6)))
    ]
    found = rates(flows, capacities)
    uses = [[*itertools.chain(*flow.edges), *flow.links] for flow in flows]
    full = set()
    for r, capacity in capacities.items():
        used = sum(rate * its.count(r) for rate, its in zip(found, uses, strict=True))
        assert used <= capacity * (1 + 1e-9)
        if used >= capacity * (1 - 1e-9):
            full.add(r)
    for flow, rate, its in zip(flows, found, uses, strict=True):
        assert 0 < rate <= flow.cap * (1 + 1e-9)
        assert full & set(its) or rate >= flow.cap * (1 - 1e-9)


@settings(deadline=None)
@given(st.permutations(range(5)), st.data())
def test_the_order_of_flows_is_of_no_consequence(order, data):
    edge = st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True).map(tuple)
    flows = [Flow((data.draw(edge),)) for _ in range(5)]
    capacities = {r: data.draw(st.floats(1, 100)) for r in range(4)}
    found, other = rates(flows, capacities), rates([flows[i] for i in order], capacities)
    assert [found[i] for i in order] == pytest.approx(other)
