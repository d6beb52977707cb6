"""This machine: which cores, how much memory and which disk a process here may really use.

What the hardware has is often more than a process gets: affinity and a control group can take cores
and memory away. Both versions of control groups are read, at the group of this process and all above
it. Every function takes the root of the file system, so that other machines' trees can be read too.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from plait.cluster.cluster import Cluster
from plait.cluster.parts import Device, Host, Tier
from plait.errors import UsageError

ROOT = Path("/")
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class ControlGroup:
    """The directory of this process's control group for one controller, and the mount that it is in."""

    version: Literal[1, 2]
    directory: Path
    mount: Path

    def upwards(self) -> Iterator[Path]:
        """The group's directory and those above it that also limit it."""
        at = self.directory
        while at != self.mount:
            yield at
            at = at.parent
        yield at


def control_group(controller: str, root: Path = ROOT) -> ControlGroup | None:
    """The control group of this process for ``memory`` or ``cpu``, or None where there is none."""
    paths: dict[str, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(",") if controllers else [""]:
            paths[name] = path
    for line in _text(root / "proc/self/mountinfo").splitlines():
        fields, _, tail = line.partition(" - ")
        kind, _, options = tail.split(" ", 2)
        _, _, _, origin, mount, *_ = fields.split(" ")
        # Version 1 has a mount for each controller; in version 2 one mount serves all.
        if kind == "cgroup" and controller in paths and controller in options.replace(" ", ",").split(","):
            return _group(1, root / mount.lstrip("/"), origin, paths[controller])
        if kind == "cgroup2" and controller not in paths and "" in paths:
            group = _group(2, root / mount.lstrip("/"), origin, paths[""])
            if controller in _text(group.mount / "cgroup.controllers").split():
                return group
    return None


def _group(version: Literal[1, 2], mount: Path, origin: str, path: str) -> ControlGroup:
    # Inside a container the mount may show only the part of the hierarchy below `origin`.
    below = path.removeprefix(origin.rstrip("/")).lstrip("/") if path.startswith(origin) else ""
    directory = mount if ".." in below.split("/") else mount / below  # the group is outside of what we see
    return ControlGroup(version=version, directory=directory if directory.is_dir() else mount, mount=mount)


def cpu_quota(root: Path = ROOT) -> float | None:
    """How many cores' worth of time the control group allows, or None without a limit."""
    group = control_group("cpu", root)
    quotas = []
    for directory in group.upwards() if group else ():
        if group and group.version == 2:
            quota, period = (_text(directory / "cpu.max").split() or ["max"] * 2)[:2]
        else:
            quota, period = _text(directory / "cpu.cfs_quota_us"), _text(directory / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def usable_cores(root: Path = ROOT) -> tuple[int, ...]:
    """The logical cores that this process may keep busy: its affinity, cut to its quota of time."""
    allowed = sorted(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return tuple(allowed if quota is None else allowed[: max(1, math.floor(quota))])


def memory_limit_bytes(root: Path = ROOT) -> int | None:
    """The lowest memory limit of the control group and those above it, or None without one."""
    total = memory_total_bytes(root)
    limits = [limit for _, limit in _memory_limits(root) if limit < total]
    return min(limits, default=None)


def memory_total_bytes(root: Path = ROOT) -> int:
    """All the memory that the machine has."""
    return _meminfo("MemTotal", root)


def memory_available_bytes(root: Path = ROOT) -> int:
    """What a process can still take without swapping, here and within its control group."""
    available = _meminfo("MemAvailable", root)
    for directory, limit in _memory_limits(root):
        statistics = dict(line.split()[:2] for line in _text(directory / "memory.stat").splitlines())
        used = int(_text(directory / "memory.current") or _text(directory / "memory.usage_in_bytes") or 0)
        # The page cache counts as used, and is given back when asked for. In version 1 only the totals
        # take in the groups below, as the limit does.
        pages = ("inactive_file", "active_file")
        cache = sum(int(statistics.get(f"total_{page}", statistics.get(page, 0))) for page in pages)
        available = min(available, limit - max(0, used - cache))
    return max(0, available)


def _memory_limits(root: Path) -> Iterator[tuple[Path, int]]:
    group = control_group("memory", root)
    for directory in group.upwards() if group else ():
        text = _text(directory / ("memory.max" if group and group.version == 2 else "memory.limit_in_bytes"))
        if text.isdigit():
            yield directory, int(text)


def _meminfo(field: str, root: Path) -> int:
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    raise UsageError(
        f"{root / 'proc/meminfo'} says no {field}", setting="/proc", works="Linux with /proc mounted"
    )


def disk_free_bytes(directory: Path) -> int:
    """What may still be written below a directory."""
    try:
        usage = os.statvfs(directory)
    except OSError as error:
        raise UsageError(
            f"{directory} cannot be used: {error.strerror}",
            setting="directory",
            works="a directory that exists",
        ) from None
    return usage.f_bavail * usage.f_frsize


def file_system(directory: Path, root: Path = ROOT) -> str:
    """The type of the file system that holds a directory, such as ``ext4`` or ``tmpfs``."""
    target = directory.resolve()
    best, kind = -1, "unknown"
    for line in _text(root / "proc/self/mountinfo").splitlines():
        fields, _, tail = line.partition(" - ")
        mount = Path(fields.split(" ")[4].encode().decode("unicode_escape"))
        if len(mount.parts) >= best and target.is_relative_to(mount):
            best, kind = len(mount.parts), tail.split(" ")[0]
    return kind


def gpu_count(root: Path = ROOT) -> int:
    """How many NVIDIA GPUs the driver shows; costs no import of torch, which may see fewer of them."""
    gpus = root / "proc/driver/nvidia/gpus"
    return len(list(gpus.iterdir())) if gpus.is_dir() else 0


def detect(
    *, devices: int | None, kind: Literal["cpu", "cuda"] | None, directory: Path, root: Path = ROOT
) -> Cluster:
    """This machine as a cluster of one host; see :meth:`plait.cluster.Cluster.detect`."""
    name = socket.gethostname() or "localhost"
    cores, memory = usable_cores(root), memory_available_bytes(root)
    gpus = _visible_gpus() if gpu_count(root) else 0
    if kind is None:
        kind = "cuda" if gpus else "cpu"
    most = gpus if kind == "cuda" else len(cores)
    count = most if devices is None else devices
    if not 1 <= count <= most:
        raise UsageError(
            f"{count} devices were asked of {name!r}, which has {most} of kind {kind}",
            setting="devices, kind",
            works=f"1 to {most}" if most else 'kind="cpu"',
        )
    tiers = [Tier(name="ram", host=name, capacity_bytes=_whole_mib(memory))]
    free = _whole_mib(disk_free_bytes(directory))
    if free:  # a disk that is full is no tier
        tiers.append(Tier(name="disk", host=name, capacity_bytes=free, directory=str(directory.resolve())))
    found = _gpus(name, count) if kind == "cuda" else _cpus(name, count, cores, memory)
    return Cluster(hosts=(Host(name=name),), devices=found, tiers=tuple(tiers))


def _cpus(host: str, count: int, cores: tuple[int, ...], memory: int) -> tuple[Device, ...]:
    def device(i: int) -> Device:
        mine = cores[i * len(cores) // count : (i + 1) * len(cores) // count]
        return Device(
            name=f"{host}/{i}",
            host=host,
            cores=mine,
            threads=len(mine),
            memory_bytes=_whole_mib(memory // count),
        )

    return tuple(device(i) for i in range(count))


# The two functions for GPUs are not run where plait is developed: there is none.


def _visible_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _gpus(host: str, count: int) -> tuple[Device, ...]:
    import torch

    return tuple(
        Device(
            name=f"{host}/cuda{i}",
            host=host,
            kind="cuda",
            memory_bytes=int(torch.cuda.get_device_properties(i).total_memory),
        )
        for i in range(count)
    )


def _whole_mib(count: int) -> int:
    """Cut to whole MiB, so that it reads well."""
    return count // _MIB * _MIB


def _text(path: Path) -> str:
    """A file's text without its last newline, or nothing where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
