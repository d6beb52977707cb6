"""Workers on a Ray cluster: one placement group for the run's devices, on each device one actor.

Ray finds the room, keeps it, and says when it is gone. An actor starts workers as processes beside it (see
``ray_seat``), which meet over torch.distributed; what goes through Ray is who starts where, what they print,
and how they ended. A device whose actor is lost is tried again, and can be had again once it answers.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from plait.cluster.cluster import Cluster
from plait.cluster.parts import Device
from plait.destination import not_written
from plait.engine.launcher import MODULE, import_path
from plait.engine.machine import this_machine
from plait.engine.ray_cluster import cluster_of, measured
from plait.engine.ray_connection import Connection, Node, module
from plait.engine.ray_device import RayDevice, RayWorker
from plait.engine.ray_seat import Seat
from plait.errors import UsageError, WorkerError

_AT_ONCE = 4
"""Of an actor's methods: one waits for news, and others must not wait for it."""
_TAKEN = ("PLAIT_", "TORCH_", "NCCL_")
"""How the variables begin that workers take from the driver; all others are their node's."""
_NODE = "ray.io/node-id"


class RayLauncher:
    """Starts workers on the devices of a cluster through Ray."""

    def __init__(
        self,
        cluster: Cluster | None = None,
        *,
        address: str | None = None,
        devices: int | None = None,
        memory_bytes: int | None = None,
        program: str = MODULE,
        patience_s: float = 60.0,
        return_s: float | None = 2.0,
    ) -> None:
        """Take the devices of a cluster, through the Ray at an address or one started on this machine.

        Args:
            cluster: Its hosts are nodes of Ray's, by name or address; None is all that Ray has, measured.
            address: As ``ray start --head`` printed it; None is ``RAY_ADDRESS``, or else a Ray of our own.
            devices: Without a cluster, how many to take, and ``memory_bytes`` what each may use.
            program: The module that workers run.
            patience_s: How long Ray may take to find room.
            return_s: How long after its loss a device is tried again; None: never.
        """
        self._program, self._numbers = program, itertools.count()
        self._devices: dict[str, RayDevice] = {}
        self._group: Any = None
        if cluster is None and Connection.would_start(address):
            cluster = this_machine(devices=devices, memory_bytes=memory_bytes, directory=Path.cwd())
        needs = [_needs(device) for device in cluster.devices] if cluster is not None else []
        self._connection = Connection(
            address,
            cpus=math.ceil(sum(need.get("CPU", 0) for need in needs)),
            gpus=math.ceil(sum(need.get("GPU", 0) for need in needs)),
        )
        try:
            if cluster is not None:
                self._hold(cluster, patience_s, return_s)
            else:
                # A cluster has links: these stand in for those that are measured next.
                found = cluster_of(self._connection.nodes(), memory=memory_bytes, bandwidth="1gbit")
                found = found if devices is None else found.take(devices)
                self._hold(found, patience_s, return_s)
                cluster = measured(found, self.meeting, self._run)
        except BaseException:
            self.close()
            raise
        self.cluster = cluster
        """What the devices are part of."""

    def listen(self) -> socket.socket:
        """On this host's address in the cluster; on loopback where the cluster is this machine alone."""
        return socket.create_server((self.reach(), 0))

    def reach(self) -> str:
        """This host's address in the cluster."""
        return self._connection.address

    def meeting(self, device: str) -> tuple[str, int]:
        """The device's host, and a port that was free there a moment ago."""
        held = self._known(device)
        return held.address, held.port()

    def start(
        self, arguments: Sequence[str], *, device: str, environment: Mapping[str, str], log: Path
    ) -> RayWorker:
        """Have the device's actor start a process."""
        return self._run(["-m", self._program, *arguments], device, environment, log)

    def _run(
        self, command: Sequence[str], device: str, environment: Mapping[str, str], log: Path
    ) -> RayWorker:
        held, number = self._known(device), next(self._numbers)
        try:
            file = FileIO(log, "a")
        except OSError as error:
            raise not_written(log, error, setting="directory") from None
        worker = RayWorker(device, file, held, number)
        taken = {name: value for name, value in os.environ.items() if name.startswith(_TAKEN)}
        held.start(number, worker, [*command], {**taken, "PYTHONPATH": import_path(), **environment})
        return worker

    def available(self) -> frozenset[str]:
        """The devices whose actors answer."""
        return frozenset(name for name, held in self._devices.items() if held.available)

    def close(self) -> None:
        """End all workers and actors, give the room back, and end a cluster of our own."""
        closing = [threading.Thread(target=each.close) for each in self._devices.values()]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        self._devices = {}
        if self._group is not None:
            module("ray.util.placement_group").remove_placement_group(self._group)
            self._group = None
        self._connection.close()

    def _known(self, device: str) -> RayDevice:
        if device not in self._devices:
            raise UsageError(
                f"there is no device {device!r} in this run", setting="device", works=", ".join(self._devices)
            )
        return self._devices[device]

    def _hold(self, cluster: Cluster, patience_s: float, return_s: float | None) -> None:
        """Reserve room for all devices, and have an actor begin on each."""
        nodes = self._nodes(cluster)
        needs = [_needs(device) for device in cluster.devices]
        self._reserve(needs, [nodes[device.host] for device in cluster.devices], patience_s)
        for i, device in enumerate(cluster.devices):
            self._devices[device.name] = self._begin(i, needs[i], nodes[device.host], return_s)
        self._wait(patience_s)

    def _nodes(self, cluster: Cluster) -> dict[str, Node]:
        """By host of the cluster, the node that it is."""
        nodes = self._connection.nodes()
        if self._connection.local:
            return {host.name: nodes[0] for host in cluster.hosts}
        found: dict[str, Node] = {}
        for host in cluster.hosts:
            same = [node for node in nodes if host.name == node.name or host.address == node.address]
            exact = [node for node in same if host.name == node.name] or same
            if len(exact) != 1:
                raise UsageError(
                    f"host {host.name!r} is {len(exact)} of Ray's {len(nodes)} nodes",
                    setting="hosts.name, hosts.address",
                    works=", ".join(f"{node.name} ({node.address})" for node in nodes),
                )
            found[host.name] = exact[0]
        return found

    def _reserve(self, needs: list[dict[str, float]], nodes: list[Node], patience_s: float) -> None:
        for node in dict.fromkeys(nodes):
            mine = [need for need, other in zip(needs, nodes, strict=True) if other == node]
            for what, has in (("CPU", node.cpus), ("GPU", node.gpus)):
                wanted = sum(need.get(what, 0.0) for need in mine)
                if wanted > has:
                    raise UsageError(
                        f"the devices of {node.name} need {wanted:g} {what}s, and Ray has {has:g} there",
                        setting="devices, threads",
                        works=f"devices that need {has:g} at most",
                    )
        group = module("ray.util.placement_group").placement_group(
            needs, strategy="PACK", bundle_label_selector=[{_NODE: node.number} for node in nodes]
        )
        self._group = group
        if not group.wait(patience_s):
            free = self._connection.ray.available_resources()
            left = ", ".join(f"{free.get(what, 0):g} {what}s" for what in ("CPU", "GPU"))
            raise WorkerError(
                f"Ray found no room for {len(needs)} devices within {patience_s:g} s; it has {left} free",
                setting="patience_s",
                works="more time, or fewer devices",
            )

    def _begin(self, i: int, need: dict[str, float], node: Node, return_s: float | None) -> RayDevice:
        ray = self._connection.ray
        strategy = module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=i
        )
        kind = ray.remote(Seat).options(
            num_cpus=need.get("CPU", 0),
            num_gpus=need.get("GPU", 0),
            max_concurrency=_AT_ONCE,
            scheduling_strategy=strategy,
        )
        address = "127.0.0.1" if self._connection.local else node.address
        return RayDevice(ray, kind.remote, address=address, return_s=return_s)

    def _wait(self, patience_s: float) -> None:
        end = time.monotonic() + patience_s
        while missing := self._devices.keys() - self.available():
            if time.monotonic() > end:
                troubles = [self._devices[name].trouble or "no reason is known" for name in sorted(missing)]
                raise WorkerError(
                    f"no actor began on {', '.join(sorted(missing))} within {patience_s:g} s: {troubles[0]}",
                    setting="patience_s",
                    works="plait installed on every node, in the same version",
                )
            time.sleep(0.02)


def _needs(device: Device) -> dict[str, float]:
    """What of Ray's resources a device is."""
    return {"GPU": 1.0} if device.kind == "cuda" else {"CPU": float(device.threads)}
