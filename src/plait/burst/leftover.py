"""What background work leaves behind when whoever ran it is killed: found by name, and removed.

Groups, folders and processes carry a label with the number and the start of the process that owns them, so
that anybody can tell whether it still runs; and with its pid namespace, for only there can they. A small
process per label, the watchdog, waits for the owner's death, or until the owner gives up, and then cleans up
until nothing is left; should that be killed too, the next background work in that namespace does it.
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
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from plait.burst.cgroup import find_trees, remove_folders
from plait.burst.phases import default_directory, pid_namespace, start_ticks
from plait.errors import WorkerError

VARIABLE = "PLAIT_BACKGROUND"
"""Marks a process as somebody's background work; its value is the label."""
WORKER_VARIABLE = "PLAIT_WORKER"
"""Marks what a worker of a run has started, which is ended with it; but the watchdog, which cleans up after
it, is not."""
_LABEL = re.compile(r"plait-background-(\d+)-(\d+)-(\d+)-[0-9a-f]{8}")
"""Namespace, number and start of the owner."""
_KILL_SECONDS = 5.0
_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 1.0, 60.0
"""What the watchdog waits after a failed removal: at first, and after ever more of them."""


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


def members(label: str, variable: str = VARIABLE) -> list[int]:
    """The processes that carry a label, other than this one."""
    marked = f"{variable}={label}".encode()
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
    while left := [pid for pid in members(label) if start_ticks(pid) is not None]:
        if time.monotonic() > deadline:
            raise WorkerError(
                f"processes {left} of {label} were killed and still run after {_KILL_SECONDS:g} s"
            )
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            release(pid, left)
        time.sleep(0.005)
    shutil.rmtree(default_directory() / label, ignore_errors=True)
    with suppress(OSError):
        default_directory().rmdir()


def release(pid: int, kin: Collection[int]) -> None:
    """Let a process that no group holds have processor time like any other, such as it takes to die.

    ``kin`` are the processes of the same work.
    """
    with suppress(OSError):
        if os.getsid(pid) in kin:  # else the session is not theirs, nor is its weight
            Path(f"/proc/{pid}/autogroup").write_text("0")
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))


def clean() -> list[str]:
    """Remove what belongs to owners that are gone, and return the labels."""
    places = [default_directory(), *(tree.parent for tree in find_trees())]
    names = {name for place in places if place.is_dir() for name in os.listdir(place)}
    dead = sorted(name for name in names if owner_lives(name) is False)
    for label in dead:
        remove(label)
    return dead


class Watchdog:
    """A process that outlives this one until what carries a label is removed."""

    def __init__(self, label: str) -> None:
        package = str(Path(__file__).parents[2])
        marks = (VARIABLE, WORKER_VARIABLE)
        environment = {name: value for name, value in os.environ.items() if name not in marks}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        # Its own process group, so that Ctrl-C in a terminal does not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-m", "plait.burst.leftover", label],
            env=environment,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )

    @contextmanager
    def relieved(self) -> Iterator[None]:
        """A block that removes what is watched; the watchdog ends after it, or goes on where it fails."""
        order = self._process.stdin
        assert order is not None
        with order:
            try:
                yield
            except BaseException:
                with suppress(BrokenPipeError):  # somebody killed it
                    order.write(b".")
                raise
            self._process.kill()
            self._process.wait()


def watch(label: str, orders: int) -> None:
    """Wait until the owner of a label is gone, or sends a byte, then remove what carries it, however long."""
    match = _LABEL.fullmatch(label)
    assert match is not None, f"{label!r} is not a label"
    with suppress(ProcessLookupError):
        owner = os.pidfd_open(int(match[2]))
        if owner_lives(label):  # the number may have passed to another process meanwhile
            ready, _, _ = select.select([owner, orders], [], [])
            if owner not in ready and not os.read(orders, 1):
                select.select([owner], [], [])  # it was closed, which is no order: the owner may live on
    pause_s = _RETRY_SECONDS
    while True:
        try:
            return remove(label)
        except (WorkerError, OSError):  # what is killed may take its time to die, with much memory say
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_RETRY_SECONDS)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch(sys.argv[1], sys.stdin.fileno())
