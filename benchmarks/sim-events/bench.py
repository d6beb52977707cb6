"""How fast the simulator's core is, and how much memory it takes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush

from plait.bench import Bench
from plait.cluster import Cluster
from plait.sim import Device, Network, Simulation

DEVICES = 1024
STAGES = 64
SPANS = 8192


def cluster(hosts: int, devices_per_host: int = 1) -> Cluster:
    return Cluster.uniform(
        hosts=hosts, devices_per_host=devices_per_host, memory="16GiB", bandwidth="10gbit", latency="20us"
    )


class Timer:
    """An event again and again."""

    def __init__(self, simulation: Simulation, period_ms: float, events: int) -> None:
        self.simulation, self.period_ms, self.events = simulation, period_ms, events

    def ring(self) -> None:
        if self.simulation.events < self.events:
            self.simulation.after(self.period_ms, self.ring)


class Worker:
    """Works again and again; what comes in between matters more."""

    def __init__(self, device: Device, work_ms: float, events: int, *, priority: int = 0) -> None:
        self.device, self.work_ms, self.events, self.priority = device, work_ms, events, priority

    def work(self) -> None:
        if self.device.simulation.events < self.events:
            self.device.run("work", self.work_ms, self.work, priority=self.priority)

    def rest(self) -> None:
        """As work, with a pause after it, which the background has."""
        if self.device.simulation.events < self.events:
            self.device.run("work", self.work_ms, self.pause, priority=self.priority)

    def pause(self) -> None:
        self.device.simulation.after(self.work_ms, self.rest)


class Sender:
    """Sends again and again, with a channel two at a time."""

    def __init__(
        self,
        network: Network,
        source: str,
        target: str,
        size_bytes: int,
        events: int,
        *,
        channel: bool = False,
    ) -> None:
        self.network, self.source, self.target = network, source, target
        self.size_bytes, self.events = size_bytes, events
        self.channel = (source, target) if channel else None
        for _ in range(2 if channel else 1):
            self.send()

    def send(self) -> None:
        if self.network.simulation.events < self.events:
            self.network.send(
                "message", self.source, self.target, self.size_bytes, self.send,
                channel=self.channel, track="wire",
            )  # fmt: skip


class Ring:
    """Reduces over all devices again and again."""

    def __init__(self, network: Network, devices: list[str], events: int) -> None:
        self.network, self.devices, self.events = network, devices, events

    def reduce(self) -> None:
        if self.network.simulation.events < self.events:
            self.network.collective("reduce", self.devices, 25e6, 40.0, self.reduce, track="wire")


def timers(events: int) -> Simulation:
    simulation = Simulation(spans=SPANS)
    for place in range(DEVICES):
        simulation.at(place / DEVICES, Timer(simulation, 1 + place / 7919, events).ring)
    simulation.run()
    return simulation


def works(events: int) -> Simulation:
    simulation = Simulation(spans=SPANS)
    for place in range(DEVICES):
        Worker(Device(simulation, f"device{place}", jitter=0.05), 1 + place / 7919, events).work()
    simulation.run()
    return simulation


def preemptions(events: int) -> Simulation:
    simulation = Simulation(spans=SPANS)
    for place in range(DEVICES):
        device = Device(simulation, f"device{place}", switch_ms=0.01)
        Worker(device, 1 + place / 7919, events, priority=1).rest()
        Worker(device, 5 + place / 7919, events).work()
    simulation.run()
    return simulation


def messages(events: int) -> Simulation:
    """512 pairs of hosts that share nothing with each other."""
    simulation = Simulation(spans=SPANS)
    network = Network(simulation, cluster(DEVICES))
    for place in range(0, DEVICES, 2):
        source, target = f"node{place}/0", f"node{place + 1}/0"
        Sender(network, source, target, 1_000_000 + place, events)
    simulation.run()
    return simulation


def neighbours(events: int, *, channel: bool = True) -> Simulation:
    """Every host sends to both neighbours all the time."""
    simulation = Simulation(spans=SPANS)
    network = Network(simulation, cluster(STAGES))
    for place in range(STAGES - 1):
        for source, target in ((place, place + 1), (place + 1, place)):
            size = 1_000_000 + 1000 * source
            Sender(network, f"node{source}/0", f"node{target}/0", size, events, channel=channel)
    simulation.run()
    return simulation


def reductions(events: int) -> Simulation:
    simulation = Simulation(spans=SPANS)
    there = cluster(DEVICES // 4, 4)
    Ring(Network(simulation, there), [device.name for device in there.devices], events).reduce()
    simulation.run()
    return simulation


def bare_heap(events: int) -> None:
    """The least that an event costs: in and out of a heap, and a call."""
    heap: list[tuple[float, int, Callable[[], None]]] = []
    for place in range(DEVICES):
        heappush(heap, (place / DEVICES, place, _nothing))
    for order in range(DEVICES, DEVICES + events):
        now, _, action = heappop(heap)
        action()
        heappush(heap, (now + 1 + order % DEVICES / 7919, order, action))


def _nothing() -> None:
    pass


def peak_mib(play: Callable[[int], Simulation], events: int) -> float:
    tracemalloc.start()
    try:
        play(events)
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


SCENES: dict[str, Callable[[int], Simulation]] = {
    "events alone": timers,
    "works of 1,024 devices": works,
    "works that are suspended": preemptions,
    "messages, 512 pairs apart": messages,
    "messages, 64 hosts in a chain": neighbours,
    "messages, 64 hosts, other shares each time": partial(neighbours, channel=False),
    "all-reduces of 1,024 devices": reductions,
}


def run(bench: Bench) -> None:
    events = bench.pick(quick=20_000, full=100_000)
    bench.configure(events=events, devices=DEVICES, stages=STAGES, spans=SPANS)
    limit = "a heap and a call"
    sides: dict[str, Callable[[], object]] = {name: partial(play, events) for name, play in SCENES.items()}
    sides[limit] = partial(bare_heap, events)
    measured = bench.interleave(
        sides, repetitions=bench.pick(quick=3, full=5), retries=bench.pick(quick=0, full=2)
    )
    seconds = {one.name: one.scaled(1e6 / events) for one in measured}
    for name in SCENES:
        bench.case(
            f"10^6 events: {name}",
            seconds[name],
            unit="s",
            limit=(limit, seconds[limit]),
            at_most=5.0 if name in ("events alone", "works of 1,024 devices") else None,
        )
    # The ring of spans is full before the end of the shorter run: what more events take would be growth.
    for name, play in SCENES.items():
        half = ("with half of the events", peak_mib(play, events))
        bench.case(f"memory: {name}", peak_mib(play, 2 * events), unit="MiB", limit=half, better="lower")
