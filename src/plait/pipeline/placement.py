"""A pipeline on the devices of a cluster: the first stage on its first device, and so on.

What is unequal among them is read from the cluster, so a file that was measured once serves every plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from plait.cluster import Cluster
from plait.errors import UsageError
from plait.pipeline.network import Link, Network, Wire

Size = float | str
"""Bytes, or as ``"4GiB"``."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The devices and links of a pipeline, stage by stage."""

    speeds: tuple[float, ...]
    """In multiples of the first device's, on which the profile is taken to have been measured."""
    memory_bytes: tuple[int, ...]
    network: Network


def placement(cluster: Cluster, stages: int) -> Placement:
    """The first devices of a cluster, one a stage."""
    used = cluster.take(stages)
    devices, hosts = used.devices, [host.name for host in used.hosts]
    rated = [device.gflops for device in devices if device.gflops is not None]
    if rated and len(rated) < stages:
        (unknown, *_) = (device.name for device in devices if device.gflops is None)
        raise UsageError(
            f"the speed of device {unknown!r} is not known, and that of others is",
            setting="devices.gflops",
            works="gflops of all devices or of none, or Cluster.measure()",
        )
    links = (
        Link(forward=_wire(used, one.name, next_.name), backward=_wire(used, next_.name, one.name))
        for one, next_ in pairwise(devices)
    )
    return Placement(
        speeds=tuple(speed / rated[0] for speed in rated) or (1.0,) * stages,
        memory_bytes=tuple(device.memory_bytes for device in devices),
        network=Network(
            links=tuple(links),
            hosts=tuple(hosts.index(device.host) for device in devices),
            egress_bytes_per_s=tuple(used.egress_bytes_per_s(host) for host in hosts),
        ),
    )


def unless_given(
    cluster: Cluster | None,
    stages: int,
    *,
    speeds: Sequence[float] | None,
    memory_bytes: Size | Sequence[Size] | None,
    network: Network | None,
) -> tuple[Sequence[float] | None, Size | Sequence[Size] | None, Network | None]:
    """What is given, and for the rest what the cluster says, if there is one."""
    if cluster is None:
        return speeds, memory_bytes, network
    there = placement(cluster, stages)
    return (
        there.speeds if speeds is None else speeds,
        there.memory_bytes if memory_bytes is None else memory_bytes,
        there.network if network is None else network,
    )


def _wire(cluster: Cluster, source: str, target: str) -> Wire:
    link = cluster.link(source, target)
    return Wire(latency_ms=link.latency_ms, bytes_per_s=link.bandwidth_bytes_per_s)
