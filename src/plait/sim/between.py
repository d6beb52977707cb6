"""What lies between the devices of a cluster, as burst planning takes it."""

from __future__ import annotations

from plait.burst.network import Network
from plait.cluster import Cluster
from plait.cluster.parts import ANY


def between(cluster: Cluster, devices: int) -> Network:
    """The links between the first devices of a cluster: one figure where all are alike, else matrices."""
    used = cluster.take(devices).devices
    hosts = {device.host for device in used}
    named = [link for link in cluster.links if link.source != ANY and link.source != link.target]
    if len(hosts) == len(used) > 1 and not named:
        any_two = cluster.link(used[0].name, used[1].name)
        return Network(bandwidth_bytes_per_s=any_two.bandwidth_bytes_per_s, latency_ms=any_two.latency_ms)
    links = [
        [None if a is b else cluster.link(a.name, b.name) for b in used] for a in used
    ]  # a device has no link to itself
    return Network(
        bandwidth_bytes_per_s=tuple(
            tuple(0.0 if link is None else link.bandwidth_bytes_per_s for link in row) for row in links
        ),
        latency_ms=tuple(tuple(0.0 if link is None else link.latency_ms for link in row) for row in links),
    )
