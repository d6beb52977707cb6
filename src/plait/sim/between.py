"""What lies between the devices of a cluster, as burst planning takes it."""

from __future__ import annotations

from plait.burst.network import Network
from plait.cluster import Cluster, Device
from plait.cluster.parts import ANY


def between(cluster: Cluster, devices: int) -> Network:
    """What joins the first devices of a cluster: one figure where all are alike, else matrices.

    That is their link, or what the host that sends can send where that is less.
    """
    used = cluster.take(devices).devices
    most = {host.name: host.egress_bytes_per_s for host in cluster.hosts}
    hosts = {device.host for device in used}
    named = [link for link in cluster.links if link.source != ANY and link.source != link.target]

    def way(a: Device, b: Device) -> tuple[float, float]:
        if a is b:  # a device has no link to itself
            return 0.0, 0.0
        link, egress = cluster.link(a.name, b.name), most[a.host]
        rate = link.bandwidth_bytes_per_s
        return rate if egress is None or a.host == b.host else min(rate, egress), link.latency_ms

    if len(hosts) == len(used) > 1 and not named and len({most[host] for host in hosts}) == 1:
        rate, latency_ms = way(used[0], used[1])
        return Network(bandwidth_bytes_per_s=rate, latency_ms=latency_ms)
    ways = [[way(a, b) for b in used] for a in used]
    return Network(
        bandwidth_bytes_per_s=tuple(tuple(rate for rate, _ in row) for row in ways),
        latency_ms=tuple(tuple(latency_ms for _, latency_ms in row) for row in ways),
    )
