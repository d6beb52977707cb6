"""What a Ray actor does for one device of a run: starts workers beside it, hears what they say, ends them.

The workers are processes, each the leader of a group, and not the actor itself: the actor always answers,
whatever a worker does with its interpreter, and a worker under Ray is the same as one under anything else.
Nothing in here imports Ray.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from plait.burst.leftover import WORKER_VARIABLE
from plait.engine.launcher import LOST, end_marked
from plait.worker import free_port

News = tuple[int, bytes, int | None]
"""The number of a worker, what it has printed since, and its exit code if that was the last of it."""

_CHUNK_BYTES = 1 << 16
"""What is passed on at once; Ray sends results of that size with the answer, not through its object store."""
_HELD_BYTES = 4 << 20
"""What is held for a driver that does not ask; a worker that prints more has to wait."""
_DRAIN_S = 2.0
"""Within which the output of a worker that has ended is read; who is not of its group may keep it open."""
_GONE_S = 10.0
"""Within which the kernel has removed a process that was killed."""
_SIOCGIFADDR = 0x8915
"""From linux/sockios.h."""


class Seat:
    """The workers of one device; any thread may call."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._workers: dict[int, _Process] = {}

    def port(self, address: str) -> int:
        """A port that was free a moment ago at an address of this host."""
        return free_port(address)

    def start(
        self,
        number: int,
        command: Sequence[str],
        *,
        address: str,
        environment: Mapping[str, str],
        folder: str,
    ) -> None:
        """Run ``python`` with these arguments, where the driver runs if that folder is here too.

        ``address`` is that of this host by which other workers reach it.
        """
        own = {**os.environ}
        path = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]))
        if (interface := interface_of(address)) is not None:
            # Gloo would ask for the address of the host's name, which on many hosts is a loopback one.
            own.setdefault("GLOO_SOCKET_IFNAME", interface)
        own |= {**environment, "PYTHONPATH": path}
        worker = _Process([sys.executable, *command], own, folder, self._changed)
        with self._changed:
            self._workers[number] = worker
            self._changed.notify_all()

    def signal(self, number: int, sent: int) -> None:
        """Send a signal to a worker, if it still runs."""
        if (worker := self._workers.get(number)) is not None:
            worker.signal(sent)

    def end(self, numbers: Sequence[int]) -> None:
        """Kill workers with all they started; returns when they are gone."""
        found = [worker for number in numbers if (worker := self._workers.get(number)) is not None]
        for worker in found:
            worker.kill()
        for worker in found:
            worker.ended.wait(_GONE_S)

    def news(self, seconds: float) -> list[News]:
        """What has happened since the last question; waits so long for something to happen."""
        with self._changed:
            self._changed.wait_for(lambda: any(each.has_news for each in self._workers.values()), seconds)
            told = [(number, *each.tell()) for number, each in self._workers.items() if each.has_news]
            for number, _, code in told:
                if code is not None:
                    del self._workers[number]
            self._changed.notify_all()
        return told


class _Process:
    """A worker: its process group, a thread that reads what it prints, and one that waits for its end."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: str,
        changed: threading.Condition,
    ) -> None:
        self.ended = threading.Event()
        self._changed = changed
        self._unread = bytearray()
        self._code: int | None = None
        self._reaped = False
        self._mark = environment.get(WORKER_VARIABLE)
        keeper = [
            sys.executable,
            "-I",
            "-S",
            str(Path(__file__).with_name("ray_keeper.py")),
            str(os.getpid()),
        ]
        self._process = subprocess.Popen(
            [*keeper, *command],
            env=dict(environment),
            cwd=folder if Path(folder).is_dir() else None,
            bufsize=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, daemon=True).start()

    @property
    def has_news(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self._unread) or self._code is not None

    def tell(self) -> tuple[bytes, int | None]:
        """What it printed, a piece at a time; with the last piece, its exit code."""
        piece = bytes(self._unread[:_CHUNK_BYTES])
        del self._unread[:_CHUNK_BYTES]
        return piece, None if self._unread else self._code

    def signal(self, sent: int) -> None:
        """Signal the worker itself; whom it started, it tells."""
        with self._changed:
            if not self._reaped:  # else the number may be another's
                os.kill(self._process.pid, sent)

    def kill(self) -> None:
        """Kill it with all it started."""
        with self._changed:
            if not self._reaped:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self) -> None:
        assert self._process.stdout is not None, "it writes to a pipe"
        with self._process.stdout as pipe:
            while piece := pipe.read(_CHUNK_BYTES):
                with self._changed:
                    self._changed.wait_for(lambda: len(self._unread) < _HELD_BYTES)
                    self._unread += piece
                    self._changed.notify_all()

    def _wait(self) -> None:
        code = LOST
        with suppress(ChildProcessError):  # somebody else in this process has reaped it
            end = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            assert end is not None, "without WNOHANG there is an answer"
            code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # its guard, and what it left running
            if self._mark is not None:
                end_marked(self._mark)  # and what left its group
        with self._changed:
            self._reaped = True
            self._process.wait()
        self._reader.join(_DRAIN_S)
        with self._changed:
            self._code = code
            self._changed.notify_all()
        self.ended.set()


def interface_of(address: str) -> str | None:
    """The name of the network interface of this host that has an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an address
                request = struct.pack("256s", name.encode())
                found = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
