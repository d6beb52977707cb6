"""The network on drawn clusters and traffic, against a brute force, the planner and what must always hold."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cluster import Cluster, Device, Host, Link
from plait.pipeline.placement import placement
from plait.sim import Network, Simulation, Trace
from plait.sim.fairness import Flow, rates


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
    cluster = Cluster.uniform(hosts=12, memory=1, bandwidth=1000.0, latency=0.001)
    flows = data.draw(traffic(cluster)) + data.draw(traffic(cluster))
    simulation, _, ends = play(cluster, flows)
    simulation.run()
    assert ends == pytest.approx(brute_force(cluster, flows), rel=1e-9)


@settings(deadline=None, max_examples=10)
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
    cluster = Cluster.uniform(hosts=6, memory=1, bandwidth=1000.0, latency=0.001)
    flows = [(i % 7, [i % 6, (i * i + 1 + i) % 6], 10 + i, math.inf) for i in range(60) if (i * i + 1) % 6]

    def once():
        simulation, network, ends = play(cluster, flows)
        simulation.run()
        return ends, simulation.events, network.egress_bytes("node0")

    assert once() == once()
