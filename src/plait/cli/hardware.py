"""What ``plait doctor`` says of the machine: processor, memory, disk, GPUs, and what the lab may do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from plait.cli.finding import Finding
from plait.cli.software import Torch

_MEMORY_S = 0.5
_MEMORY_CORES = 8
"""So many measure memory: a buffer for each of a hundred would take long to make."""
_DISK_FIRST_BYTES, _DISK_BYTES = 4 << 20, 64 << 20
_DISK_S = 2.0
"""How long the disk may take at the larger size, by what the smaller took."""
_DISK_PASSES = 3
"""A measurement writes the file, writes it again and reads it."""


def processor() -> Iterator[Finding]:
    """The processor, its instruction sets and how much of it a process here may use."""
    from plait.bench.machine import describe
    from plait.cluster import machine

    about = describe()
    sets = " ".join(about["isa"]) or "no vector instructions that plait knows"
    yield Finding(name="processor", state="ok", found=f"{about['cpu']}, {about['architecture']}: {sets}")
    cores, all_cores, quota = machine.usable_cores(), os.cpu_count() or 1, machine.cpu_quota()
    limited = "" if quota is None else f", {quota:g} by the control group"
    yield Finding(
        name="cores",
        state="ok",
        found=f"{len(cores)} of {all_cores} usable{limited}",
        figures={"usable": len(cores), "all": all_cores},
    )


def room(directory: Path) -> Iterator[Finding]:
    """How much there is of memory, and of disk where spilled files would go."""
    from plait.cluster import machine
    from plait.units import format_bytes

    limit, free = machine.memory_limit_bytes(), machine.memory_available_bytes()
    whole = machine.memory_total_bytes() if limit is None else limit
    yield Finding(
        name="memory",
        state="ok",
        found=f"{format_bytes(free)} free of {format_bytes(whole)}"
        + ("" if limit is None else " (the control group's limit)"),
        figures={"free_bytes": free, "all_bytes": whole},
    )
    kind, free = machine.file_system(directory), machine.disk_free_bytes(directory)
    in_memory = kind in ("tmpfs", "ramfs")
    yield Finding(
        name="disk",
        state="without" if in_memory else "ok",
        found=f"{format_bytes(free)} free in {directory.resolve()} ({kind})",
        consequence="files there take memory: spilling to them frees none" if in_memory else None,
        remedy="--directory on a disk" if in_memory else None,
        figures={"free_bytes": free},
    )


def memory_bandwidth() -> Finding:
    """How fast memory is, roughly, in about a second."""
    from plait.cluster.machine import usable_cores
    from plait.cluster.measure import measure_memory
    from plait.units import format_bytes

    cores = usable_cores()[:_MEMORY_CORES]
    read, copy = measure_memory(cores, seconds=_MEMORY_S)
    busy = "one core" if len(cores) == 1 else f"{len(cores)} cores at once"
    return Finding(
        name="memory bandwidth",
        state="ok",
        found=f"read {format_bytes(read)}/s, copy {format_bytes(copy)}/s, by {busy}",
        figures={"read_bytes_per_s": read, "copy_bytes_per_s": copy, "cores": len(cores)},
    )


def shared_pages() -> Finding:
    """In what pages processes can share memory: spill's transfers go to and from such memory."""
    from plait.shared_memory import page_bytes
    from plait.units import format_bytes

    size = page_bytes()
    small = size <= os.sysconf("SC_PAGE_SIZE")
    return Finding(
        name="shared memory",
        state="without" if small else "ok",
        found=f"in pages of {format_bytes(size)}",
        consequence="spill moves blocks page by page: a disk may take up to twice as long" if small else None,
        remedy="root, user namespaces, or transparent_hugepage/shmem_enabled=always" if small else None,
        figures={"page_bytes": size},
    )


def disk_bandwidth(directory: Path) -> Finding:
    """How fast the disk is, roughly, in about a second; a slow one is asked for less."""
    from plait.cluster.disk import probe_disk
    from plait.errors import UsageError
    from plait.units import format_bytes

    name, elsewhere = "disk bandwidth", "--directory on another disk"
    try:
        speed = probe_disk(directory, most_bytes=_DISK_FIRST_BYTES)
        if speed is not None:
            slower = min(speed.read_bytes_per_s, speed.write_bytes_per_s)
            if _DISK_S * slower > _DISK_PASSES * _DISK_BYTES:
                speed = probe_disk(directory, most_bytes=_DISK_BYTES) or speed
    except (UsageError, OSError) as error:
        why = error.what if isinstance(error, UsageError) else f"{directory}: {error.strerror}"
        return Finding(
            name=name,
            state="without",
            found=why,
            consequence="nothing can be spilled there",
            remedy=elsewhere,
        )
    if speed is None:
        return Finding(
            name=name,
            state="without",
            found=f"not measured: {directory.resolve()} has no room",
            consequence="nothing can be spilled there",
            remedy=elsewhere,
        )
    read, write = speed.read_bytes_per_s, speed.write_bytes_per_s
    return Finding(
        name=name,
        state="ok" if speed.direct else "without",
        found=f"read {format_bytes(read)}/s, write {format_bytes(write)}/s"
        + (", past the page cache" if speed.direct else ""),
        consequence=None if speed.direct else "there is no direct I/O: these are figures of the page cache",
        remedy=None if speed.direct else elsewhere,
        figures={"read_bytes_per_s": read, "write_bytes_per_s": write},
    )


def gpus(count: int, torch: Torch | None) -> Finding:
    """The GPUs that the driver shows, and whether torch, where it was asked, can use them."""
    if not count:
        return Finding(
            name="gpus",
            state="without",
            found="none",
            consequence="everything runs on the CPU; what needs a GPU is not run",
            remedy="an NVIDIA GPU with its driver, and torch built with CUDA",
        )
    if torch is None:
        return Finding(
            name="gpus", state="ok", found=f"{count}; torch was not asked", figures={"count": count}
        )
    if torch.cuda is None:
        consequence, remedy = f"torch {torch.version} is built without CUDA", "a build of torch with CUDA"
    elif len(torch.gpus) < count:
        consequence = f"torch {torch.version}, built with CUDA {torch.cuda}, sees {len(torch.gpus)} of them"
        remedy = f"CUDA_VISIBLE_DEVICES unset, and a driver for CUDA {torch.cuda}"
    else:
        return Finding(name="gpus", state="ok", found=", ".join(torch.gpus), figures={"count": count})
    return Finding(
        name="gpus",
        state="without",
        found=str(count),
        consequence=consequence,
        remedy=remedy,
        figures={"count": count},
    )


def isolation() -> Iterator[Finding]:
    """What the lab and background work may do: namespaces, memory limits, idle priority."""
    from plait.burst.cgroup import find_trees
    from plait.lab.memory import can_limit, find_hierarchy
    from plait.lab.network import missing

    lacking = missing()
    yield Finding(
        name="lab network",
        state="ok" if lacking is None else "without",
        found="namespaces and shaped links" if lacking is None else f"{lacking} is missing",
        consequence=lacking and "the lab's hosts share the loopback device, which cannot be shaped",
        remedy=lacking and "root, and iproute2 (apt-get install iproute2)",
    )
    hierarchy, limits = find_hierarchy(), can_limit()
    found = "none with a memory controller" if hierarchy is None else f"version {hierarchy.version}"
    yield Finding(
        name="control groups",
        state="ok" if limits else "without",
        found=found if limits or hierarchy is None else f"{found}, not writable",
        consequence=None if limits else "the lab cannot hold a host to a memory limit",
        remedy=None if limits else "root, with control groups mounted writable",
    )
    uses = {use for tree in find_trees() for use in tree.uses}
    yield background("idle" in uses, "freeze" in uses)


def background(idle: bool, freeze: bool) -> Finding:
    """By what background work is held back: by control groups, or by what every process may do."""
    lost = [] if idle else ["SCHED_IDLE takes the place of an idle group"]
    lost += [] if freeze else ["SIGSTOP takes the place of freezing, and may miss a process that just starts"]
    return Finding(
        name="background work",
        state="without" if lost else "ok",
        found=" and ".join(["an idle group"] * idle + ["freezing"] * freeze) or "no control group for it",
        consequence="; ".join(lost) or None,
        remedy="root, with control groups (cpu, freezer) mounted writable" if lost else None,
    )
