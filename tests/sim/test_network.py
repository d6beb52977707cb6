"""Messages and collectives that share a cluster's network."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cluster import Cluster, Device, Host, Link
from plait.collective import ring_ms
from plait.errors import UsageError
from plait.pipeline.placement import placement
from plait.sim import Cross, Network, Simulation, Trace
from plait.sim.fairness import Flow, rates


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


@st.composite
def clusters(draw, most=4, least=100):
    hosts = [f"node{i}" for i in range(draw(st.integers(2, most)))]
    rate = st.floats(least, 10_000)
    links = [Link(bandwidth_bytes_per_s=draw(rate), latency_ms=draw(st.floats(0, 5)))]
    for a in hosts:
        for b in hosts:
            if a != b and draw(st.booleans()):
                links.append(
                    Link(
                        source=a, target=b, bandwidth_bytes_per_s=draw(rate), latency_ms=draw(st.floats(0, 5))
                    )
                )
    return Cluster(
        hosts=tuple(Host(name=name, egress_bytes_per_s=draw(st.one_of(st.none(), rate))) for name in hosts),
        devices=tuple(Device(name=f"{name}/0", host=name, memory_bytes=1) for name in hosts),
        links=tuple(links),
    )


@st.composite
def traffic(draw, cluster):
    """(at, devices of a ring or source and target, bytes, the most rate)."""
    places = st.integers(0, len(cluster.hosts) - 1)
    found = []
    for _ in range(draw(st.integers(1, 8))):
        hosts = draw(st.lists(places, min_size=2, max_size=len(cluster.hosts), unique=True))
        ring = draw(st.booleans())
        cap = draw(st.floats(50, 5000)) if ring else math.inf
        found.append((draw(st.integers(0, 50)), hosts if ring else hosts[:2], draw(st.integers(1, 500)), cap))
    return found


def brute_force(cluster, flows, factors=None):
    """When each flow ends: all rates anew at every event, with everything that there is as a resource."""
    names = [host.name for host in cluster.hosts]
    others = {name: [other for other in names if other != name] for name in names}
    numbers = {}

    def number(what):
        return numbers.setdefault(what, len(numbers))

    def capacities(now):
        found = {}
        for what, place in numbers.items():
            kind, a, b = what
            if kind == "out":
                rate = cluster.egress_bytes_per_s(a)
            elif kind == "in":
                rate = max(cluster.link(other, a).bandwidth_bytes_per_s for other in others[a])
            else:
                rate = cluster.link(a, b).bandwidth_bytes_per_s
            found[place] = rate * (factors(what, now) if factors else 1.0)
        return found

    shapes = []
    for _, hosts, _, cap in flows:
        order = [names[place] for place in hosts]
        hops = (
            [(order[0], order[1])] if cap == math.inf else [*zip(order, [*order[1:], order[0]], strict=True)]
        )
        edges = tuple((number(("out", a, a)), number(("in", b, b))) for a, b in hops)
        shapes.append(Flow(edges, tuple(number(("link", a, b)) for a, b in hops), cap))
    left = [float(size) for _, _, size, _ in flows]
    ends, now = [None] * len(flows), 0.0
    while None in ends:
        active = [i for i, flow in enumerate(flows) if flow[0] <= now and ends[i] is None]
        found = rates([shapes[i] for i in active], capacities(now))
        next_ms = min([flow[0] for flow in flows if flow[0] > now], default=math.inf)
        if factors:
            next_ms = min(next_ms, math.floor(now) + 1)
        next_ms = min(
            [next_ms, *(now + 1e3 * left[i] / rate for i, rate in zip(active, found, strict=True) if rate)]
        )
        for i, rate in zip(active, found, strict=True):
            left[i] -= rate * (next_ms - now) / 1e3
            if left[i] <= 1e-9:
                ends[i] = next_ms
        now = next_ms
    for i, (_, hosts, _, cap) in enumerate(flows):
        if cap == math.inf:
            ends[i] += cluster.link(names[hosts[0]], names[hosts[1]]).latency_ms
    return ends


def play(cluster, flows, **settings):
    simulation = Simulation()
    network = Network(simulation, cluster, **settings)
    names, ends = [device.name for device in cluster.devices], [None] * len(flows)

    def begin(place, hosts, size, cap):
        devices = [names[host] for host in hosts]
        then = lambda: ends.__setitem__(place, simulation.now_ms)  # noqa: E731
        if cap == math.inf:
            network.send(f"{place}", *devices, size, then)
        else:
            network.collective(f"{place}", devices, size, 1e3 * size / cap, then)

    for place, (at, *rest) in enumerate(flows):
        simulation.at(at, lambda args=(place, *rest): begin(*args))
    return simulation, network, ends


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_as_a_brute_force_has_it(data):
    cluster = data.draw(clusters())
    flows = data.draw(traffic(cluster))
    simulation, _, ends = play(cluster, flows)
    simulation.run()
    assert ends == pytest.approx(brute_force(cluster, flows), rel=1e-9)


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_so_it_is_with_rings_of_many_hosts(data):
    cluster = uniform(12)
    flows = data.draw(traffic(cluster)) + data.draw(traffic(cluster))
    simulation, _, ends = play(cluster, flows)
    simulation.run()
    assert ends == pytest.approx(brute_force(cluster, flows), rel=1e-9)


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_so_it_is_under_traces(data):
    cluster = data.draw(clusters(3, least=5000))
    flows = data.draw(traffic(cluster))
    points = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=4)
    traces = {}
    for key in ("node0", ("node1", "*"), ("node0", "node1")):
        if data.draw(st.booleans()):
            values = [*data.draw(points), 1.0]
            traces[key] = Trace.of(
                ((10.0 * i, v) for i, v in enumerate(values)), repeat_ms=10.0 * len(values)
            )

    def factor(what, now):
        kind, a, b = what
        keys = {"out": [a, (a, "*")], "in": [a, ("*", a)], "link": [(a, b)]}[kind]
        return math.prod(traces[key].at(now) for key in keys if key in traces)

    simulation, _, ends = play(cluster, flows, traces=traces)
    simulation.run()
    assert ends == pytest.approx(brute_force(cluster, flows, factor), rel=1e-6)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_bytes_in_are_bytes_out_and_nothing_is_ever_over_used(data):
    cluster = data.draw(clusters())
    flows = data.draw(traffic(cluster))
    simulation, network, ends = play(cluster, flows)
    while simulation.coming:
        simulation.run(until_ms=simulation.now_ms + data.draw(st.floats(1, 40), label="how far"))
        used = {}
        for each in network.moving():
            for a, b in each.hops:
                for resource in (("out", a), ("in", b), (a, b)):
                    used[resource] = used.get(resource, 0) + each.bytes_per_s
        for (kind, name), rate in used.items():
            if kind == "out":
                capacity = cluster.egress_bytes_per_s(name)
            elif kind == "in":
                capacity = max(
                    cluster.link(host.name, name).bandwidth_bytes_per_s
                    for host in cluster.hosts if host.name != name
                )  # fmt: skip
            else:
                capacity = cluster.link(kind, name).bandwidth_bytes_per_s
            assert rate <= capacity * (1 + 1e-9)
    assert None not in ends
    assert network.moving() == []
    sent = {host.name: 0 for host in cluster.hosts}
    for _, hosts, size, cap in flows:
        for place in hosts if cap < math.inf else hosts[:1]:
            sent[f"node{place}"] += size
    assert {name: network.egress_bytes(name) for name in sent} == sent
    pairs = [(a, b) for a in sent for b in sent if a != b]
    assert math.fsum(network.moved_bytes(pair) for pair in pairs) == sum(sent.values())


@settings(deadline=None, max_examples=50)
@given(st.data(), st.floats(1, 10))
def test_a_faster_link_never_makes_a_lonely_flow_slower(data, factor):
    cluster = data.draw(clusters())
    flow = data.draw(traffic(cluster))[:1]
    simulation, _, before = play(cluster, flow)
    simulation.run()
    place = data.draw(st.integers(0, len(cluster.links) - 1))
    links = list(cluster.links)
    link = links[place]
    links[place] = Link(
        source=link.source, target=link.target, latency_ms=link.latency_ms,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor,
    )  # fmt: skip
    faster = Cluster(hosts=cluster.hosts, devices=cluster.devices, links=tuple(links))
    simulation, _, after = play(faster, flow)
    simulation.run()
    assert after[0] <= before[0] * (1 + 1e-12)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_rates_are_those_of_the_pipelines_planner(data):
    cluster = data.draw(clusters())
    stages = len(cluster.devices)
    there = placement(cluster, stages).network
    active = data.draw(st.integers(1, 4 ** (stages - 1) - 1))
    coming = {}
    for wire, each in enumerate(there.wires):
        target = f"node{wire // 2 + 1 - wire % 2}"
        coming[target] = max(coming.get(target, 0.0), each.bytes_per_s)
    simulation = Simulation()
    network = Network(simulation, cluster, ingress=coming)
    for wire in range(2 * (stages - 1)):
        if active >> wire & 1:
            source, target = (wire // 2, wire // 2 + 1)[:: -1 if wire % 2 else 1]
            network.send(f"{wire}", f"node{source}/0", f"node{target}/0", 1e6, lambda: None)
    simulation.run(until_ms=1)
    found = {int(each.name): each.bytes_per_s for each in network.moving()}
    assert found == pytest.approx(there.rates(active), rel=1e-9)


def test_equal_runs_are_equal():
    cluster = uniform(6)
    flows = [(i % 7, [i % 6, (i * i + 1 + i) % 6], 10 + i, math.inf) for i in range(60) if (i * i + 1) % 6]

    def once():
        simulation, network, ends = play(cluster, flows)
        simulation.run()
        return ends, simulation.events, network.egress_bytes("node0")

    assert once() == once()


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
