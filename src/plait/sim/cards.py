"""What the hosts of a cluster can send and take, all their devices together."""

from __future__ import annotations

import math
from typing import NamedTuple

from plait.cluster import Cluster
from plait.cluster.parts import ANY


class Cards(NamedTuple):
    """Bytes a second, by host; infinite for a host alone."""

    leaving: dict[str, float]
    coming: dict[str, float]


def cards(cluster: Cluster) -> Cards:
    """The fastest link of each host out and in, and no more out than it states.

    As :meth:`Cluster.egress_bytes_per_s`, without asking for the link of every pair of hosts.
    """
    own = [link for link in cluster.links if link.source not in (ANY, link.target)]
    other = max((link.bandwidth_bytes_per_s for link in cluster.links if link.source == ANY), default=0.0)
    found = []
    for side in ("source", "target"):
        rates: dict[str, list[float]] = {host.name: [] for host in cluster.hosts}
        for link in own:
            rates[getattr(link, side)].append(link.bandwidth_bytes_per_s)
        for its in rates.values():
            if len(its) < len(cluster.hosts) - 1:
                its.append(other)
        found.append({name: max(its, default=math.inf) for name, its in rates.items()})
    for host in cluster.hosts:
        if host.egress_bytes_per_s is not None:
            found[0][host.name] = min(found[0][host.name], host.egress_bytes_per_s)
    return Cards(*found)
