"""Flows started between the hosts of a lab: the processes of ``flow.py``, from the lab's side."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from plait.errors import LabError
from plait.lab.command import alone
from plait.lab.workers import Process, end

if TYPE_CHECKING:
    from plait.lab.lab import Lab


def serve(lab: Lab, host: int, *, rate_bytes_per_second: int | None = None) -> tuple[Process, int]:
    """Start a process on a host that sends what it is asked for; it and the port it listens on."""
    pace = [] if rate_bytes_per_second is None else ["--rate", str(rate_bytes_per_second)]
    server = lab.start(
        host,
        [*alone("flow.py"), "serve", lab.hosts[host].address, *pace],
        stdout=subprocess.PIPE,
        beside=True,
    )
    assert server.stdout is not None, "asked for a pipe"
    with server.stdout as said:
        port = said.readline()
    if not port:
        raise LabError(f"host {host} cannot listen at {lab.hosts[host].address}")
    return server, int(port)


def ask(lab: Lab, host: int, role: str, sender: int, port: int, options: Sequence[str]) -> Process:
    """Start a process on a host that fetches from a sender."""
    command = [*alone("flow.py"), role, lab.hosts[sender].address, str(port), *options]
    return lab.start(host, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, beside=True)


class Flow:
    """A competing flow that has begun, until ``stop`` or the end of its block."""

    def __init__(
        self, lab: Lab, source: int, target: int, *, streams: int, rate_bytes_per_second: float | None
    ) -> None:
        share = None if rate_bytes_per_second is None else max(1, round(rate_bytes_per_second / streams))
        server, port = serve(lab, source, rate_bytes_per_second=share)
        drain = ask(lab, target, "drain", source, port, ["--streams", str(streams)])
        self._processes = [server, drain]
        assert drain.stdout is not None, "asked for a pipe"
        if not drain.stdout.readline():
            self.stop()
            raise LabError(f"no traffic can flow from host {source} to host {target}: is a link cut?")

    def stop(self) -> None:
        """End the flow; a second time does nothing."""
        end(self._processes, grace_seconds=0.0)
        for process in self._processes:
            for pipe in filter(None, (process.stdout, process.stderr)):
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
