"""Clusters as data: what fits together, what is refused, what a planner asks."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.cluster import Cluster, Device, Host, Link, Tier
from plait.errors import UsageError

GBIT = 1.25e8


def pair(**changes: Any) -> Cluster:
    """Two hosts, a with two devices and b with one; the wire is slower on the way back."""
    described: dict[str, Any] = {
        "hosts": (Host(name="a"), Host(name="b")),
        "devices": tuple(
            Device(name=name, host=name[0], memory_bytes=1 << 30) for name in ("a/0", "a/1", "b/0")
        ),
        "tiers": (
            Tier(name="ram", host="a", capacity_bytes=1 << 34),
            Tier(name="disk", host="a", capacity_bytes=1 << 38, directory="/data"),
        ),
        "links": (
            Link(source="a", target="b", bandwidth_bytes_per_s=GBIT, latency_ms=0.04),
            Link(source="b", target="a", bandwidth_bytes_per_s=GBIT / 2, latency_ms=0.05),
            Link(source="a", target="a", bandwidth_bytes_per_s=20 * GBIT),
        ),
    }
    return Cluster(**(described | changes))


def test_links_have_a_direction_and_devices_use_those_of_their_hosts() -> None:
    cluster = pair()
    assert cluster.link("a", "b").bandwidth_bytes_per_s == GBIT
    assert cluster.link("b/0", "a/1").bandwidth_bytes_per_s == GBIT / 2
    assert cluster.link("a/0", "a/1").bandwidth_bytes_per_s == 20 * GBIT
    assert cluster.link("a/0", "b/0") == cluster.link("a", "b")


def test_a_link_without_ends_holds_between_any_two_hosts() -> None:
    cluster = pair(
        links=(
            Link(bandwidth_bytes_per_s=GBIT, latency_ms=0.1),
            Link(source="b", target="a", bandwidth_bytes_per_s=5 * GBIT),
        )
    )
    assert cluster.link("a", "b") == Link(source="a", target="b", bandwidth_bytes_per_s=GBIT, latency_ms=0.1)
    assert cluster.link("b", "a").bandwidth_bytes_per_s == 5 * GBIT
    with pytest.raises(UsageError, match="nothing is known of the link within host 'a'") as caught:
        cluster.link("a/0", "a/1")
    assert "measure" in str(caught.value.works)


def test_transfer_time_is_latency_and_bytes_over_bandwidth() -> None:
    assert pair().link("a", "b").transfer_ms(1.25e8) == pytest.approx(1000.04)


def test_egress_is_shared_by_the_devices_of_a_host() -> None:
    cluster = pair()
    assert cluster.egress_bytes_per_s("a") == GBIT
    limited = replace(cluster, hosts=(Host(name="a", egress_bytes_per_s=GBIT / 10), Host(name="b")))
    assert limited.egress_bytes_per_s("a") == GBIT / 10
    assert cluster.only("a").egress_bytes_per_s("a") == math.inf


def test_what_is_on_a_host() -> None:
    cluster = pair()
    assert [device.name for device in cluster.devices_of("a")] == ["a/0", "a/1"]
    assert [tier.name for tier in cluster.tiers_of("a")] == ["ram", "disk"]
    assert cluster.tier("a", "disk").directory == "/data"
    assert cluster.host_of("b/0") == cluster.host_of("b") == "b"


def test_take_keeps_what_its_devices_use() -> None:
    one = pair().take(2)
    assert [host.name for host in one.hosts] == ["a"]
    assert [link.target for link in one.links] == ["a"]
    assert one.tiers == pair().tiers
    assert pair().take(3) == pair()


@given(hosts=st.integers(1, 5), each=st.integers(1, 4), data=st.data())
def test_any_part_of_a_uniform_cluster_is_a_cluster(hosts: int, each: int, data: st.DataObject) -> None:
    whole = Cluster.uniform(
        hosts=hosts, devices_per_host=each, memory="1GiB", bandwidth="1gbit", latency="40us"
    )
    assert len(whole.devices) == hosts * each
    count = data.draw(st.integers(1, hosts * each))
    some = whole.take(count)
    assert some.devices == whole.devices[:count]
    for a in some.devices:
        for b in some.devices:
            assert some.link(a.name, b.name) == whole.link(a.name, b.name)


def test_uniform_reads_units_and_tells_within_from_between() -> None:
    cluster = Cluster.uniform(
        hosts=2,
        devices_per_host=2,
        memory="2GiB",
        bandwidth="1gbit",
        latency="40us",
        local_bandwidth="10GB/s",
        local_latency="2us",
    )
    assert cluster.device("node1/1").memory_bytes == 2 << 30
    between, within = cluster.link("node0", "node1"), cluster.link("node0/0", "node0/1")
    assert (between.bandwidth_bytes_per_s, between.latency_ms) == (1.25e8, 0.04)
    assert (within.bandwidth_bytes_per_s, within.latency_ms) == (1e10, 0.002)


def test_clusters_are_values() -> None:
    cluster = pair()
    assert cluster == pair()
    assert hash(cluster) == hash(pair())
    assert pickle.loads(pickle.dumps(cluster)) == cluster


MEGABYTE = 1 << 20
DEVICE = Device(name="a/0", host="a", memory_bytes=MEGABYTE)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hosts": ()}, "without hosts"),
        ({"devices": ()}, "without devices"),
        ({"hosts": (Host(name="a"), Host(name="b"), Host(name="a"))}, "'a' is there 2 times"),
        ({"devices": (DEVICE, DEVICE)}, "'a/0' is there 2 times"),
        ({"devices": (replace(DEVICE, name="a"),)}, "'a' is there 2 times"),
        ({"devices": (replace(DEVICE, host="c"),)}, "device 'a/0' is on host 'c', which is not there"),
        ({"tiers": (Tier(name="ram", host="c", capacity_bytes=1),)}, "tier 'ram' is on host 'c'"),
        ({"tiers": (Tier(name="ram", host="a", capacity_bytes=1),) * 2}, "'a:ram' is there 2 times"),
        ({"links": (Link(source="a", target="c", bandwidth_bytes_per_s=1.0),)}, "'a' to 'c' is on host 'c'"),
        ({"links": (Link(bandwidth_bytes_per_s=1.0),) * 2}, "'\\* to \\*' is there 2 times"),
        ({"links": ()}, "host 'b' cannot be reached from 'a'"),
        (
            {"links": (Link(source="a", target="b", bandwidth_bytes_per_s=1.0),)},
            "host 'a' cannot be reached from 'b'",
        ),
        (
            {"devices": (replace(DEVICE, cores=(0, 1)), replace(DEVICE, name="a/1", cores=(1,)))},
            "'a/0' and 'a/1' both have core 1",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        pair(**changes)
    assert caught.value.setting
    assert caught.value.works


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        (Host, {"name": " "}, "a host has no name"),
        (Host, {"name": "*"}, "cannot name one"),
        (Host, {"name": "a", "egress_bytes_per_s": 0.0}, "egress of host 'a' is 0.0"),
        (Device, {"name": "a/0", "host": "a", "memory_bytes": 0}, "memory of device 'a/0' is 0"),
        (Device, {"name": "a/0", "host": "a", "memory_bytes": 1, "threads": 0}, "0 threads"),
        (Device, {"name": "a/0", "host": "a", "memory_bytes": 1, "kind": "tpu"}, "kind 'tpu'"),
        (Device, {"name": "a/0", "host": "a", "memory_bytes": 1, "cores": (1, 1)}, r"cores \[1, 1\]"),
        (Device, {"name": "a/0", "host": "a", "memory_bytes": 1, "cores": (-1,)}, r"cores \[-1\]"),
        (Device, {"name": "a/0", "host": "a", "memory_bytes": 1, "gflops": -3.0}, "gflops .* -3.0"),
        (Tier, {"name": "ram", "host": "a", "capacity_bytes": -1}, "capacity .* -1"),
        (Tier, {"name": "ram", "host": "a", "capacity_bytes": 1, "read_bytes_per_s": -2.0}, "read .* -2.0"),
        (Tier, {"name": "ram", "host": "a", "capacity_bytes": 1, "write_bytes_per_s": 0.0}, "write .* 0.0"),
        (Link, {"bandwidth_bytes_per_s": 0.0}, "bandwidth .* 0.0, not above zero"),
        (Link, {"bandwidth_bytes_per_s": math.inf}, "bandwidth .* inf"),
        (Link, {"bandwidth_bytes_per_s": math.nan}, "bandwidth .* nan"),
        (Link, {"bandwidth_bytes_per_s": 1e-300}, "bandwidth .* 1e-300 bytes/s, less than the smallest rate"),
        (Host, {"name": "a", "egress_bytes_per_s": 0.1}, "egress of host 'a' is 0.1 bytes/s, less than"),
        (Link, {"bandwidth_bytes_per_s": 1.0, "latency_ms": -1.0}, "latency .* -1.0 ms"),
        (Link, {"bandwidth_bytes_per_s": 1.0, "source": "a"}, "names one end only"),
    ],
)
def test_impossible_figures_are_refused(kind: type, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        kind(**fields)
    assert caught.value.setting
    assert caught.value.works


def test_what_is_not_there_is_said_with_what_is() -> None:
    cluster = pair()
    for ask, works in (
        (lambda: cluster.device("a/7"), "a/0, a/1, b/0"),
        (lambda: cluster.host("c"), "a, b"),
        (lambda: cluster.link("a", "gpu7"), "a/0, a/1, b/0"),
        (lambda: cluster.tier("a", "tape"), "ram, disk"),
        (lambda: cluster.tier("b", "ram"), "none is known"),
        (lambda: cluster.only("c"), "a, b"),
        (lambda: cluster.take(4), "1 to 3"),
        (lambda: cluster.take(0), "1 to 3"),
        (lambda: Cluster.uniform(hosts=0, memory=1, bandwidth=1), "1 or more"),
    ):
        with pytest.raises(UsageError) as caught:
            ask()
        assert caught.value.works == works


def test_a_cluster_needs_no_torch_and_no_pydantic_until_a_file_is_read() -> None:
    code = (
        "import sys; from plait import Cluster;"
        "c = Cluster.uniform(hosts=4, memory='1GiB', bandwidth='1gbit'); c.link('node0', 'node1');"
        "assert not {'torch', 'pydantic', 'numpy'} & set(sys.modules);"
        "Cluster.detect().to_toml(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
