"""Workers on the hosts of a lab: each host is a device, and the engine is on the network of the first."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from ctypes import CDLL, get_errno
from pathlib import Path

from plait.burst.leftover import WORKER_VARIABLE
from plait.engine.launcher import MODULE, ProcessWorker, import_path
from plait.errors import LabError
from plait.lab import Lab
from plait.worker import free_port

_CLONE_NEWNET = 0x40000000
_FIRST_PORT, _PORTS = 30500, 1000


class _LabWorker(ProcessWorker):
    """A worker on a host of which, while it is cut off, nothing is known: not even that it has ended."""

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        mark: str | None,
        gone: Callable[[], frozenset[str]],
    ) -> None:
        super().__init__(name, process, mark)
        self._gone = gone

    def poll(self) -> int | None:
        """Its exit code, if it can be asked for."""
        return None if self.name in self._gone() else super().poll()


class LabLauncher:
    """Starts workers on the hosts of a lab that is entered; the lab itself is its owner's.

    What the engine hears of a worker comes over the host's own link, so that a host which is cut off is
    noticed by its silence and in no other way. ``gone`` says which hosts cannot be had: in a lab as in life,
    somebody has to say so.
    """

    def __init__(
        self, lab: Lab, devices: Sequence[str], *, gone: Callable[[], frozenset[str]] = frozenset
    ) -> None:
        """``devices`` are named as in the cluster, by host."""
        if len(devices) != len(lab.hosts):
            raise LabError(
                f"{len(devices)} devices for a lab of {len(lab.hosts)} hosts",
                setting="devices",
                works="one for each host",
            )
        self._lab, self._gone = lab, gone
        self._hosts = {name: host for host, name in enumerate(devices)}
        self._workers: list[ProcessWorker] = []
        self._meetings = 0

    def listen(self) -> socket.socket:
        """On the first host's network."""
        if self._lab.loopback:
            return socket.create_server(("127.0.0.1", 0))
        namespace = self._lab.namespace(0)
        return _in_namespace(namespace, lambda: socket.create_server((self._lab.hosts[0].address, 0)))

    def reach(self) -> str:
        """The first host's address."""
        return self._lab.hosts[0].address

    def meeting(self, device: str) -> tuple[str, int]:
        """The host's address, and a port that no task before has had."""
        self._meetings += 1
        host = self._hosts[device]
        if self._lab.loopback:
            return "127.0.0.1", free_port()
        return self._lab.hosts[host].address, _FIRST_PORT + self._meetings % _PORTS

    def start(
        self, arguments: Sequence[str], *, device: str, environment: Mapping[str, str], log: Path
    ) -> ProcessWorker:
        """Start a process on a host."""
        with log.open("ab") as output:
            process = self._lab.start(
                self._hosts[device],
                [sys.executable, "-m", MODULE, *arguments],
                env={"PYTHONPATH": import_path(), **environment},
                stdout=output,
                stderr=output,
            )
        worker = _LabWorker(device, process, environment.get(WORKER_VARIABLE), self._gone)
        self._workers.append(worker)
        return worker

    def available(self) -> frozenset[str]:
        """The hosts of which nobody has said that they are gone."""
        return frozenset(self._hosts) - self._gone()

    def close(self) -> None:
        """Kill what still runs."""
        for worker in self._workers:
            worker.kill()


def _in_namespace(namespace: Path, make: Callable[[], socket.socket]) -> socket.socket:
    """A socket of another network: it stays there, whatever the thread does that made it."""
    made: list[socket.socket] = []
    failed: list[OSError] = []

    def enter() -> None:
        descriptor = os.open(namespace, os.O_RDONLY)
        try:
            if CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
                raise OSError(get_errno(), os.strerror(get_errno()))
            made.append(make())
        except OSError as error:
            failed.append(error)
        finally:
            os.close(descriptor)

    thread = threading.Thread(target=enter, name="plait-lab-door")
    thread.start()
    thread.join()
    if failed:
        raise LabError(f"no socket can be made in {namespace}: {failed[0].strerror}", works="root")
    return made[0]
