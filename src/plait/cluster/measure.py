"""Measures a cluster: memory, arithmetic and disk of this host, and the network to all others."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.cluster.cluster import PARTS, Cluster, Part
from plait.cluster.compute import measure_compute
from plait.cluster.disk import measure_disk
from plait.cluster.file import parse
from plait.cluster.machine import memory_available_bytes, usable_cores
from plait.cluster.network import Meeting, meet
from plait.cluster.parts import ANY, Device, Link, Tier
from plait.cluster.stream import within_host
from plait.errors import UsageError
from plait.worker import Place

_BUFFER_BYTES = 128 << 20
"""What each core reads and copies: more than its share of any cache."""


def measure(
    cluster: Cluster,
    *,
    parts: Sequence[Part],
    seconds: float,
    disk_bytes: int,
    at_once: int,
    timeout_s: float,
) -> Cluster:
    """The cluster with measured figures; see :meth:`plait.cluster.Cluster.measure`."""
    unknown = [part for part in parts if part not in PARTS]
    if unknown or not parts:
        raise UsageError(
            f"{unknown or 'nothing'} cannot be measured", setting="parts", works=", ".join(PARTS)
        )
    place = Place.from_environment()
    here = _this_host(cluster, place)
    if place.local_rank == 0:
        here = measure_host(here, parts=parts, seconds=seconds, disk_bytes=disk_bytes, timeout_s=timeout_s)
    if "network" not in parts or place.world == 1:
        return here
    meeting = meet(place, here.to_toml(), seconds=seconds, at_once=at_once, timeout_s=timeout_s)
    return join(meeting)


def _this_host(cluster: Cluster, place: Place) -> Cluster:
    """The part of the cluster that this process is on: hosts and groups of local ranks in the same order."""
    started = place.world // place.local_world
    if len(cluster.hosts) == 1:
        return cluster
    if len(cluster.hosts) != started:
        raise UsageError(
            f"the cluster has {len(cluster.hosts)} hosts, and processes were started on {started}",
            setting="WORLD_SIZE, LOCAL_WORLD_SIZE",
            works=f"one process on each host: torchrun --nnodes {len(cluster.hosts)} -m plait.cluster",
        )
    return cluster.only(cluster.hosts[place.rank // place.local_world].name)


def measure_host(
    cluster: Cluster, *, parts: Sequence[Part], seconds: float, disk_bytes: int, timeout_s: float
) -> Cluster:
    """A cluster of one host, this one, with its own figures measured."""
    host = cluster.hosts[0].name
    tiers, devices, links = list(cluster.tiers), list(cluster.devices), list(cluster.links)
    for i, tier in enumerate(tiers):
        if "memory" in parts and tier.name == "ram":
            read, copy = measure_memory(usable_cores(), seconds=seconds)
            tiers[i] = replace(tier, read_bytes_per_s=_rounded(read), write_bytes_per_s=_rounded(copy))
        if "disk" in parts and tier.directory is not None:
            tiers[i] = _measured_disk(tier, Path(tier.directory), disk_bytes)
    if "compute" in parts:
        speeds = measure_compute(devices, seconds=seconds, timeout_s=timeout_s)
        devices = [replace(device, gflops=_rounded(s)) for device, s in zip(devices, speeds, strict=True)]
    if "network" in parts:
        bandwidth, latency = within_host(seconds=seconds, timeout_s=timeout_s)
        links = [link for link in links if (link.source, link.target) != (host, host)]
        links.append(_link(host, host, bandwidth, latency))
    return replace(cluster, devices=tuple(devices), tiers=tuple(tiers), links=tuple(links))


def _measured_disk(tier: Tier, directory: Path, disk_bytes: int) -> Tier:
    speed = measure_disk(directory, size_bytes=disk_bytes)
    return replace(
        tier,
        read_bytes_per_s=_rounded(speed.read_bytes_per_s),
        write_bytes_per_s=_rounded(speed.write_bytes_per_s),
        direct=speed.direct,
    )


def measure_memory(cores: Sequence[int], *, seconds: float) -> tuple[float, float]:
    """Bytes a second that these cores, all at work, together read and copy."""
    import numpy as np

    from plait import native

    size = min(_BUFFER_BYTES, memory_available_bytes() // (4 * len(cores)))
    buffers = [(np.ones(size, np.uint8), np.ones(size, np.uint8)) for _ in cores]

    def all_at_once(kernel: Callable[[Any, Any], object]) -> float:
        start = threading.Barrier(len(cores))

        def work(i: int) -> float:
            try:
                os.sched_setaffinity(0, {cores[i]})  # of this thread alone
                kernel(*buffers[i])
            except BaseException:
                start.abort()
                raise
            start.wait()
            begun, passes = time.perf_counter(), 0
            while (now := time.perf_counter()) - begun < seconds / 2 or not passes:
                kernel(*buffers[i])
                passes += 1
            return passes * size / (now - begun)

        with ThreadPoolExecutor(len(cores)) as pool:
            return sum(pool.map(work, range(len(cores))))

    read = all_at_once(lambda source, target: native.read(source))
    return read, all_at_once(lambda source, target: native.copy(target, source))


def join(meeting: Meeting) -> Cluster:
    """The whole cluster from the hosts' own parts and the wires measured between them.

    Hosts that go by the same name (namespaces of one machine do) get their number appended.
    """
    clusters = [parse(text) for text in meeting.brought]
    times = Counter(cluster.hosts[0].name for cluster in clusters)
    hosts = []
    for i, cluster in enumerate(clusters):
        name = cluster.hosts[0].name
        hosts.append(_renamed(cluster, f"{name}-{i}" if times[name] > 1 else name, meeting.addresses[i]))
    names = [cluster.hosts[0].name for cluster in hosts]
    between = [
        _link(names[wire.source], names[wire.target], wire.bandwidth_bytes_per_s, wire.latency_ms)
        for wire in meeting.wires
    ]
    return Cluster(
        hosts=tuple(cluster.hosts[0] for cluster in hosts),
        devices=tuple(device for cluster in hosts for device in cluster.devices),
        tiers=tuple(tier for cluster in hosts for tier in cluster.tiers),
        links=(*(link for cluster in hosts for link in cluster.links if link.source != ANY), *between),
    )


def _renamed(cluster: Cluster, name: str, address: str) -> Cluster:
    host = cluster.hosts[0]

    def own(device: Device) -> str:
        rest = device.name.removeprefix(host.name)
        return device.name if rest == device.name else name + rest

    return Cluster(
        hosts=(replace(host, name=name, address=host.address or address),),
        devices=tuple(replace(device, host=name, name=own(device)) for device in cluster.devices),
        tiers=tuple(replace(tier, host=name) for tier in cluster.tiers),
        links=tuple(
            link if link.source == ANY else replace(link, source=name, target=name) for link in cluster.links
        ),
    )


def _link(source: str, target: str, bandwidth: float, latency_ms: float) -> Link:
    return Link(
        source=source,
        target=target,
        bandwidth_bytes_per_s=_rounded(8 * bandwidth) / 8,
        latency_ms=_rounded(latency_ms),
    )


def _rounded(figure: float) -> float:
    """Four digits: no measurement here is better, and it reads well in a file."""
    return float(f"{figure:.4g}")
