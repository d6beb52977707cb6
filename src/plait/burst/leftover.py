"""What background work leaves behind when whoever ran it is killed: found by name, and removed.

Groups, folders and processes carry a label with the number and the start of the process that owns them, so
that anybody can tell whether it still runs; and with its pid namespace, for only there can they. A small
process per owner waits for its death and then cleans up; should that be killed too, the next background work
in that namespace does it.
"""

from __future__ import annotations

import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from plait.burst.cgroup import find_trees, remove_folders
from plait.burst.phases import default_directory, pid_namespace, start_ticks

VARIABLE = "PLAIT_BACKGROUND"
"""Marks a process as somebody's background work; its value is the label."""
_LABEL = re.compile(r"plait-background-(\d+)-(\d+)-(\d+)-[0-9a-f]{8}")
"""Namespace, number and start of the owner."""
_KILL_SECONDS = 5.0


def new_label() -> str:
    """A name for something that this process owns."""
    pid = os.getpid()
    return f"plait-background-{pid_namespace()}-{pid}-{start_ticks(pid)}-{secrets.token_hex(4)}"


def owner_lives(label: str) -> bool | None:
    """Whether the process that a label names still runs; None where that cannot be told from here."""
    match = _LABEL.fullmatch(label)
    if match is None or int(match[1]) != pid_namespace():
        return None
    return start_ticks(int(match[2])) == int(match[3])


def members(label: str) -> list[int]:
    """The processes that carry a label, other than this one."""
    marked = f"{VARIABLE}={label}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            with suppress(OSError):
                if marked in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
    return found


def remove(label: str) -> None:
    """Kill the processes of a label, and remove its groups and its folder."""
    remove_folders(tree.parent / label for tree in find_trees())
    deadline = time.monotonic() + _KILL_SECONDS
    while (left := [pid for pid in members(label) if start_ticks(pid) is not None]) and (
        time.monotonic() < deadline
    ):
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    shutil.rmtree(default_directory() / label, ignore_errors=True)
    with suppress(OSError):
        default_directory().rmdir()


def clean() -> list[str]:
    """Remove what belongs to owners that are gone, and return the labels."""
    places = [default_directory(), *(tree.parent for tree in find_trees())]
    names = {name for place in places if place.is_dir() for name in os.listdir(place)}
    dead = sorted(name for name in names if owner_lives(name) is False)
    for label in dead:
        remove(label)
    return dead


class Watchdog:
    """A process that outlives this one for a moment, to remove what carries a label."""

    def __init__(self, label: str) -> None:
        package = str(Path(__file__).parents[2])
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        # Its own process group, so that Ctrl-C in a terminal does not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-m", "plait.burst.leftover", label],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )

    def end(self) -> None:
        """There is nothing to watch any more."""
        self._process.kill()
        self._process.wait()


def watch(label: str) -> None:
    """Wait until the owner of a label is gone, then remove what carries it."""
    match = _LABEL.fullmatch(label)
    assert match is not None, f"{label!r} is not a label"
    with suppress(ProcessLookupError):
        owner = os.pidfd_open(int(match[2]))
        if owner_lives(label):  # the number may have passed to another process meanwhile
            select.select([owner], [], [])
    remove(label)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch(sys.argv[1])
