"""What lies between the devices of a cluster, for burst planning."""

from __future__ import annotations

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


def test_more_devices_than_there_are_is_refused() -> None:
    cluster = Cluster.uniform(hosts=2, memory="1GiB", bandwidth="1gbit")
    with pytest.raises(UsageError, match="3 devices"):
        between(cluster, 3)
