"""The pieces of a cluster, each checked by itself: hosts, devices, memory tiers and links."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from plait.errors import UsageError
from plait.units import LEAST_RATE, parse_rate, parse_seconds

ANY = "*"
"""Both ends of the link that holds between any two hosts with none of their own."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine: what its devices share is its memory tiers and its way out to the network."""

    name: str
    address: str | None = None
    """Where other hosts reach it, if that is known."""
    egress_bytes_per_s: float | None = None
    """What all its devices together can send, if that is less than its fastest link."""

    def __post_init__(self) -> None:
        _named(self.name, "host", "hosts.name", "node0")
        if self.name == ANY:
            raise UsageError(
                "'*' stands for any host and cannot name one", setting="hosts.name", works="node0"
            )
        _a_rate(self.egress_bytes_per_s, f"the egress of host {self.name!r}", "hosts.egress", "1gbit")


@dataclass(frozen=True, kw_only=True)
class Device:
    """What runs a worker: a GPU, or on a CPU a process with its own cores, threads and memory budget."""

    name: str
    host: str
    kind: Literal["cpu", "cuda"] = "cpu"
    memory_bytes: int
    """The budget of the worker. On a CPU, the budgets of a host come out of its RAM."""
    cores: tuple[int, ...] = ()
    """The logical cores it is pinned to; none leaves that to the system."""
    threads: int = 1
    gflops: float | None = None
    """Measured fp32 matrix multiplication, 1e9 operations a second, all devices of the host at work."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cores", tuple(self.cores))
        _named(self.name, "device", "devices.name", "node0/0")
        if self.kind not in ("cpu", "cuda"):
            raise UsageError(
                f"device {self.name!r} is of kind {self.kind!r}", setting="devices.kind", works="cpu or cuda"
            )
        if self.threads < 1:
            raise UsageError(
                f"device {self.name!r} has {self.threads} threads", setting="devices.threads", works="1"
            )
        if len(set(self.cores)) < len(self.cores) or any(core < 0 for core in self.cores):
            raise UsageError(
                f"device {self.name!r} has cores {list(self.cores)}, not a set of core numbers",
                setting="devices.cores",
                works="[0, 1]",
            )
        _above_zero(self.memory_bytes, f"the memory of device {self.name!r}", "devices.memory", "4GiB")
        _above_zero(self.gflops, f"the gflops of device {self.name!r}", "devices.gflops", "100.0")


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A level of a host's memory below its devices: ``ram``, ``disk``."""

    name: str
    host: str
    capacity_bytes: int
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    """For RAM, the rate of copying into it."""
    directory: str | None = None
    """Where the files go, for a tier on disk."""
    direct: bool | None = None
    """Whether the directory's file system takes direct I/O, if that is known."""

    def __post_init__(self) -> None:
        _named(self.name, "tier", "tiers.name", "disk")
        what = f"of tier {self.name!r} of host {self.host!r}"
        _above_zero(self.capacity_bytes, f"the capacity {what}", "tiers.capacity", "100GiB")
        _a_rate(self.read_bytes_per_s, f"the read bandwidth {what}", "tiers.read", "1GB/s")
        _a_rate(self.write_bytes_per_s, f"the write bandwidth {what}", "tiers.write", "1GB/s")


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction between two hosts, or between any two, or (both ends alike) within one host."""

    source: str = ANY
    target: str = ANY
    bandwidth_bytes_per_s: float
    """Payload that arrives, without the headers of the network."""
    latency_ms: float = 0.0
    """One way."""

    def __post_init__(self) -> None:
        if (self.source == ANY) != (self.target == ANY):
            raise UsageError(
                f"a link from {self.source!r} to {self.target!r} names one end only",
                setting="links.from, links.to",
                works="both ends, or neither for any two hosts",
            )
        what = f"of the link from {self.source!r} to {self.target!r}"
        _a_rate(self.bandwidth_bytes_per_s, f"the bandwidth {what}", "links.bandwidth", "1gbit")
        if not 0 <= self.latency_ms < math.inf:
            raise UsageError(
                f"the latency {what} is {self.latency_ms} ms", setting="links.latency", works="40us"
            )

    def transfer_ms(self, count_bytes: float) -> float:
        """Time until a message of so many bytes has arrived, with the link to itself."""
        return self.latency_ms + 1e3 * count_bytes / self.bandwidth_bytes_per_s


def milliseconds(duration: float | str, setting: str) -> float:
    """Read a duration (a number is seconds) in milliseconds."""
    return _without_dust(1e3 * parse_seconds(duration, setting=setting))


def bytes_per_s(rate: float | str, setting: str) -> float:
    """Read a rate (a number is bytes a second) in bytes a second."""
    read = parse_rate(rate, setting=setting)
    return _without_dust(read) if isinstance(rate, str) else read


def _without_dust(figure: float) -> float:
    """16.41 gbit is 2051250000 bytes a second, not ...000.0000002: binary fractions are not the user's."""
    return float(f"{figure:.12g}")


def _named(name: str, what: str, setting: str, works: str) -> None:
    if not name.strip():
        raise UsageError(f"a {what} has no name", setting=setting, works=works)


def _above_zero(value: float | None, what: str, setting: str, works: str) -> None:
    if value is not None and not 0 < value < math.inf:
        raise UsageError(f"{what} is {value}, not above zero", setting=setting, works=works)


def _a_rate(value: float | None, what: str, setting: str, works: str) -> None:
    _above_zero(value, what, setting, works)
    if value is not None and value < LEAST_RATE:
        what = f"{what} is {value} bytes/s, less than the smallest rate that plait knows, 1 bit/s"
        raise UsageError(what, setting=setting, works=works)
