"""Messages and collectives that share a cluster's network."""

import math

import pytest

from plait.cluster import Cluster, Device, Host, Link
from plait.collective import ring_ms
from plait.errors import UsageError
from plait.sim import Cross, Network, Simulation, Trace


def uniform(hosts, **changes):
    """1000 bytes/s, and 1 ms, between hosts."""
    return Cluster.uniform(**{"hosts": hosts, "memory": 1, "bandwidth": 1000.0, "latency": 0.001} | changes)


def ends_of(cluster, sends, **settings):
    """When each of (at, source, target, bytes) arrives."""
    simulation = Simulation()
    network = Network(simulation, cluster, **settings)
    ends = [None] * len(sends)
    for place, (at, source, target, size) in enumerate(sends):

        def arrived(place=place):
            assert ends[place] is None
            ends[place] = simulation.now_ms

        simulation.at(
            at,
            lambda args=(f"{place}", f"node{source}/0", f"node{target}/0", size, arrived): network.send(
                *args
            ),
        )
    simulation.run()
    return ends


def test_alone_a_message_takes_its_bytes_and_the_latency():
    assert ends_of(uniform(2), [(5, 0, 1, 100)]) == [5 + 100 + 1]
    assert ends_of(uniform(2), [(5, 0, 1, 0)]) == [5 + 1]


def test_what_leaves_a_host_shares_its_card():
    # Both at half the rate until the first is through.
    assert ends_of(uniform(3), [(0, 0, 1, 100), (0, 0, 2, 50)]) == [151, 101]
    # Both directions of a link are apart.
    assert ends_of(uniform(2), [(0, 0, 1, 100), (0, 1, 0, 100)]) == [101, 101]
    # What comes later takes its share from then on.
    assert ends_of(uniform(3), [(0, 0, 1, 100), (50, 0, 2, 50)]) == [151, 151]


def test_what_comes_to_a_host_shares_its_card():
    assert ends_of(uniform(3), [(0, 0, 2, 100), (0, 1, 2, 100)]) == [201, 201]
    assert ends_of(uniform(3), [(0, 0, 2, 100), (0, 1, 2, 100)], ingress={"node2": 2000.0}) == [101, 101]


def test_devices_of_one_host_have_the_link_within_and_share_the_card():
    cluster = uniform(2, devices_per_host=3, local_bandwidth=10_000.0, local_latency=0.0)
    simulation = Simulation()
    network = Network(simulation, cluster)
    ends = {}
    for name, source, target in (
        ("within", "node0/0", "node0/1"), ("within too", "node0/1", "node0/2"),
        ("out", "node0/0", "node1/0"), ("out too", "node0/1", "node1/1"),
    ):  # fmt: skip
        network.send(name, source, target, 100, lambda name=name: ends.update({name: simulation.now_ms}))
    simulation.run()
    assert ends == {"within": 10, "within too": 10, "out": 201, "out too": 201}
    assert network.egress_bytes("node0") == 200
    assert network.moved_bytes(("node0", "node1")) == 200
    assert network.egress_bytes("node1") == 0


def test_the_egress_that_a_host_states_holds():
    cluster = Cluster(
        hosts=(Host(name="node0", egress_bytes_per_s=500.0), Host(name="node1")),
        devices=tuple(Device(name=f"node{i}/0", host=f"node{i}", memory_bytes=1) for i in range(2)),
        links=(Link(bandwidth_bytes_per_s=1000.0),),
    )
    assert ends_of(cluster, [(0, 0, 1, 100)]) == [200]
    assert ends_of(cluster, [(0, 1, 0, 100)]) == [100]


def test_links_may_be_slower_than_the_cards():
    hosts = ("node0", "node1", "node2")
    cluster = Cluster(
        hosts=tuple(Host(name=name) for name in hosts),
        devices=tuple(Device(name=f"{name}/0", host=name, memory_bytes=1) for name in hosts),
        links=(
            Link(bandwidth_bytes_per_s=1000.0),
            Link(source="node0", target="node1", bandwidth_bytes_per_s=200.0, latency_ms=3.0),
        ),
    )
    # The card of node0 has 1000, of which the slow link takes 200.
    assert ends_of(cluster, [(0, 0, 1, 100), (0, 0, 2, 80)]) == [503, 100]
    assert ends_of(cluster, [(0, 0, 1, 100), (0, 0, 1, 100)]) == [1003, 1003]


def test_a_channel_is_first_in_first_out_and_one_at_a_time():
    simulation = Simulation()
    network = Network(simulation, uniform(3))
    ends = []
    for name, size, channel in (("a", 100, 1), ("b", 10, 1), ("c", 10, None)):
        network.send(
            name, "node0/0", "node1/0", size,
            lambda name=name: ends.append((name, simulation.now_ms)), channel=channel, track="wire",
        )  # fmt: skip
    simulation.run()
    # The third has half of the card beside the first, and the second waits for it.
    assert ends == [("c", 21), ("a", 111), ("b", 121)]
    spans = [(span.name, span.start_ms, span.end_ms) for span in simulation.timeline.spans]
    assert spans == [("c", 0, 21), ("a", 0, 111), ("b", 110, 121)]


def test_a_collective_alone_takes_what_it_takes_alone():
    cluster = uniform(4, devices_per_host=2)
    devices = [device.name for device in cluster.devices]
    size, link = 800, cluster.link("node0", "node1")
    alone_ms = ring_ms(size, len(devices), link)
    simulation = Simulation()
    network = Network(simulation, cluster)
    edge_bytes = 2 * (len(devices) - 1) * size / len(devices)
    ends = []
    network.collective(
        "a", devices, edge_bytes, alone_ms, lambda: ends.append(simulation.now_ms), track="wire"
    )
    simulation.run()
    assert ends == pytest.approx([alone_ms], rel=1e-12)
    assert [network.egress_bytes(host.name) for host in cluster.hosts] == [edge_bytes] * 4
    assert [span.name for span in simulation.timeline.spans] == ["a"]


def test_collectives_and_messages_hold_each_other_up():
    simulation = Simulation()
    network = Network(simulation, uniform(4))
    names, ends = [f"node{i}/0" for i in range(4)], {}
    network.collective("one", names, 100, 100, lambda: ends.update(one=simulation.now_ms))
    network.collective("other", names[:2], 100, 100, lambda: ends.update(other=simulation.now_ms))
    network.send("message", names[2], names[3], 25, lambda: ends.update(message=simulation.now_ms))
    simulation.run()
    # The ring and the message at half of a card until 50, then ring and ring.
    assert ends == {"message": 51, "one": 200, "other": 200}


def test_a_collective_that_does_not_fill_the_wire_leaves_the_rest_to_others():
    simulation = Simulation()
    network = Network(simulation, uniform(2))
    ends = {}
    network.collective("a", ["node0/0", "node1/0"], 100, 400, lambda: ends.update(a=simulation.now_ms))
    network.send("b", "node0/0", "node1/0", 75, lambda: ends.update(b=simulation.now_ms))
    simulation.run()
    assert ends == {"a": 400, "b": 101}


def test_a_collective_within_a_host_shares_nothing():
    simulation = Simulation()
    network = Network(simulation, uniform(1, devices_per_host=4))
    ends = []
    for _ in range(2):
        network.collective("a", ["node0/0", "node0/3"], 1e9, 7, lambda: ends.append(simulation.now_ms))
    simulation.run()
    assert ends == [7, 7]
    assert network.egress_bytes("node0") == 0


def test_what_is_paused_goes_on_later_and_leaves_its_share_to_others_meanwhile():
    simulation = Simulation()
    network = Network(simulation, uniform(4))
    names, ends = [f"node{i}/0" for i in range(4)], {}
    ring = network.collective(
        "ring", names, 100, 100, lambda: ends.update(ring=simulation.now_ms), track="wire"
    )
    network.send("message", names[0], names[1], 100, lambda: ends.update(message=simulation.now_ms))
    simulation.at(50, lambda: network.pause(ring))
    simulation.at(60, lambda: network.pause(ring))
    simulation.at(100, lambda: network.resume(ring))
    simulation.at(100, lambda: network.resume(ring))
    simulation.run()
    # Half a card each until 50, the message alone until 100, then half a card each until it is through.
    assert ends == {"message": 151, "ring": 200}
    assert [(span.start_ms, span.end_ms) for span in simulation.timeline.spans] == [(0, 50), (100, 200)]
    assert network.egress_bytes("node0") == 200


def test_what_leaves_at_the_moment_of_a_pause_has_left():
    simulation = Simulation()
    network = Network(simulation, uniform(2, devices_per_host=2))
    ends = []
    for devices in (["node0/0", "node1/0"], ["node0/0", "node0/1"]):
        one = network.collective("a", devices, 30, 30, lambda: ends.append(simulation.now_ms))
        simulation.at(10, lambda one=one: network.pause(one))
        simulation.at(20, lambda one=one: network.resume(one))
        # Asked for before the end is known, so it comes first.
        simulation.at(40, lambda one=one: network.pause(one))
    simulation.run()
    assert ends == [40, 40]
    assert network.moving() == []
    network.pause(one)
    network.resume(one)
    simulation.run()
    assert ends == [40, 40]


def test_a_channel_waits_for_what_is_paused():
    simulation = Simulation()
    network = Network(simulation, uniform(2))
    ends = []
    first, second = (
        network.send("a", "node0/0", "node1/0", 10, lambda: ends.append(simulation.now_ms), channel="a")
        for _ in range(2)
    )
    network.pause(second)
    network.pause(first)
    simulation.at(100, lambda: network.resume(first))
    simulation.run()
    assert ends == [111, 121]


def test_a_trace_is_a_factor_on_a_card_or_a_link():
    half = Trace.of([(0, 1.0), (50, 0.5)])
    for key in ("node0", "node1", ("node0", "*"), ("*", "node1"), ("node0", "node1")):
        assert ends_of(uniform(2), [(0, 0, 1, 100)], traces={key: half}) == [151]
    for key in (("*", "node0"), ("node1", "*"), ("node1", "node0")):
        assert ends_of(uniform(2), [(0, 0, 1, 100)], traces={key: half}) == [101]
    both = {"node0": half, ("node0", "*"): Trace.of([(0, 1.0), (70, 0.2)])}
    assert ends_of(uniform(2), [(0, 0, 1, 100)], traces=both) == pytest.approx([471])


def test_a_trace_that_repeats_does_not_keep_the_simulation_going():
    trace = Trace.of([(0, 1.0), (10, 0.0)], repeat_ms=20)
    simulation = Simulation()
    cross = [Cross(source="node0", target="node1")]
    network = Network(simulation, uniform(3), traces={"node0": trace}, cross=cross)
    ends = []
    network.send("a", "node0/0", "node2/0", 10, lambda: ends.append(simulation.now_ms))
    simulation.run(most_events=1000)
    assert ends == [31]
    assert simulation.now_ms == 31
    # And is followed again when there is something to send: only half of the card, half of the time.
    simulation.at(
        1000, lambda: network.send("a", "node0/0", "node2/0", 10, lambda: ends.append(simulation.now_ms))
    )
    simulation.run(most_events=1000)
    assert ends == [31, 1031]


def test_other_peoples_traffic_takes_its_share_for_ever():
    cluster = uniform(3)
    assert ends_of(cluster, [(0, 0, 1, 100)], cross=[Cross(source="node0", target="node2")]) == [201]
    # Three flows share both cards with each other: each has half the weight of the message.
    cross = [Cross(source="node0", target="node2", flows=3)]
    assert ends_of(cluster, [(0, 0, 1, 100)], cross=cross) == [251]
    cross = [Cross(source="node0", target="node2", bytes_per_s=200)]
    assert ends_of(cluster, [(0, 0, 1, 80)], cross=cross) == [101]


def test_many_devices_are_no_trouble():
    cluster = uniform(256, devices_per_host=4)
    devices = [device.name for device in cluster.devices]
    simulation = Simulation()
    network = Network(simulation, cluster)
    ends = []
    network.collective("all", devices, 100, 100, lambda: ends.append(simulation.now_ms))
    network.send("a", devices[0], devices[4], 50, lambda: ends.append(simulation.now_ms))
    simulation.run()
    assert ends == [101, 150]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"traces": {"node9": Trace.constant(1)}}, "no host 'node9'"),
        ({"traces": {("node0", "node9"): Trace.constant(1)}}, "no host 'node9'"),
        ({"traces": {("*", "*"): Trace.constant(1)}}, r"no host '\*'"),
        ({"ingress": {"node9": 1.0}}, "no host 'node9'"),
        ({"ingress": {"node0": 0.0}}, "node0' takes 0.0 bytes/s"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, says):
    with pytest.raises(UsageError, match=says):
        Network(Simulation(), uniform(2), **settings)


def test_what_cannot_be_is_refused():
    network = Network(Simulation(), uniform(2))
    with pytest.raises(UsageError, match="no device 'nobody'"):
        network.send("a", "node0/0", "nobody", 1, lambda: None)
    with pytest.raises(UsageError, match="message 'a' of -1 bytes"):
        network.send("a", "node0/0", "node1/0", -1, lambda: None)
    with pytest.raises(UsageError, match="collective 'a': edge_bytes is -1"):
        network.collective("a", ["node0/0"], -1, 1, lambda: None)
    with pytest.raises(UsageError, match="collective 'a': alone_ms is inf"):
        network.collective("a", ["node0/0"], 1, math.inf, lambda: None)
    with pytest.raises(UsageError, match="collective 'a' of no device"):
        network.collective("a", [], 1, 1, lambda: None)
    with pytest.raises(UsageError, match="cross traffic of 0 bytes/s"):
        Cross(source="node0", target="node1", bytes_per_s=0)
    with pytest.raises(UsageError, match="cross traffic of 0 flows"):
        Cross(source="node0", target="node1", flows=0)
