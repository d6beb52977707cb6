"""The nodes of a Ray cluster as a plait one: what can be planned for, and where workers can be had.

Ray knows what its nodes have, not how fast they are. ``python -m plait.engine.ray_cluster``, started on every
host at once, measures that.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from plait.cluster.cluster import Cluster
from plait.cluster.file import parse
from plait.cluster.machine import gpu_count, memory_available_bytes, usable_cores
from plait.cluster.parts import Device, Host, Link, Tier, bytes_per_s, milliseconds
from plait.engine.launcher import Worker
from plait.engine.ray_connection import Connection, Node
from plait.errors import UsageError, WorkerError
from plait.units import parse_bytes
from plait.worker import Place

_CLUSTER = "PLAIT_RAY_CLUSTER"
"""The cluster to measure, as the text of a file."""
_RESULT = "# measured"
"""The line before the result."""
Run = Callable[[Sequence[str], str, Mapping[str, str], Path], Worker]
"""Runs Python with some arguments: on a device, with more variables, its output into a file."""


def ray_cluster(
    address: str | None = None,
    *,
    kind: Literal["cpu", "cuda"] | None = None,
    threads: int = 1,
    memory: int | str | None = None,
    bandwidth: float | str | None = None,
    latency: float | str = 0.0,
) -> Cluster:
    """The nodes of a Ray cluster as a plait one: a device for each GPU, or for every ``threads`` CPUs.

    Without an address, and without ``RAY_ADDRESS`` or a connection of this process, it is this machine: that
    is where Ray would be started. ``memory`` is a device's budget; where it is not given, CPUs share what Ray
    says of their node, or what is free on this machine. Ray knows nothing of networks: ``bandwidth`` and
    ``latency`` are those between any two devices, and several nodes need them.
    """
    if Connection.would_start(address):
        nodes = [_this_machine()]
    else:
        connection = Connection(address)
        try:
            nodes = connection.nodes()
        finally:
            connection.close()
    return cluster_of(nodes, kind=kind, threads=threads, memory=memory, bandwidth=bandwidth, latency=latency)


def cluster_of(
    nodes: Sequence[Node],
    *,
    kind: Literal["cpu", "cuda"] | None = None,
    threads: int = 1,
    memory: int | str | None = None,
    bandwidth: float | str | None = None,
    latency: float | str = 0.0,
) -> Cluster:
    """These nodes as a cluster, as :func:`ray_cluster` says; one without a device of the kind is left out."""
    if threads < 1:
        raise UsageError(f"devices of {threads} CPUs", setting="threads", works="1")
    if kind is None:
        kind = "cuda" if any(node.gpus >= 1 for node in nodes) else "cpu"
    each = 1 if kind == "cuda" else threads
    counts = {node: int(node.has(kind) // each) for node in nodes}
    used = [node for node in nodes if counts[node]]
    if not used:
        has = ", ".join(f"{node.name} has {node.has(kind):g}" for node in nodes)
        raise UsageError(f"no node of Ray's has {each} of kind {kind}: {has}", setting="kind, threads")
    if kind == "cuda" and memory is None:
        raise UsageError("Ray does not say how much memory a GPU has", setting="memory", works="24GiB")
    if len(used) > 1 and bandwidth is None:
        raise UsageError(
            f"Ray does not say how fast the network between its {len(used)} nodes is",
            setting="bandwidth",
            works="1gbit",
        )
    budget = None if memory is None else parse_bytes(memory, setting="memory")
    devices = [
        Device(
            name=f"{node.name}/{'cuda' if kind == 'cuda' else ''}{i}",
            host=node.name,
            kind=kind,
            threads=threads,
            memory_bytes=node.memory_bytes // counts[node] if budget is None else budget,
        )
        for node in used
        for i in range(counts[node])
    ]
    links: list[Link] = []
    if bandwidth is not None:
        any_two = Link(
            bandwidth_bytes_per_s=bytes_per_s(bandwidth, "bandwidth"),
            latency_ms=milliseconds(latency, "latency"),
        )
        links = [any_two, *(replace(any_two, source=node.name, target=node.name) for node in used)]
    return Cluster(
        hosts=tuple(Host(name=node.name, address=node.address) for node in used),
        devices=tuple(devices),
        tiers=tuple(
            Tier(name="ram", host=node.name, capacity_bytes=node.memory_bytes)
            for node in used
            if node.memory_bytes
        ),
        links=tuple(links),
    )


def _this_machine() -> Node:
    """As a node of the Ray that would be started here."""
    return Node(
        name=socket.gethostname(),
        number="",
        address="127.0.0.1",
        cpus=float(len(usable_cores())),
        gpus=float(gpu_count()),
        memory_bytes=memory_available_bytes(),
    )


def measured(cluster: Cluster, meeting: Callable[[str], tuple[str, int]], run: Run) -> Cluster:
    """The same cluster with its memory and its network measured, by a process on each host."""
    if len(cluster.hosts) == 1:
        cluster = replace(cluster, links=())
    first = [cluster.devices_of(host.name)[0].name for host in cluster.hosts]
    address, port = meeting(first[0])
    with tempfile.TemporaryDirectory(prefix="plait-") as folder:
        logs = [Path(folder, f"{rank}.log") for rank in range(len(first))]
        workers: list[Worker] = []
        try:
            for rank, device in enumerate(first):
                place = Place(rank=rank, world=len(first), address=address, port=port)
                environment = {**place.environment(), _CLUSTER: cluster.to_toml()}
                workers.append(run(["-m", __name__], device, environment, logs[rank]))
            while any(worker.poll() is None for worker in workers):
                _check(workers, logs)
                time.sleep(0.02)
            _check(workers, logs)
        finally:
            for worker in workers:
                worker.kill()
        return parse(logs[0].read_text().rpartition(_RESULT)[2])


def _check(workers: Sequence[Worker], logs: Sequence[Path]) -> None:
    for worker, log in zip(workers, logs, strict=True):
        if worker.poll() not in (None, 0):
            said = log.read_text().strip().splitlines() or ["it said nothing"]
            raise WorkerError(
                f"the host of {worker.name} could not be measured: {said[-1]}",
                setting="cluster",
                works="a cluster file with links, as docs/cluster.md has it",
            )


def main() -> None:
    """Measure this host and, with those on other hosts, the network; rank 0 prints the result."""
    cluster = parse(os.environ[_CLUSTER])
    found = cluster.measure(("memory", "network"), at_once=max(1, len(cluster.hosts) // 2))
    if Place.from_environment().rank == 0:
        sys.stdout.write(f"{_RESULT}\n{found.to_toml()}")


if __name__ == "__main__":
    main()
