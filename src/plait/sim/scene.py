"""The cluster of one foreground job as it is simulated: its devices, the network, and background work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

from plait.cluster import Cluster
from plait.errors import UsageError
from plait.sim.background import Background, Crew
from plait.sim.device import Device
from plait.sim.network import Cross, Network
from plait.sim.played import Played
from plait.sim.route import TraceKey
from plait.sim.simulation import Simulation
from plait.sim.trace import Trace
from plait.units import format_bytes


class Circumstances(TypedDict, total=False):
    """What a job meets that its plan does not know of, and how it is noted; the same for every player."""

    name: str
    """The job's."""
    traces: Mapping[TraceKey, Trace] | None
    cross: Iterable[Cross]
    """Other people's use of the network, as :class:`plait.sim.network.Network` has it."""
    speeds: Mapping[str, Trace | float] | None
    """By name of the device; 1 where nothing is said."""
    jitter: float
    switch_ms: float
    """Of devices, as :class:`plait.sim.device.Device` has them."""
    seed: int
    background: Sequence[Background]
    spans: int
    """That the timeline keeps, at most."""


class Scene:
    """The first ``count`` devices of a cluster, and what lies between them."""

    def __init__(
        self,
        cluster: Cluster,
        count: int,
        *,
        name: str = "job",
        track: str | None = None,
        traces: Mapping[TraceKey, Trace] | None = None,
        cross: Iterable[Cross] = (),
        speeds: Mapping[str, Trace | float] | None = None,
        jitter: float = 0.0,
        switch_ms: float = 0.0,
        seed: int = 0,
        background: Sequence[Background] = (),
        spans: int = 65_536,
    ) -> None:
        """``track`` is what the devices' tracks on the timeline are called, with a number each, where not by
        their own names; the rest is what :class:`Circumstances` has."""
        if name in {work.name for work in background}:
            raise UsageError(
                f"the job and its background are both called {name!r}",
                setting="background",
                works="another name",
            )
        self.name = name
        self.cluster = cluster.take(count)
        self.names = tuple(device.name for device in self.cluster.devices)
        self.simulation = Simulation(seed=seed, spans=spans)
        # All of the cluster: other people's traffic may come from hosts that the job does not use.
        self.network = Network(self.simulation, cluster, traces=traces, cross=cross)
        self.devices = tuple(
            Device(
                self.simulation,
                self.names[place] if track is None else f"{track}{place}",
                speed=speed,
                jitter=jitter,
                switch_ms=switch_ms,
            )
            for place, speed in enumerate(_speeds(cluster, self.cluster, speeds or {}))
        )
        self.crew = Crew(self.simulation, self.devices, background)

    def check_memory(self, peak_bytes: Sequence[int]) -> None:
        """Refuse what does not fit the devices; by device, the most that it would hold."""
        for device, held in zip(self.cluster.devices, peak_bytes, strict=True):
            if held > device.memory_bytes:
                raise UsageError(
                    f"device {device.name!r} would hold {format_bytes(held)}, "
                    f"and has {format_bytes(device.memory_bytes)}",
                    setting="devices.memory",
                    works=f"{-(-held // (1 << 20))}MiB, more devices, or a smaller batch",
                )

    def played(
        self,
        steps_ms: Sequence[float],
        *,
        work_ms: float,
        peak_bytes: Sequence[int],
        decisions: Sequence[str],
    ) -> Played:
        """What came of it; ``work_ms`` is the foreground's own, and the crew's is added."""
        return Played(
            steps_ms={self.name: tuple(steps_ms)},
            makespan_ms=self.simulation.now_ms,
            timeline=self.simulation.timeline,
            events=self.simulation.events,
            busy_ms={name: device.busy_ms() for name, device in zip(self.names, self.devices, strict=True)},
            wire_bytes={host.name: self.network.egress_bytes(host.name) for host in self.cluster.hosts},
            peak_bytes=dict(zip(self.names, peak_bytes, strict=True)),
            decisions=tuple(decisions),
            work_ms={self.name: work_ms, **self.crew.work_ms},
        )


def _speeds(cluster: Cluster, used: Cluster, given: Mapping[str, Trace | float]) -> list[Trace | float]:
    """By device, in multiples of the first one's, on which the profile is taken to have been measured."""
    for name in given:
        cluster.device(name)
    rated = [device.gflops for device in used.devices if device.gflops is not None]
    if rated and len(rated) < len(used.devices):
        (unknown, *_) = (device.name for device in used.devices if device.gflops is None)
        raise UsageError(
            f"the speed of device {unknown!r} is not known, and that of others is",
            setting="devices.gflops",
            works="gflops of all devices or of none, or Cluster.measure()",
        )
    found: list[Trace | float] = []
    for place, device in enumerate(used.devices):
        own = rated[place] / rated[0] if rated else 1.0
        factor = given.get(device.name, 1.0)
        found.append(factor.scaled(own) if isinstance(factor, Trace) else own * factor)
    return found
