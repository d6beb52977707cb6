"""Pipelines on clusters whose devices and links differ."""

from dataclasses import replace

import pytest

from plait.cluster import Cluster, Device, Host, Link
from plait.errors import UsageError
from plait.pipeline.balance import balance
from plait.pipeline.network import Wire
from plait.pipeline.placement import placement
from plait.pipeline.planning import plan
from plait.profile import BlockProfile, Profile, Times

GIB = 2**30


def cluster(fast=200.0, slow=100.0):
    """A host with two fast devices, and one with a slow device."""
    return Cluster(
        hosts=(Host(name="a", egress_bytes_per_s=5e7), Host(name="b")),
        devices=(
            Device(name="a/0", host="a", memory_bytes=2 * GIB, gflops=fast),
            Device(name="a/1", host="a", memory_bytes=2 * GIB, gflops=fast),
            Device(name="b/0", host="b", memory_bytes=GIB, gflops=slow),
        ),
        links=(
            Link(source="a", target="a", bandwidth_bytes_per_s=1e10, latency_ms=0.01),
            Link(source="a", target="b", bandwidth_bytes_per_s=1e8, latency_ms=0.2),
            Link(source="b", target="a", bandwidth_bytes_per_s=2e8, latency_ms=0.3),
        ),
    )


def profile(blocks=10, parameters=0, out=8):
    return Profile(
        blocks=tuple(
            BlockProfile(
                name=f"b{i}",
                parameter_bytes=parameters,
                output_bytes_per_sample=out,
                milliseconds={1: Times(forward=1.0, backward=2.0)},
            )
            for i in range(blocks)
        )
    )


def test_what_is_unequal_is_read_from_the_cluster():
    found = placement(cluster(), 3)
    assert found.speeds == (1.0, 1.0, 0.5)
    assert found.memory_bytes == (2 * GIB, 2 * GIB, GIB)
    assert found.network.wires == (
        Wire(latency_ms=0.01, bytes_per_s=1e10),
        Wire(latency_ms=0.01, bytes_per_s=1e10),
        Wire(latency_ms=0.2, bytes_per_s=1e8),
        Wire(latency_ms=0.3, bytes_per_s=2e8),
    )
    assert found.network.hosts == (0, 0, 1)
    assert found.network.egress_bytes_per_s == (5e7, 2e8)


def test_fewer_stages_than_devices_and_one_alone():
    assert placement(cluster(), 2).network.hosts == (0, 0)
    assert placement(cluster(), 1).network.links == ()


def test_a_slow_device_gets_fewer_blocks():
    assert balance(profile(), 3, cluster=cluster()).cuts == (4, 8)
    assert balance(profile(9), 3, cluster=cluster(slow=200.0)).cuts == (3, 6)
    assert plan(profile(), 3, global_batch=12, cluster=cluster()).cuts == (4, 8)


def test_what_is_given_beside_a_cluster_counts():
    assert balance(profile(9), 3, speeds=[1, 1, 1], cluster=cluster()).cuts == (3, 6)


def test_memory_of_the_devices_is_a_limit():
    # Weights and gradients of a block: 0.3 GiB. The last device holds three blocks, the others six.
    heavy = profile(9, parameters=round(0.15 * GIB))
    assert balance(heavy, 3, speeds=[1, 1, 9], cluster=cluster()).cuts == (3, 6)
    with pytest.raises(UsageError, match="no cut of 16 blocks"):
        balance(profile(16, parameters=round(0.15 * GIB)), 3, cluster=cluster())


def test_without_figures_of_speed_all_are_alike():
    assert placement(cluster(fast=None, slow=None), 3).speeds == (1.0, 1.0, 1.0)
    with pytest.raises(UsageError, match="the speed of device 'b/0' is not known"):
        placement(cluster(slow=None), 3)


def test_a_cluster_that_is_too_small_or_says_too_little():
    with pytest.raises(UsageError, match="4 devices were asked of a cluster of 3"):
        balance(profile(), 4, cluster=cluster())
    bare = replace(cluster(), links=cluster().links[1:])
    with pytest.raises(UsageError, match="nothing is known of the link within host 'a'"):
        balance(profile(), 3, cluster=bare)
