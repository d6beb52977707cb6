"""A memory-limited cgroup, version 1 or 2, whichever the machine has.

    with MemoryGroup("2GiB") as group:
        subprocess.run(group.command(["python", "train.py"]))
    print(group.peak_resident_bytes, group.oom_kills)

Two peaks are kept, because the kernel's own mark counts page cache, which fills any limit as soon as files
are read and is given back when memory is needed:

- ``peak_bytes`` is that mark: everything charged (anonymous, shared, page cache, kernel). Exact, but an
  upper bound of what the processes need.
- ``peak_resident_bytes`` is anonymous plus shared memory, which cannot be given back without swap. The
  kernel keeps no mark of it, so it is read 20 times a second: a spike between two readings is missed.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from plait.errors import LabError, UsageError
from plait.lab.command import entering
from plait.lab.label import Label
from plait.units import format_bytes, parse_bytes

MINIMUM_BYTES = 32 * 2**20
"""A bare Python process needs about 12 MB; near that a worker dies before it can say why."""
_SAMPLE_SECONDS = 0.05
_REMOVE_SECONDS = 5.0


def parse_limit(limit: str | int) -> int:
    """Read a memory limit in bytes; one that no Python process fits into is refused."""
    count = parse_bytes(limit, setting="memory")
    if count < MINIMUM_BYTES:
        raise UsageError(
            f"a limit of {format_bytes(count)} is less than a Python process needs "
            f"({format_bytes(MINIMUM_BYTES)})",
            setting="memory",
            works="512MiB (a process that imports torch takes about 220 MB)",
        )
    return count


@dataclass(frozen=True, kw_only=True)
class Hierarchy:
    """Where memory groups are made: the top of the mounted hierarchy, and how its version speaks."""

    version: int
    root: Path

    def limits(self, limit_bytes: int) -> dict[str, int]:
        """What to write where; files after the first keep swap out and exist only where there can be swap."""
        if self.version == 1:
            return {"memory.limit_in_bytes": limit_bytes, "memory.memsw.limit_in_bytes": limit_bytes}
        return {"memory.max": limit_bytes, "memory.swap.max": 0}

    def peak_bytes(self, group: Path) -> int:
        """The kernel's high-water mark of everything charged to a group; 0 where there is none."""
        text = _read(group / ("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"))
        return int(text or 0)

    def resident_bytes(self, group: Path) -> int:
        """Anonymous plus shared memory of a group now."""
        names = ("total_rss", "total_shmem") if self.version == 1 else ("anon", "shmem")
        fields = _fields(group / "memory.stat")
        return sum(fields.get(name, 0) for name in names)

    def oom_kills(self, group: Path) -> int:
        """How many processes of a group were killed because memory ran out."""
        file = "memory.oom_control" if self.version == 1 else "memory.events"
        return _fields(group / file).get("oom_kill", 0)


def find_hierarchy(mountinfo: Path = Path("/proc/self/mountinfo")) -> Hierarchy | None:
    """The hierarchy that can limit memory on this machine, or None."""
    for line in _read(mountinfo).splitlines():
        before, _, after = line.partition(" - ")
        place = Path(before.split()[4])
        kind, _, options = after.split()[:3]
        if kind == "cgroup" and "memory" in options.split(","):
            return Hierarchy(version=1, root=place)
        # Beside version 1, version 2 is often mounted too, without the controllers that version 1 holds.
        if kind == "cgroup2" and "memory" in _read(place / "cgroup.controllers").split():
            return Hierarchy(version=2, root=place)
    return None


def can_limit() -> bool:
    """Whether this process may make memory groups here."""
    hierarchy = find_hierarchy()
    return hierarchy is not None and os.access(hierarchy.root, os.W_OK, effective_ids=True)


def processes_in(group: Path) -> list[int]:
    """The processes of a group; none when it is gone."""
    return [int(line) for line in _read(group / "cgroup.procs").split()]


def remove_group(group: Path) -> None:
    """Kill what still runs in a group and remove it; one that is gone already is fine."""
    deadline = time.monotonic() + _REMOVE_SECONDS
    while True:
        for pid in processes_in(group):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            # A killed process leaves its group only when the kernel has torn it down.
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise LabError(f"cannot remove the memory group {group}: {error.strerror}") from error
        time.sleep(0.01)


class MemoryGroup:
    """Processes that share one memory limit, which swap does not stretch.

    Leaving the block kills what still runs in the group. `name` and `hierarchy` are for those who manage
    groups themselves; the defaults find them.
    """

    def __init__(
        self, limit: str | int, *, name: str | None = None, hierarchy: Hierarchy | None = None
    ) -> None:
        self.limit_bytes = parse_limit(limit)
        found = hierarchy or find_hierarchy()
        if found is None:
            raise LabError(
                "no cgroup hierarchy with a memory controller is mounted on this machine",
                setting="memory",
                works="no memory limit",
            )
        self._hierarchy = found
        self.directory = found.root / (name or f"{Label.new()}-memory")
        self._owner = os.getpid()
        self._left = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="plait-memory", daemon=True)
        self._peak_bytes = 0
        self._peak_resident_bytes = 0
        self._oom_kills = 0

    def __enter__(self) -> Self:
        top = self._hierarchy.root
        try:
            if self._hierarchy.version == 2 and "memory" not in _read(top / "cgroup.subtree_control").split():
                (top / "cgroup.subtree_control").write_text("+memory")
            self.directory.mkdir()
            for i, (file, value) in enumerate(self._hierarchy.limits(self.limit_bytes).items()):
                if i == 0 or (self.directory / file).exists():
                    (self.directory / file).write_text(str(value))
        except OSError as error:
            with suppress(OSError):
                self.directory.rmdir()
            raise LabError(
                f"cannot make a memory group under {top}: {error.strerror}",
                setting="memory",
                works="no memory limit, or root and a cgroup file system that may be written",
            ) from error
        self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._sampler.join()
        self._observe()
        remove_group(self.directory)

    def command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` inside this group, for any way of starting processes."""
        return entering(command, group=self.directory)

    def add(self, pid: int) -> None:
        """Move a running process in; what it had allocated before stays charged to where it was."""
        if pid == self._owner:
            raise UsageError(
                f"process {pid} holds the memory group and would be killed with it",
                setting="pid",
                works="the number of a child process",
            )
        try:
            (self.directory / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            raise LabError(f"cannot move process {pid} into {self.directory}: {error.strerror}") from error

    @property
    def peak_bytes(self) -> int:
        """The most that was ever charged: anonymous, shared, page cache and kernel memory."""
        self._observe()
        return self._peak_bytes

    @property
    def peak_resident_bytes(self) -> int:
        """The most anonymous plus shared memory that was seen, read 20 times a second."""
        self._observe()
        return self._peak_resident_bytes

    @property
    def oom_kills(self) -> int:
        """How many processes were killed because the limit was reached."""
        self._observe()
        return self._oom_kills

    def _observe(self) -> None:
        # A group that is gone reads as zeros, so the last values stay readable after it.
        speak = self._hierarchy
        resident = speak.resident_bytes(self.directory)
        self._peak_resident_bytes = max(self._peak_resident_bytes, resident)
        self._peak_bytes = max(self._peak_bytes, speak.peak_bytes(self.directory), resident)
        self._oom_kills = max(self._oom_kills, speak.oom_kills(self.directory))

    def _sample(self) -> None:
        while not self._left.wait(_SAMPLE_SECONDS):
            self._observe()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _fields(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
