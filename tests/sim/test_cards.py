"""What hosts send and take."""

import math

from hypothesis import given
from hypothesis import strategies as st

from plait.cluster import Cluster, Device, Host, Link
from plait.sim.cards import cards


@given(st.data())
def test_it_is_what_the_cluster_says_link_by_link(data):
    names = [f"node{i}" for i in range(data.draw(st.integers(1, 4)))]
    rate = st.floats(1, 1000)
    pairs = [(a, b) for a in names for b in names if data.draw(st.booleans())]
    links = [Link(source=a, target=b, bandwidth_bytes_per_s=data.draw(rate)) for a, b in pairs]
    cluster = Cluster(
        hosts=tuple(
            Host(name=name, egress_bytes_per_s=data.draw(st.one_of(st.none(), rate))) for name in names
        ),
        devices=tuple(Device(name=f"{name}/0", host=name, memory_bytes=1) for name in names),
        links=(Link(bandwidth_bytes_per_s=data.draw(rate)), *links),
    )
    found = cards(cluster)
    assert found.leaving == {name: cluster.egress_bytes_per_s(name) for name in names}
    assert found.coming == {
        name: max(
            (cluster.link(other, name).bandwidth_bytes_per_s for other in names if other != name),
            default=math.inf,
        )
        for name in names
    }


def test_a_large_cluster_needs_no_link_for_every_pair_of_hosts():
    cluster = Cluster.uniform(hosts=1024, memory="1GiB", bandwidth=1e9)
    found = cards(cluster)
    assert set(found.leaving.values()) == set(found.coming.values()) == {1e9}
    assert len(cluster._links) == 1 + 1024
