"""What lies between the devices of a cluster, for burst planning."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.cluster import Cluster
from plait.errors import UsageError
from plait.sim.between import between


def test_hosts_that_are_all_alike_need_one_figure() -> None:
    cluster = Cluster.uniform(hosts=300, memory="1GiB", bandwidth="1gbit", latency="40us")
    network = between(cluster, 256)
    assert network.is_uniform
    assert (network.bandwidth(0, 9), network.latency(3, 4)) == (125e6, 0.04)


def test_devices_of_one_host_have_its_link() -> None:
    cluster = Cluster.uniform(
        hosts=2, devices_per_host=2, memory="1GiB", bandwidth="1gbit", local_bandwidth="100gbit"
    )
    network = between(cluster, 4)
    assert (network.bandwidth(0, 1), network.bandwidth(1, 2)) == (12.5e9, 125e6)
    assert network.ring(2).bandwidth_bytes_per_s == 12.5e9
    assert network.ring(4).bandwidth_bytes_per_s == 125e6


def test_a_host_sends_no_more_than_it_states() -> None:
    cluster = Cluster.uniform(hosts=3, memory="1GiB", bandwidth="1gbit", latency="40us")
    alike = replace(cluster, hosts=tuple(replace(host, egress_bytes_per_s=5e7) for host in cluster.hosts))
    assert between(alike, 3).is_uniform
    assert (between(alike, 3).bandwidth(0, 1), between(alike, 3).latency(0, 1)) == (5e7, 0.04)
    first, *others = cluster.hosts
    one = between(replace(cluster, hosts=(replace(first, egress_bytes_per_s=5e7), *others)), 3)
    assert (one.bandwidth(0, 1), one.bandwidth(1, 0), one.bandwidth(1, 2)) == (5e7, 125e6, 125e6)


def test_within_a_host_its_egress_is_not_used() -> None:
    cluster = Cluster.uniform(
        hosts=2, devices_per_host=2, memory="1GiB", bandwidth="1gbit", local_bandwidth="100gbit"
    )
    limited = replace(cluster, hosts=tuple(replace(host, egress_bytes_per_s=5e7) for host in cluster.hosts))
    network = between(limited, 4)
    assert (network.bandwidth(0, 1), network.bandwidth(1, 2)) == (12.5e9, 5e7)


def test_more_devices_than_there_are_is_refused() -> None:
    cluster = Cluster.uniform(hosts=2, memory="1GiB", bandwidth="1gbit")
    with pytest.raises(UsageError, match="3 devices"):
        between(cluster, 3)
