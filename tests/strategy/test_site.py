"""A cluster as planners see it."""

from dataclasses import replace

import pytest
from chains import chain, cluster

from plait.cluster import Cluster
from plait.errors import UsageError
from plait.strategy.site import Site


def test_budgets_are_what_is_left_for_a_job():
    site = Site(cluster=cluster(2, memory="4GiB"), memory_bytes=3 << 30, process_bytes=1 << 30)
    assert site.budgets == (2 << 30, 2 << 30)
    with pytest.raises(UsageError, match=r"4\.00 GiB.*process_bytes"):
        Site(cluster=cluster(2, memory="4GiB"), process_bytes=4 << 30)


def test_one_figure_where_all_links_are_alike_and_rows_where_not():
    assert Site(cluster=cluster(4)).network.is_uniform
    uneven = Cluster.uniform(
        hosts=2, devices_per_host=2, memory="1GiB", bandwidth="1gbit", local_bandwidth="8gbit"
    )
    network = Site(cluster=uneven).network
    assert network.bandwidth(0, 1) == 1e9
    assert network.bandwidth(1, 2) == 1.25e8
    assert network.ring(2).bandwidth_bytes_per_s == 1e9
    assert network.ring(4).bandwidth_bytes_per_s == 1.25e8


def test_a_host_sends_no_more_than_its_egress():
    slow = cluster(2)
    hosts = (replace(slow.hosts[0], egress_bytes_per_s=1e7), slow.hosts[1])
    network = Site(cluster=replace(slow, hosts=hosts)).network
    assert network.bandwidth(0, 1) == 1e7
    assert network.bandwidth(1, 0) == 1.25e8


def test_speeds_are_known_of_all_devices_or_of_none():
    two = cluster(2)
    fast = tuple(replace(d, gflops=g) for d, g in zip(two.devices, (100.0, 50.0), strict=True))
    assert Site(cluster=replace(two, devices=fast)).speeds == (1.0, 0.5)
    with pytest.raises(UsageError, match="node1/0"):
        Site(cluster=replace(two, devices=(fast[0], two.devices[1]))).speeds  # noqa: B018


def test_each_pair_of_hosts_is_asked_once(monkeypatch):
    asked, link = [], Cluster.link

    def counted(of, source, target):
        asked.append((source, target))
        return link(of, source, target)

    monkeypatch.setattr(Cluster, "link", counted)
    assert Site(cluster=cluster(24)).network.is_uniform
    assert len(asked) == len(set(asked)) == 24 * 23


def test_a_profile_of_another_kind_of_device_is_said():
    cpus = cluster(2)
    gpu = replace(cpus, devices=(cpus.devices[0], replace(cpus.devices[1], kind="cuda")))
    measured = replace(chain(), device="cpu")
    assert Site(cluster=cpus).elsewhere(measured) == ()
    (said,) = Site(cluster=gpu).elsewhere(measured)
    assert "measured on cpu, and the cluster has cuda" in said
    (said,) = Site(cluster=cpus).elsewhere(replace(chain(), device="cuda"))
    assert "measured on cuda, and the cluster has cpu" in said
    assert Site(cluster=gpu).elsewhere(chain()) == ()  # of which nobody knows
