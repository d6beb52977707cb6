"""A cluster as planners see it: budgets, speeds and the network of its devices, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from plait.burst.network import Network
from plait.burst.network import Path as Wire
from plait.cluster import Cluster
from plait.errors import UsageError
from plait.profile import Profile
from plait.sim.cards import cards
from plait.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Site:
    """The devices that a job may use."""

    cluster: Cluster
    memory_bytes: int | None = None
    """The job's own limit for each device, if that is less than the device has."""
    process_bytes: int = 0
    """What a worker's process holds by itself; it comes off every budget."""

    def __post_init__(self) -> None:
        for name, budget, _ in zip(self.names, self.budgets, self.speeds, strict=True):
            if budget <= 0:
                raise UsageError(
                    f"device {name!r} has {format_bytes(budget + self.process_bytes)}, and a worker's "
                    f"process takes {format_bytes(self.process_bytes)} by itself",
                    setting="process_bytes",
                    works="more memory, or a smaller process",
                )

    def __len__(self) -> int:
        return len(self.cluster.devices)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The devices."""
        return tuple(device.name for device in self.cluster.devices)

    @cached_property
    def budgets(self) -> tuple[int, ...]:
        """By device, the bytes that a job may hold there."""
        limit = self.memory_bytes
        has = [device.memory_bytes for device in self.cluster.devices]
        return tuple((one if limit is None else min(one, limit)) - self.process_bytes for one in has)

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """By device, in multiples of the first one's, on which the profile is taken to have been measured."""
        devices = self.cluster.devices
        rated = [device.gflops for device in devices if device.gflops is not None]
        if rated and len(rated) < len(devices):
            (unknown, *_) = (device.name for device in devices if device.gflops is None)
            raise UsageError(
                f"the speed of device {unknown!r} is not known, and that of others is",
                setting="devices.gflops",
                works="gflops of all devices or of none, or Cluster.measure()",
            )
        return tuple(speed / rated[0] for speed in rated) or (1.0,) * len(devices)

    @property
    def on_cpu(self) -> bool:
        """Whether what packs and sends takes the device's own core."""
        return any(device.kind == "cpu" for device in self.cluster.devices)

    def elsewhere(self, profile: Profile) -> tuple[str, ...]:
        """What to say of a profile that was measured on another kind of device."""
        kinds = sorted({device.kind for device in self.cluster.devices} - {profile.device})
        if not profile.device or not kinds:
            return ()
        return (
            f"the profile was measured on {profile.device}, and the cluster has {' and '.join(kinds)}: times "
            f"are those of {profile.device}; `plait profile` on such a device measures them",
        )

    def slowest(self, count: int) -> float:
        """The speed of the slowest of the first devices."""
        return min(self.speeds[:count])

    @cached_property
    def network(self) -> Network:
        """What lies between any two devices: their link, or what the host can send if that is less."""
        cluster = self.cluster
        if len(self) == 1:
            return Network(bandwidth_bytes_per_s=float("inf"))
        hosts = list(dict.fromkeys(device.host for device in cluster.devices))
        counts = {host: len(cluster.devices_of(host)) for host in hosts}
        leaving = cards(cluster).leaving
        ways = {
            (one, other): self._way(one, other, leaving[one])
            for one in hosts
            for other in hosts
            if one != other or counts[one] > 1
        }
        if len(set(ways.values())) == 1:
            rate, latency = next(iter(ways.values()))
            return Network(bandwidth_bytes_per_s=rate, latency_ms=latency)
        of = [device.host for device in cluster.devices]
        tables: list[tuple[tuple[float, ...], ...]] = [
            tuple(tuple(ways.get((one, other), (0.0, 0.0))[place] for other in of) for one in of)
            for place in (0, 1)
        ]
        return Network(bandwidth_bytes_per_s=tables[0], latency_ms=tables[1])

    def _way(self, one: str, other: str, leaving_bytes_per_s: float) -> tuple[float, float]:
        link = self.cluster.link(one, other)
        rate = link.bandwidth_bytes_per_s
        if one != other:
            rate = min(rate, leaving_bytes_per_s)
        return rate, link.latency_ms

    def ring(self, width: int) -> Wire:
        """The slowest link of a ring through the first devices."""
        return self.network.ring(width)


def enough(count_bytes: float) -> str:
    """A size in whole MiB, rounded up: what is named in an error must work."""
    return f"{-(-int(count_bytes) // (1 << 20))}MiB"


def covering(profile: Profile, rows: Sequence[int]) -> tuple[str, ...]:
    """What to say of batch sizes that lie beyond what was measured."""
    found = (profile.extrapolates(size) for size in (min(rows), max(rows)))
    return tuple(dict.fromkeys(remark for remark in found if remark is not None))
