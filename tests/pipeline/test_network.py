"""Fair sharing of wires and hosts."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import UsageError
from plait.pipeline.network import Link, Network, Wire


def wires(*rates):
    return tuple(Link(forward=Wire(bytes_per_s=f), backward=Wire(bytes_per_s=b)) for f, b in rates)


def test_a_wire_alone_has_its_rate():
    network = Network(links=wires((10, 20), (30, 40)))
    assert [network.rates(1 << wire) for wire in range(4)] == [{0: 10}, {1: 20}, {2: 30}, {3: 40}]


def test_a_middle_stage_shares_its_card_between_both_neighbours():
    network = Network(links=wires((100, 100), (100, 100)))
    # Wire 1 leads from stage 1 back to stage 0, wire 2 from stage 1 on to stage 2: one egress.
    assert network.rates(0b0110) == {1: 50, 2: 50}
    # Wires 0 and 3 both lead to stage 1: one ingress.
    assert network.rates(0b1001) == {0: 50, 3: 50}
    assert network.rates(0b0011) == {0: 100, 1: 100}


def test_who_is_held_up_twice_gets_half_of_what_the_others_get():
    network = Network(links=wires((90, 90), (90, 90), (90, 90)))
    # From stage 1 to 2, beside 1 to 0 at its egress and 3 to 2 at its ingress.
    assert network.rates(0b100110) == pytest.approx({1: 60, 2: 30, 5: 60})


def test_what_a_slow_wire_leaves_goes_to_the_other():
    network = Network(links=wires((100, 100), (40, 40)))
    assert network.rates(0b0110) == {1: 60, 2: 40}


def test_stages_on_one_host_share_its_card_and_not_the_wire_within():
    network = Network(links=wires((1000, 1000), (100, 100)), hosts=(0, 0, 1))
    assert network.rates(0b0111) == {0: 1000, 1: 1000, 2: 100}
    two = Network(links=wires((100, 100), (1000, 1000), (100, 100)), hosts=(0, 1, 1, 2))
    assert two.rates(0b010010) == {1: 50, 4: 50}


def test_capacities_of_hosts_may_be_given():
    network = Network(links=wires((100, 100), (100, 100)), egress_bytes_per_s=(100, 150, 100))
    assert network.rates(0b0110) == {1: 75, 2: 75}


RATES = st.floats(1, 1000)


@settings(deadline=None)
@given(st.lists(st.tuples(RATES, RATES), min_size=1, max_size=5), st.data())
def test_shares_are_feasible_and_none_can_grow(pairs, data):
    hosts = tuple(data.draw(st.integers(0, 3)) for _ in range(len(pairs) + 1))
    network = Network(links=wires(*pairs), hosts=hosts)
    active = data.draw(st.integers(1, 4 ** len(pairs) - 1))
    rates = network.rates(active)
    assert sorted(rates) == [wire for wire in range(2 * len(pairs)) if active >> wire & 1]
    ends = {w: ((hosts[w // 2], hosts[w // 2 + 1])[:: -1 if w % 2 else 1]) for w in range(2 * len(pairs))}
    users = {
        (side, host): [w for w, end in ends.items() if end[side] == host and end[0] != end[1]]
        for side in (0, 1)
        for host in set(hosts)
    }
    busy = {card: [w for w in its if w in rates] for card, its in users.items()}
    crossed = {w: max(1, sum(len(its) > 1 for its in busy.values() if w in its)) for w in rates}
    content = {wire for wire, rate in rates.items() if math.isclose(rate, network.wires[wire].bytes_per_s)}
    for wire, rate in rates.items():
        assert rate <= network.wires[wire].bytes_per_s * (1 + 1e-9)
    for card, its in busy.items():
        if not its:
            continue
        capacity = max(network.wires[w].bytes_per_s for w in users[card])
        assert sum(rates[w] for w in its) <= capacity * (1 + 1e-9)
        if math.isclose(sum(rates[w] for w in its), capacity):
            most = max(rates[w] * crossed[w] for w in its)
            content |= {w for w in its if math.isclose(rates[w] * crossed[w], most)}
    # Fair: everyone is at its own rate, or has the largest share, by its weight, of something that is full.
    assert content == set(rates)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Wire(latency_ms=-1), "latency of -1 ms"),
        (lambda: Wire(bytes_per_s=0), "rate of 0 bytes/s"),
        (lambda: Network(links=wires((1, 1)), hosts=(0,)), "1 hosts are named for 2 stages"),
        (lambda: Network(links=wires((1, 1)), egress_bytes_per_s=(1,)), "for 2 hosts"),
    ],
)
def test_what_cannot_be_is_refused(make, says):
    with pytest.raises(UsageError, match=says):
        make()
