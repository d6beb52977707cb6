"""Which machine a measurement was made on, and what else it was doing meanwhile (Linux)."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ISA = (
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "asimd",
    "sve",
)

STEAL_LIMIT = 0.02
"""Above this share of processor time taken by the hypervisor, a measurement counts as disturbed."""
OTHERS_LIMIT = 0.10
"""Above this share of processor time used by other processes, a measurement counts as disturbed."""


def describe() -> dict[str, Any]:
    """The machine: processor, cores, memory, kernel, instruction sets."""
    cpu = _table("/proc/cpuinfo")
    flags = set((cpu.get("flags") or cpu.get("Features") or "").split())
    return {
        "cpu": cpu.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory_bytes": int(_table("/proc/meminfo")["MemTotal"].split()[0]) * 1024,
        "kernel": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "isa": [name for name in _ISA if name in flags],
    }


def versions() -> dict[str, str | None]:
    """The versions of what is measured, read without importing it; None where it is not installed."""
    from plait import __version__

    found: dict[str, str | None] = {"python": platform.python_version(), "plait": __version__}
    for name in ("torch", "numpy", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def load_average() -> list[float]:
    """The load over the last one, five and fifteen minutes."""
    return [round(value, 2) for value in os.getloadavg()]


@dataclass(frozen=True, kw_only=True)
class Activity:
    """What became of the machine's processor time during a measurement, as shares of all cores."""

    seconds: float
    steal: float
    """Taken by the hypervisor for other machines."""
    others: float
    """Used by processes that are not part of the measurement."""

    @property
    def disturbed(self) -> bool:
        """Whether the measurement should be taken with caution, or again."""
        return self.steal > STEAL_LIMIT or self.others > OTHERS_LIMIT


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The kernel's counts of processor time at one moment, in seconds over all cores."""

    busy: float
    idle: float
    steal: float
    own: float
    """Of this process and of those children of it that have ended."""

    @classmethod
    def now(cls) -> Moment:
        """Read the counts."""
        ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        user, nice, system, idle, waiting, irq, softirq, steal = (t / os.sysconf("SC_CLK_TCK") for t in ticks)
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return cls(
            busy=user + nice + system + irq + softirq,
            idle=idle + waiting,
            steal=steal,
            own=sum(u.ru_utime + u.ru_stime for u in usage),
        )

    def left(self, before: Moment) -> float:
        """The share of the processor time wanted since an earlier moment that the hypervisor left."""
        busy, steal = self.busy - before.busy, max(self.steal - before.steal, 0.0)
        return busy / (busy + steal) if busy > 0 else 1.0

    def since(self, before: Moment) -> Activity:
        """What happened between an earlier moment and this one."""
        busy, idle, steal = self.busy - before.busy, self.idle - before.idle, self.steal - before.steal
        total = max(busy + idle + steal, 1e-9)
        cores = os.cpu_count() or 1
        # The kernel counts in ticks: one a core may be in the wrong column, which matters in a short
        # measurement. What is within that doubt is not held against the machine.
        doubt = cores / os.sysconf("SC_CLK_TCK")
        others = max(busy - (self.own - before.own) - doubt, 0.0)
        return Activity(seconds=total / cores, steal=max(steal, 0.0) / total, others=others / total)


def _table(path: str) -> dict[str, str]:
    """The first record of a file of ``name: value`` lines."""
    found: dict[str, str] = {}
    for line in Path(path).read_text().split("\n\n", 1)[0].splitlines():
        name, _, value = line.partition(":")
        found[name.strip()] = value.strip()
    return found
