"""The name of one lab's run, which says by itself whether that run is still alive.

Everything a lab creates (namespaces, cgroups, the environment of its processes) carries the label, and
the label carries the process that owns it: its number, the moment it started, and the process namespace
in which that number means anything. So what a killed run left behind is found and recognised without a
state file that could be lost, and a run that is alive is never touched.
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "PLAIT_LAB"
"""The environment variable that marks a process as belonging to a lab."""

_PATTERN = re.compile(r"plait-(\d+)-(\d+)-(\d+)-([0-9a-f]{6})(?![0-9a-f])")


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks after boot; None when it is gone or only waits to be reaped."""
    try:
        # The second field is the command in parentheses and may itself contain blanks and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


@dataclass(frozen=True, kw_only=True)
class Label:
    """Who owns a run: a process, told apart from a later one that was given the same number."""

    pid: int
    started: int
    """Clock ticks after boot."""
    pid_namespace: int
    token: str
    """Tells several labs of one process apart."""

    @classmethod
    def new(cls) -> Label:
        """A fresh label that this process owns."""
        pid = os.getpid()
        started = start_ticks(pid)
        assert started is not None, "a running process has a start time"
        return cls(pid=pid, started=started, pid_namespace=_pid_namespace(), token=secrets.token_hex(3))

    @classmethod
    def find(cls, text: str) -> Label | None:
        """The label at the start of a name, or None."""
        match = _PATTERN.match(text)
        if match is None:
            return None
        pid, started, namespace, token = match.groups()
        return cls(pid=int(pid), started=int(started), pid_namespace=int(namespace), token=token)

    def __str__(self) -> str:
        return f"plait-{self.pid}-{self.started}-{self.pid_namespace}-{self.token}"

    def is_alive(self) -> bool:
        """Whether the owner still runs; one in another process namespace counts as alive."""
        return self.pid_namespace != _pid_namespace() or start_ticks(self.pid) == self.started
