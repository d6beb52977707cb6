"""Who starts workers: processes of this machine here; lab hosts and Ray actors in modules of their own.

A launcher knows devices by name and starts ``python -m plait.engine.worker`` on them. All else that workers
need, they learn from the environment (the torchrun contract, and where the engine is) and from their folder.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from plait.burst.leftover import WORKER_VARIABLE, members
from plait.cluster import Device
from plait.worker import free_port

MODULE = "plait.engine.worker"
LOST = -255
"""In place of an exit code: whatever ran the worker is gone, or cannot be reached."""
_GONE_S = 10.0
"""Within which the kernel has removed a process that was killed."""


class Worker(Protocol):
    """A worker that was started."""

    name: str
    """Its device's, for messages."""

    def poll(self) -> int | None:
        """Its exit code, negative after a signal, or :data:`LOST`; None while it runs."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """End it at once, with all it started."""


class Launcher(Protocol):
    """Starts workers on devices."""

    def listen(self) -> socket.socket:
        """A listening socket for the engine, where workers can reach it."""

    def reach(self) -> str:
        """The address by which they reach it."""

    def meeting(self, device: str) -> tuple[str, int]:
        """Where the workers of a task meet whose rank 0 is on a device: an address, and a port free there."""

    def start(
        self, arguments: Sequence[str], *, device: str, environment: Mapping[str, str], log: Path
    ) -> Worker:
        """Start a worker on a device; what it prints is added to a file."""

    def available(self) -> frozenset[str]:
        """The devices that can be had now."""

    def close(self) -> None:
        """End what is left, and leave nothing behind."""


class ProcessWorker:
    """A worker as a process that leads a group of its own."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], mark: str | None = None) -> None:
        """``mark`` is what its environment has as ``PLAIT_WORKER``, and that of all it starts."""
        self.name, self.process, self._mark, self._over = name, process, mark, False

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        return self.process.poll()

    def terminate(self) -> None:
        """Ask it to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, with all it started; once: its number may be another's later."""
        if self._over:
            return
        self._signal(signal.SIGKILL)
        self._over = True
        end = time.monotonic() + _GONE_S
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_GONE_S)
        while (self._end_strays() or _exists(self.process.pid)) and time.monotonic() < end:
            time.sleep(0.01)  # until what it started is gone, too

    def _end_strays(self) -> bool:
        """Kill what it started that has left its group; whether there was any."""
        return self._mark is not None and end_marked(self._mark)

    def _signal(self, number: signal.Signals) -> None:
        if not self._over:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)


class LocalLauncher:
    """Workers as processes of this machine; every device is a share of its cores, or one of its GPUs."""

    def __init__(self, devices: Sequence[Device]) -> None:
        # Where a GPU is, its worker sees no other: it is the first of those that it sees.
        self._seen = {
            device.name: {"CUDA_VISIBLE_DEVICES": str(place)} if device.kind == "cuda" else {}
            for place, device in enumerate(devices)
        }
        self._workers: list[ProcessWorker] = []

    def listen(self) -> socket.socket:
        """On loopback: nobody else is to reach it."""
        return socket.create_server(("127.0.0.1", 0))

    def reach(self) -> str:
        """Loopback."""
        return "127.0.0.1"

    def meeting(self, device: str) -> tuple[str, int]:
        """Loopback, and a port that was free a moment ago."""
        return "127.0.0.1", free_port()

    def start(
        self, arguments: Sequence[str], *, device: str, environment: Mapping[str, str], log: Path
    ) -> ProcessWorker:
        """Start a process."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", MODULE, *arguments],
                env={
                    **os.environ,
                    "PYTHONPATH": import_path(),
                    "GLOO_SOCKET_IFNAME": "lo",
                    **self._seen[device],
                    **environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        worker = ProcessWorker(device, process, environment.get(WORKER_VARIABLE))
        self._workers.append(worker)
        return worker

    def available(self) -> frozenset[str]:
        """All: a machine does not lose its own cores."""
        return frozenset(self._seen)

    def close(self) -> None:
        """Kill what still runs."""
        for worker in self._workers:
            worker.kill()


def end_marked(mark: str) -> bool:
    """Kill the processes that carry a worker's mark, in whatever group or session; whether there were any."""
    found = members(mark, WORKER_VARIABLE)
    for number in found:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(number, signal.SIGKILL)
    return bool(found)


def import_path() -> str:
    """Where this process finds modules beyond what is installed: workers look there for those of jobs."""
    installed = tuple({sys.prefix, sys.base_prefix})
    own = [os.path.abspath(path or ".") for path in sys.path]
    return os.pathsep.join(dict.fromkeys(path for path in own if not path.startswith(installed)))


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
