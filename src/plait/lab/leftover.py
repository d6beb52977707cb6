"""What carries a lab's label: found, and removed. The lab itself, its watchdog and the next lab all use this.

Processes are found by the label in their environment, by their network namespace and by their memory group,
so a grandchild that closed its pipes, changed its group or cleared its environment is found too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from plait.errors import LabError
from plait.lab.label import VARIABLE, Label
from plait.lab.memory import find_hierarchy, processes_in, remove_group
from plait.lab.network import NAMESPACES

_KILL_SECONDS = 10.0
_WORKS = "plait lab clean, as root"


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """What was found of one run and removed."""

    label: str
    processes: int
    namespaces: tuple[str, ...]
    groups: tuple[str, ...]


def clean() -> list[Leftover]:
    """Remove what runs that are no longer alive left behind; those that are alive are not touched.

    What cannot be removed is said at the end, when all the rest is gone.
    """
    removed: list[Leftover] = []
    failures: list[LabError] = []
    for label in sorted(_labels(), key=str):
        if not label.is_alive():
            try:
                removed.append(remove(label))
            except LabError as error:
                failures.append(error)
    if failures:
        raise failures[0]
    return removed


def remove(label: Label) -> Leftover:
    """Kill every process of a run, then delete its namespaces and memory groups."""
    killed = _kill(label)
    namespaces = _named(NAMESPACES, label)
    for namespace in namespaces:
        # Another process may be removing the same one; what matters is that it is gone.
        with suppress(FileNotFoundError):
            subprocess.run(["ip", "netns", "delete", namespace.name], capture_output=True, check=False)
    still = [namespace.name for namespace in namespaces if namespace.exists()]
    if still:
        raise LabError(f"cannot delete the network namespaces {', '.join(still)}", works=_WORKS)
    groups = _groups(label)
    for group in groups:
        remove_group(group)
    return Leftover(
        label=str(label),
        processes=len(killed),
        namespaces=tuple(namespace.name for namespace in namespaces),
        groups=tuple(group.name for group in groups),
    )


def members(label: Label) -> set[int]:
    """The processes of a run, other than this one."""
    marked = f"{VARIABLE}={label}".encode()
    inside = {_identity(namespace) for namespace in _named(NAMESPACES, label)} - {None}
    found = {pid for group in _groups(label) for pid in processes_in(group)}
    for pid in _processes():
        if marked in _environment(pid) or (inside and _identity(Path(f"/proc/{pid}/ns/net")) in inside):
            found.add(pid)
    return found - {os.getpid()}


def _kill(label: Label) -> set[int]:
    killed: set[int] = set()
    deadline = time.monotonic() + _KILL_SECONDS
    while alive := members(label):
        if time.monotonic() > deadline:
            raise LabError(f"processes {sorted(alive)} of {label} did not die within {_KILL_SECONDS:g} s")
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except PermissionError:
                raise LabError(f"process {pid} of {label} is another user's", works=_WORKS) from None
            except ProcessLookupError:
                pass
        killed |= alive
        time.sleep(0.01)  # a new look, since a process may have started another one meanwhile
    return killed


def _labels() -> set[Label]:
    """Every label that something on this machine carries."""
    names = [entry.name for entry in _entries(NAMESPACES)]
    hierarchy = find_hierarchy()
    if hierarchy is not None:
        names += [entry.name for entry in _entries(hierarchy.root)]
    prefix = f"{VARIABLE}=".encode()
    for pid in _processes():
        names += [
            item[len(prefix) :].decode(errors="replace")
            for item in _environment(pid)
            if item.startswith(prefix)
        ]
    return {label for name in names if (label := Label.find(name)) is not None}


def _named(directory: Path, label: Label) -> list[Path]:
    return [entry for entry in _entries(directory) if Label.find(entry.name) == label]


def _groups(label: Label) -> list[Path]:
    hierarchy = find_hierarchy()
    return [] if hierarchy is None else _named(hierarchy.root, label)


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _processes() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _environment(pid: int) -> list[bytes]:
    # Empty for a process that is gone, that waits to be reaped, or that is another user's.
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
