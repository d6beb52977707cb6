"""Control groups for background work: idle priority, freezing, a memory limit, and what was used.

Version 1 has a tree for each controller, version 2 one for all, and machines with both divide the
controllers between them. A `Group` takes from each what is there:

=================  ==========================  =====================================
what               version 1                   version 2
=================  ==========================  =====================================
idle priority      ``cpu.idle`` (tree cpu)     ``cpu.idle``
pause              ``freezer.state``           ``cgroup.freeze``
time used          ``cpuacct.usage``           ``usage_usec`` in ``cpu.stat``
memory limit       ``memory.limit_in_bytes``   ``memory.max``
=================  ==========================  =====================================

A group with ``cpu.idle`` runs when nothing else in its parent wants to. Processes in a group of their own
have no part in autogroups, so a new session of the background's changes nothing. In version 1 the group is
made within the caller's own, in version 2, where a group with processes cannot have children with
controllers, beside it.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from plait.errors import UsageError, WorkerError
from plait.units import format_bytes

Use = Literal["idle", "freeze", "time", "memory"]
_CONTROLLERS: dict[str, Use] = {"cpu": "idle", "freezer": "freeze", "cpuacct": "time", "memory": "memory"}
"""Of version 1, and what they are used for."""
_REMOVE_SECONDS = 5.0
_RELEASES = {"cpu.idle": "0", "freezer.state": "THAWED", "cgroup.freeze": "0"}
"""What killed processes need to die: processor time, which an idle group gets only where nobody wants it."""


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Where groups can be made, and what for."""

    version: int
    parent: Path
    uses: frozenset[Use]


def find_trees(
    mountinfo: Path = Path("/proc/self/mountinfo"), membership: Path = Path("/proc/self/cgroup")
) -> list[Tree]:
    """The trees that this process may make groups in."""
    own = {}
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        own[controllers] = path
    found, taken = [], set[Use]()
    lines = _read(mountinfo).splitlines()
    # Controllers are in one of the two; freezing is in both, and what version 2 has frozen can be killed.
    for kind in ("cgroup2", "cgroup"):
        for line in lines:
            before, _, after = line.partition(" - ")
            if after.split()[0] != kind:
                continue
            root, place = before.split()[3:5]
            tree = _tree(kind, Path(place), root, after.split()[2].split(","), own)
            if tree is not None and tree.uses - taken and os.access(tree.parent, os.W_OK, effective_ids=True):
                found.append(Tree(version=tree.version, parent=tree.parent, uses=tree.uses - taken))
                taken |= tree.uses
    return found


def _tree(kind: str, place: Path, root: str, options: Iterable[str], own: Mapping[str, str]) -> Tree | None:
    if kind == "cgroup":
        offered = frozenset(_CONTROLLERS[name] for name in options if name in _CONTROLLERS)
        path = next((p for names, p in own.items() if set(names.split(",")) & set(options)), None)
        if not offered or path is None:
            return None
        return Tree(version=1, parent=_inside(place, root, path), uses=offered)
    if "" not in own:
        return None
    group = _inside(place, root, own[""])
    parent = group if group == place else group.parent
    controllers = _read(parent / "cgroup.controllers").split()
    uses: set[Use] = {"freeze", "time"}
    uses |= {_CONTROLLERS[name] for name in ("cpu", "memory") if name in controllers}
    return Tree(version=2, parent=parent, uses=frozenset(uses))


def _inside(place: Path, root: str, path: str) -> Path:
    """A group's folder, where the tree's part under ``root`` is mounted at ``place``."""
    relative = os.path.relpath(path, root)
    return place if relative.startswith("..") else place / relative


class Group:
    """A group in every tree that is of use; made empty, and removed with all that runs in it."""

    def __init__(
        self,
        name: str,
        *,
        idle: bool = True,
        memory_bytes: int | None = None,
        trees: list[Tree] | None = None,
    ) -> None:
        """``idle``: what is in it runs only when nothing else wants to."""
        self._idle = idle
        self._folders: list[tuple[Tree, Path]] = []
        self._uses: dict[Use, tuple[Tree, Path]] = {}
        try:
            for tree in find_trees() if trees is None else trees:
                self._make(tree, name, memory_bytes)
            if memory_bytes is not None and "memory" not in self._uses:
                raise UsageError(
                    f"nothing on this machine can hold background work to {format_bytes(memory_bytes)}",
                    setting="memory",
                    works="no memory limit, or root and a cgroup file system with a memory controller",
                )
        except BaseException:
            self.remove()
            raise

    def _make(self, tree: Tree, name: str, memory_bytes: int | None) -> None:
        folder = tree.parent / name
        if tree.version == 2:
            for controller in ("cpu", "memory"):
                with suppress(OSError):  # enabled already, or not ours to enable
                    (tree.parent / "cgroup.subtree_control").write_text(f"+{controller}")
        try:
            folder.mkdir()
        except OSError:
            return
        self._folders.append((tree, folder))
        for use in tree.uses:
            if use == "idle" and not (self._idle and _try_write(folder / "cpu.idle", "1")):
                continue
            if use == "freeze" and not (folder / _freezer(tree)).exists():
                continue
            if use == "memory" and memory_bytes is not None and not _limit(tree, folder, memory_bytes):
                continue
            self._uses[use] = (tree, folder)

    @property
    def is_idle(self) -> bool:
        """Whether what runs in it only runs when nothing else wants to."""
        return "idle" in self._uses

    @property
    def can_freeze(self) -> bool:
        """Whether it can be paused as a whole."""
        return "freeze" in self._uses

    @property
    def entrances(self) -> list[str]:
        """The files that a process writes its number into, to be in the group."""
        return [str(folder / "cgroup.procs") for _, folder in self._folders]

    def processes(self) -> list[int]:
        """What runs in it, and in groups that it made within."""
        return sorted(
            {pid for _, folder in self._folders for each in _bottom_up(folder) for pid in _pids(each)}
        )

    def promote(self) -> None:
        """Let what is in it run like everything else."""
        if "idle" in self._uses:
            _try_write(self._uses.pop("idle")[1] / "cpu.idle", "0")

    def freeze(self, frozen: bool) -> None:
        """Pause everything in it, or let it go on."""
        tree, folder = self._uses["freeze"]
        if tree.version == 1:
            words = "FROZEN" if frozen else "THAWED"
        else:
            words = "1" if frozen else "0"
        _try_write(folder / _freezer(tree), words)

    def seconds(self) -> float | None:
        """The processor time that was used in it; None where nobody counts."""
        if "time" not in self._uses:
            return None
        tree, folder = self._uses["time"]
        if tree.version == 1:
            return int(_read(folder / "cpuacct.usage") or 0) / 1e9
        return _fields(folder / "cpu.stat").get("usage_usec", 0) / 1e6

    def oom_kills(self) -> int:
        """How many of its processes were killed at the memory limit."""
        if "memory" not in self._uses:
            return 0
        tree, folder = self._uses["memory"]
        file = "memory.oom_control" if tree.version == 1 else "memory.events"
        return _fields(folder / file).get("oom_kill", 0)

    def remove(self) -> None:
        """Kill what still runs in it, frozen or not, and remove it from every tree."""
        remove_folders(folder for _, folder in self._folders)
        self._folders, self._uses = [], {}


def remove_folders(folders: Iterable[Path]) -> None:
    """Kill what runs in these groups and in those within, and remove all; those that are gone are fine."""
    given = list(folders)
    deadline = time.monotonic() + _REMOVE_SECONDS
    while left := [each for folder in given for each in _bottom_up(folder)]:
        for folder in left:
            for pid in _pids(folder):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for folder in left:  # now, when all they can still do is die
            for file, word in _RELEASES.items():
                _try_write(folder / file, word)
        for folder in left:
            try:
                folder.rmdir()
            except FileNotFoundError:
                pass
            except OSError as error:
                # A killed process leaves its group only when the kernel has torn it down.
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise WorkerError(
                        f"the group {folder} cannot be removed: {error.strerror}, processes {_pids(folder)}"
                    ) from error
        if any(folder.is_dir() for folder in given):
            time.sleep(0.005)


def _bottom_up(folder: Path) -> list[Path]:
    """A group after those within it; none where it is gone."""
    return [Path(place) for place, _, _ in os.walk(folder, topdown=False)]


def _pids(folder: Path) -> list[int]:
    """The processes of a group; one that this pid namespace does not know shows as 0, which is no number."""
    return [int(word) for word in _read(folder / "cgroup.procs").split() if word != "0"]


def _freezer(tree: Tree) -> str:
    return "freezer.state" if tree.version == 1 else "cgroup.freeze"


def _limit(tree: Tree, folder: Path, limit_bytes: int) -> bool:
    """Limit memory, swap included where there can be any."""
    if tree.version == 1:
        limits = {"memory.limit_in_bytes": limit_bytes, "memory.memsw.limit_in_bytes": limit_bytes}
    else:
        limits = {"memory.max": limit_bytes, "memory.swap.max": 0}
    done = [_try_write(folder / file, str(value)) for file, value in limits.items()]
    return done[0]


def _try_write(path: Path, text: str) -> bool:
    try:
        with open(path, "r+") as file:  # never made where it is not there
            file.write(text)
    except OSError:
        return False
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _fields(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
