"""What there is to train on: hosts, the devices and memory tiers of each, and the links between them.

A cluster is plain data. It is read from a file, detected, measured, or written down for hardware that
one does not have; whoever plans or simulates cannot tell the difference. Figures that nobody has
measured or written are None, never guessed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar

from plait.cluster.parts import ANY, Device, Host, Link, Tier, bytes_per_s, milliseconds
from plait.errors import FileError, UsageError
from plait.units import parse_bytes, parse_seconds

Part = Literal["memory", "compute", "disk", "network"]
PARTS: tuple[Part, ...] = ("memory", "compute", "disk", "network")
"""What can be measured."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts, devices, tiers and links that fit together; anything that does not is refused here."""

    hosts: tuple[Host, ...]
    devices: tuple[Device, ...]
    tiers: tuple[Tier, ...] = ()
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        for name in ("hosts", "devices", "tiers", "links"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for some, setting in ((self.hosts, "hosts"), (self.devices, "devices")):
            if not some:
                raise UsageError(
                    f"a cluster without {setting}", setting=setting, works=f"at least one of {setting}"
                )
        _distinct(
            [host.name for host in self.hosts] + [device.name for device in self.devices], "hosts, devices"
        )
        _distinct([f"{tier.host}:{tier.name}" for tier in self.tiers], "tiers")
        _distinct([f"{link.source} to {link.target}" for link in self.links], "links")
        for device in self.devices:
            self._on_known_host(device.host, f"device {device.name!r}", "devices.host")
        for tier in self.tiers:
            self._on_known_host(tier.host, f"tier {tier.name!r}", "tiers.host")
        for link in self.links:
            for end in {link.source, link.target} - {ANY}:
                self._on_known_host(
                    end, f"the link from {link.source!r} to {link.target!r}", "links.from, links.to"
                )
        self._cores_used_once()
        self._all_reachable()

    # What a planner asks.

    def host(self, name: str) -> Host:
        """The host of that name."""
        return _found(self._hosts, name, "host", "hosts")

    def device(self, name: str) -> Device:
        """The device of that name."""
        return _found(self._devices, name, "device", "devices")

    def host_of(self, name: str) -> str:
        """The name of the host that a device is on; a host's own name is taken too."""
        return name if name in self._hosts else self.device(name).host

    def devices_of(self, host: str) -> tuple[Device, ...]:
        """The devices of a host."""
        self.host(host)
        return tuple(device for device in self.devices if device.host == host)

    def tiers_of(self, host: str) -> tuple[Tier, ...]:
        """The tiers of a host, in the order in which they were given: fastest first."""
        self.host(host)
        return tuple(tier for tier in self.tiers if tier.host == host)

    def tier(self, host: str, name: str) -> Tier:
        """One tier of a host."""
        return _found({tier.name: tier for tier in self.tiers_of(host)}, name, f"tier of {host!r}", "tiers")

    def link(self, source: str, target: str) -> Link:
        """The link from one host or device to another; between two devices of a host, the one within it."""
        a, b = self.host_of(source), self.host_of(target)
        link = self._links.get((a, b))
        if link is None and a != b:
            link = self._links[a, b] = replace(self._links[ANY, ANY], source=a, target=b)
        if link is None:
            raise UsageError(
                f"nothing is known of the link within host {a!r}",
                setting="links",
                works=f'a link from "{a}" to "{b}", or Cluster.measure()',
            )
        return link

    def egress_bytes_per_s(self, host: str) -> float:
        """What all devices of a host together can send to other hosts; infinite where there are none."""
        stated = self.host(host).egress_bytes_per_s
        rates = [
            self.link(host, other.name).bandwidth_bytes_per_s for other in self.hosts if other.name != host
        ]
        return min(max(rates, default=math.inf), math.inf if stated is None else stated)

    # Clusters made from this one.

    def take(self, count: int) -> Cluster:
        """The first so many devices, with the hosts, tiers and links that they use."""
        if not 1 <= count <= len(self.devices):
            raise UsageError(
                f"{count} devices were asked of a cluster of {len(self.devices)}",
                setting="devices",
                works=f"1 to {len(self.devices)}",
            )
        devices = self.devices[:count]
        used = {device.host for device in devices}
        return replace(self._only(used), devices=devices)

    def only(self, *hosts: str) -> Cluster:
        """These hosts, with what is on them and between them."""
        return self._only({self.host(name).name for name in hosts})

    def _only(self, hosts: Collection[str]) -> Cluster:
        kept = {*hosts, ANY}
        return Cluster(
            hosts=tuple(host for host in self.hosts if host.name in hosts),
            devices=tuple(device for device in self.devices if device.host in hosts),
            tiers=tuple(tier for tier in self.tiers if tier.host in hosts),
            links=tuple(link for link in self.links if link.source in kept and link.target in kept),
        )

    @classmethod
    def uniform(
        cls,
        *,
        hosts: int = 1,
        devices_per_host: int = 1,
        memory: int | str,
        bandwidth: float | str,
        latency: float | str = 0.0,
        local_bandwidth: float | str | None = None,
        local_latency: float | str | None = None,
        gflops: float | None = None,
    ) -> Cluster:
        """Hosts that are all alike, ``node0`` and up, for hardware that one does not have.

        Sizes, rates and times are numbers (bytes, bytes a second, seconds) or text such as ``"24GiB"``,
        ``"1gbit"`` and ``"40us"``. The links within a host are as those between hosts unless said.
        """
        if hosts < 1 or devices_per_host < 1:
            raise UsageError(
                f"{hosts} hosts with {devices_per_host} devices each",
                setting="hosts, devices_per_host",
                works="1 or more",
            )
        between = Link(
            bandwidth_bytes_per_s=bytes_per_s(bandwidth, setting="bandwidth"),
            latency_ms=milliseconds(latency, "latency"),
        )
        within = between
        if local_bandwidth is not None:
            within = replace(
                within, bandwidth_bytes_per_s=bytes_per_s(local_bandwidth, setting="local_bandwidth")
            )
        if local_latency is not None:
            within = replace(within, latency_ms=milliseconds(local_latency, "local_latency"))
        names = [f"node{i}" for i in range(hosts)]
        return cls(
            hosts=tuple(Host(name=name) for name in names),
            devices=tuple(
                Device(name=f"{name}/{i}", host=name, memory_bytes=parse_bytes(memory), gflops=gflops)
                for name in names
                for i in range(devices_per_host)
            ),
            links=(between, *(replace(within, source=name, target=name) for name in names)),
        )

    # Where clusters come from and go to.

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a TOML file; what is wrong with it is said with the file and the key."""
        from plait.cluster.file import load

        return load(Path(path))

    def to_toml(self) -> str:
        """The text of the file that :meth:`load` reads back as an equal cluster."""
        from plait.cluster.file import to_toml

        return to_toml(self)

    def save(self, path: str | Path) -> None:
        """Write the file that :meth:`load` reads."""
        try:
            Path(path).write_text(self.to_toml(), encoding="utf-8")
        except OSError as error:
            raise FileError(
                f"{path}: cannot be written: {error.strerror}",
                setting="cluster file",
                works="a file in a directory that exists",
            ) from None

    @classmethod
    def detect(
        cls,
        *,
        devices: int | None = None,
        kind: Literal["cpu", "cuda"] | None = None,
        directory: str | Path = ".",
    ) -> Cluster:
        """This machine, as far as it can be known without measuring.

        A machine with GPUs gives one device a GPU; any other, one device a core that this process may
        use, or ``devices`` with the cores divided among them. ``directory`` is where spilled files
        would go.
        """
        from plait.cluster.machine import detect

        return detect(devices=devices, kind=kind, directory=Path(directory))

    def measure(
        self,
        parts: Iterable[Part] = PARTS,
        *,
        seconds: float = 0.5,
        disk_bytes: int | str = "256MiB",
        at_once: int = 1,
        timeout: float | str = 60.0,
    ) -> Cluster:
        """The same cluster with measured figures.

        A process alone measures the host that it is on. Started on several hosts under the torchrun
        contract, each measures its own host (of several on one host, the first), then every ordered pair
        of hosts is measured, and all return the same whole cluster.

        ``seconds`` is how long one figure may take, ``disk_bytes`` how much is written to disk,
        ``at_once`` how many pairs of hosts with none in common are measured together, ``timeout``
        (seconds) how long one waits for another host.
        """
        from plait.cluster.measure import measure

        return measure(
            self,
            parts=tuple(parts),
            seconds=seconds,
            disk_bytes=parse_bytes(disk_bytes, setting="disk_bytes"),
            at_once=at_once,
            timeout_s=parse_seconds(timeout, setting="timeout"),
        )

    @cached_property
    def _hosts(self) -> dict[str, Host]:
        return {host.name: host for host in self.hosts}

    @cached_property
    def _devices(self) -> dict[str, Device]:
        return {device.name: device for device in self.devices}

    @cached_property
    def _links(self) -> dict[tuple[str, str], Link]:
        return {(link.source, link.target): link for link in self.links}

    def _on_known_host(self, host: str, what: str, setting: str) -> None:
        if host not in self._hosts:
            known = ", ".join(self._hosts)
            raise UsageError(f"{what} is on host {host!r}, which is not there", setting=setting, works=known)

    def _cores_used_once(self) -> None:
        used: dict[tuple[str, int], str] = {}
        for device in self.devices:
            for core in device.cores if device.kind == "cpu" else ():
                other = used.setdefault((device.host, core), device.name)
                if other != device.name:
                    raise UsageError(
                        f"devices {other!r} and {device.name!r} both have core {core} of {device.host!r}",
                        setting="devices.cores",
                        works="a core for one device only",
                    )

    def _all_reachable(self) -> None:
        if (ANY, ANY) in self._links:
            return
        for a in self._hosts:
            for b in self._hosts:
                if a != b and (a, b) not in self._links:
                    raise UsageError(
                        f"host {b!r} cannot be reached from {a!r}: there is no link",
                        setting="links",
                        works=f'a link from "{a}" to "{b}", or one without ends for any two hosts',
                    )


Thing = TypeVar("Thing")


def _found(things: dict[str, Thing], name: str, what: str, setting: str) -> Thing:
    if name not in things:
        raise UsageError(
            f"there is no {what} {name!r}", setting=setting, works=", ".join(things) or "none is known"
        )
    return things[name]


def _distinct(names: Iterable[str], setting: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise UsageError(f"{name!r} is there {count} times", setting=setting, works="one of each name")
