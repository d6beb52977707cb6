"""Ways through a cluster, and what they share."""

import pytest

from plait.cluster import Cluster
from plait.errors import UsageError
from plait.sim import Trace
from plait.sim.route import MANY, Routes


def routes(traces=None, **settings):
    given = {"hosts": 3, "devices_per_host": 2, "memory": 1, "bandwidth": 100.0, "latency": 0.001}
    return Routes(Cluster.uniform(**given | settings), traces or {}, {})


def test_all_devices_of_two_hosts_take_one_way():
    there = routes()
    way = there.way("node0/0", "node1/0")
    assert there.way("node0/1", "node1/1") is there.way("node0", "node1") is way
    assert there.way("node1/0", "node0/0") is not way
    assert (way.hops, way.latency_ms, there.alone(way)) == ((("node0", "node1"),), 1, 100)


def test_ways_from_a_host_share_its_egress_and_ways_to_it_its_ingress():
    there = routes()
    uses = {(a, b): set(there.way(f"node{a}", f"node{b}").uses) for a in range(3) for b in range(3) if a != b}
    for (a, b), one in uses.items():
        for (c, d), other in uses.items():
            assert bool(one & other) == (a == c or b == d)


def test_within_a_host_every_pair_of_devices_has_a_way_of_its_own():
    there = routes(local_bandwidth=1000.0, local_latency=0.0)
    way, back = there.way("node0/0", "node0/1"), there.way("node0/1", "node0/0")
    assert (way.hops, there.alone(way), way.latency_ms) == ((), 1000, 0)
    assert not set(way.uses) & set(back.uses)


def test_a_ring_goes_around_the_hosts_and_comes_back():
    there = routes()
    ring = there.ring(["node0/0", "node0/1", "node1/0", "node2/1"])
    assert ring.hops == (("node0", "node1"), ("node1", "node2"), ("node2", "node0"))
    assert set(ring.uses.values()) == {1}
    assert there.ring(["node0/0", "node0/1"]).hops == ()
    # One that comes by a host twice has half of its card each time.
    twice = there.ring(["node0/0", "node1/0", "node0/1", "node2/0"])
    assert sorted(twice.uses.values()) == [1, 1, 1, 1, 2, 2]
    assert there.alone(twice) == 50


def test_large_rings_are_not_written_down_with_their_resources():
    there = routes(hosts=MANY)
    assert there.ring([f"node{i}/0" for i in range(MANY)]).large
    assert not there.ring([f"node{i}/0" for i in range(MANY // 2)]).large


def test_capacities_follow_their_traces():
    there = routes({"node0": Trace.of([(0, 1.0), (10, 0.5)]), ("node0", "*"): Trace.of([(0, 1.0), (5, 0.5)])})
    way, back = there.way("node0", "node1"), there.way("node1", "node0")
    assert (len(way.traced), len(back.traced)) == (1, 1)
    (out,), (into,) = way.traced, back.traced
    assert (there.next_change(out, 0), there.next_change(into, 0)) == (5, 10)
    assert not there.refresh(out, 4)
    assert there.refresh(out, 5)
    assert (there.alone(way), there.alone(back)) == (50, 100)
    assert there.refresh(out, 10)
    assert there.refresh(into, 10)
    assert (there.alone(way), there.alone(back)) == (25, 50)


def test_unknown_names_are_refused():
    with pytest.raises(UsageError, match="no device 'node9/0'"):
        routes().way("node0/0", "node9/0")
    with pytest.raises(UsageError, match="no device 'node9/0'"):
        routes().ring(["node0/0", "node9/0"])
