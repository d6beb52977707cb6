"""Plays data-parallel training: every device computes its rows, and gradients are averaged bucket by bucket.

    device0   forward | B bucket 0 | B bucket 1 | B bucket 2 |           wait | optimizer
    device1   forward | B bucket 0   | B bucket 1 | ...                           device 1 is the slower one
    wire                             | bucket 0     | bucket 1  | bucket 2    |

- A bucket is ready when every device has its gradients; it goes when the one before it is through.
- Of several micro-batches, all but the last go forward and back before that, and nothing is averaged.
- A device updates its weights when all buckets are through, and goes on with its next step by itself.
- A codec that shares the device with the computing (:class:`plait.sim.reduction.Coded`) takes it for its
  ``busy_ms`` when the bucket goes, before anything else; the bucket is through when the wire and every
  device's codec are. Where the device would only wait, that is part of the reduction's own time.

Where nothing is contended a step takes forward + backward + what is left on the wire + optimizer, with q the
backlog of the wire after each bucket:  q = max(0, q - backward of the bucket) + its reduction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Unpack

from plait.cluster import Cluster
from plait.profile import Profile
from plait.sim.data_plan import DataPlan, buckets
from plait.sim.played import Played
from plait.sim.reduction import Estimate, Reduction, reduction_of
from plait.sim.scene import Circumstances, Scene
from plait.units import parse_whole

_TRAINING, _CODEC = 0, 1


def play_data(
    plan: DataPlan,
    profile: Profile,
    cluster: Cluster,
    *,
    steps: int = 3,
    collective: Estimate | None = None,
    **circumstances: Unpack[Circumstances],
) -> Played:
    """Play so many steps of a plan on the first devices of a cluster.

    ``collective`` is what averages gradients: anything with ``estimate_ms``, by default torch's ring, or the
    codec of the plan's ``bits`` at the speed that it has on this machine. The rest is what
    :class:`plait.sim.scene.Circumstances` has.
    """
    parse_whole(steps, setting="steps")
    scene = Scene(cluster, plan.devices, **circumstances)
    held = held_bytes(plan, profile)
    scene.check_memory(held)
    play = _Play(scene, plan, profile, reduction_of(collective, plan.bits), steps)
    play.run()
    sizes = sorted({rows for parts in plan.micro_batches for rows in parts})
    remarks = [profile.extrapolates(rows) for rows in sizes]
    return scene.played(
        play.steps_ms,
        work_ms=play.work_ms,
        peak_bytes=held,
        decisions=[remark for remark in remarks if remark is not None],
    )


def held_bytes(plan: DataPlan, profile: Profile) -> tuple[int, ...]:
    """By device, the most that it holds: weights, gradients, optimizer state, activations of its largest
    micro-batch, and the buckets, which DDP keeps beside the gradients.

    What a collective keeps for itself, as error feedback does, is not known here and not counted.
    """
    copies = 3 if plan.devices > 1 else 2
    fixed = sum(copies * block.parameter_bytes + block.optimizer_bytes for block in profile.blocks)
    saved = sum(block.saved_bytes_per_sample for block in profile.blocks)
    return tuple(
        fixed + rows * saved + max(block.transient(rows) for block in profile.blocks)
        for rows, *_ in plan.micro_batches
    )


@dataclass(frozen=True, kw_only=True)
class RingLink:
    """The slowest edge of a ring through devices; a :class:`plait.collective.Link`."""

    bandwidth_bytes_per_s: float
    latency_ms: float


def ring_link(cluster: Cluster, devices: Sequence[str]) -> RingLink:
    """What a collective goes by that passes through devices in their order; edges share a host's egress."""
    pairs = list(zip(devices, [*devices[1:], devices[0]], strict=True))
    links = [cluster.link(*pair) for pair in pairs]
    rates = [link.bandwidth_bytes_per_s for link in links]
    leaving = Counter(link.source for link in links if link.source != link.target)
    for host, edges in leaving.items():
        if edges > 1 or cluster.host(host).egress_bytes_per_s is not None:
            rates.append(cluster.egress_bytes_per_s(host) / edges)
    return RingLink(bandwidth_bytes_per_s=min(rates), latency_ms=max(link.latency_ms for link in links))


class _Average(NamedTuple):
    """The reduction of one bucket."""

    name: str
    edge_bytes: float
    alone_ms: float
    busy_ms: float
    """Of the codec, on every device."""


class _Play:
    """Steps under way."""

    def __init__(
        self, scene: Scene, plan: DataPlan, profile: Profile, reduction: Reduction, steps: int
    ) -> None:
        self.scene, self.steps = scene, steps
        self.rows, self.buckets = plan.micro_batches, buckets(plan, profile)
        blocks, sizes = profile.blocks, {rows for parts in self.rows for rows in parts}
        self.forward_ms = {n: sum(block.forward_ms(n) for block in blocks) for n in sizes}
        self.backward_ms = {
            n: [sum(b.backward_ms(n) for b in blocks[its.first : its.end]) for its in self.buckets]
            for n in sizes
        }
        self.optimizer_ms = sum(block.optimizer_milliseconds for block in blocks)
        self.averages = self._averages(plan.devices, reduction)
        self.work_ms = 0.0
        """Given to the devices so far, at full speed; the codec's is not training."""
        self.done = [0] * plan.devices
        """By device, steps that it has ended."""
        self.ended = [0] * steps
        """By step, devices that have ended it."""
        self.steps_ms: list[float] = []
        self.over_ms = 0.0
        """When the last step was over that all devices have ended."""
        self.waiting = [False] * plan.devices
        """Whether a device has nothing to do before its update."""
        self.ready = [0] * len(self.averages)
        """By average of the step under way, devices that have its gradients."""
        self.through = 0
        """Averages that are there, of the step under way."""
        self.parts = 0
        """What is left of the average under way: the wire, and the codec on each device."""
        self.averaged = 0 if self.averages else steps
        """Steps whose averages are all there."""

    def _averages(self, world: int, reduction: Reduction) -> list[_Average]:
        if world == 1:
            return []
        link = ring_link(self.scene.cluster, self.scene.names)
        sizes = [bucket.gradient_bytes for bucket in self.buckets]
        return [
            _Average(
                f"bucket {number}",
                reduction.wire_bytes(size, world),
                reduction.estimate_ms(size, world, link),
                reduction.busy_ms(size, world),
            )
            for number, size in enumerate(sizes)
            if size  # only the last may be without
        ]

    def run(self) -> None:
        self.scene.crew.begin()
        for place in range(len(self.done)):
            self._forward(place)
        self.scene.simulation.run()

    def _compute(self, place: int, name: str, work_ms: float, then: Callable[[], None]) -> None:
        self.work_ms += work_ms
        stretched_ms = work_ms * self.scene.crew.stretch(place)
        self.scene.devices[place].run(name, stretched_ms, then, priority=_TRAINING)

    def _forward(self, place: int, part: int = 0) -> None:
        """Of a micro-batch."""
        parts = self.rows[place]
        last = part + 1 == len(parts)
        then = partial(self._backward, place, 0) if last else partial(self._accumulate, place, part)
        self._compute(place, "forward", self.forward_ms[parts[part]], then)

    def _accumulate(self, place: int, part: int) -> None:
        """Backward of a micro-batch that others follow."""
        work_ms = sum(self.backward_ms[self.rows[place][part]])
        self._compute(place, "backward", work_ms, partial(self._forward, place, part + 1))

    def _backward(self, place: int, number: int) -> None:
        """Of a bucket, in the last micro-batch."""
        work_ms = self.backward_ms[self.rows[place][-1]][number]
        self._compute(place, f"backward {number}", work_ms, partial(self._gradients, place, number))

    def _gradients(self, place: int, number: int) -> None:
        """A device has the gradients of a bucket."""
        if number < len(self.averages):
            self.ready[number] += 1
            self._average()
        if number + 1 < len(self.buckets):
            self._backward(place, number + 1)
        else:
            self.waiting[place] = True
            self._update(place)

    def _average(self) -> None:
        """Let the next bucket go if it is ready on all devices and the one before is through."""
        if self.parts or self.ready[self.through] < len(self.done):
            return
        average = self.averages[self.through]
        self.parts = 1
        if average.busy_ms:
            self.parts += len(self.done)
            for device in self.scene.devices:
                device.run(f"codec {self.through}", average.busy_ms, self._part, priority=_CODEC)
        self.scene.network.collective(
            average.name, self.scene.names, average.edge_bytes, average.alone_ms, self._part, track="wire"
        )

    def _part(self) -> None:
        """The wire, or a device's codec, is through with the bucket under way."""
        self.parts -= 1
        if self.parts:
            return
        self.through += 1
        if self.through < len(self.averages):
            self._average()
            return
        # No device is in its next step yet: each of them has waited for this.
        self.averaged, self.through, self.ready = self.averaged + 1, 0, [0] * len(self.averages)
        for place in range(len(self.done)):
            self._update(place)

    def _update(self, place: int) -> None:
        if self.waiting[place] and self.averaged > self.done[place]:
            self.waiting[place] = False
            self._compute(place, "optimizer", self.optimizer_ms, partial(self._end, place))

    def _end(self, place: int) -> None:
        """A device has ended its step."""
        step = self.done[place]
        self.done[place] = step + 1
        self.ended[step] += 1
        if self.ended[step] == len(self.done):
            now_ms = self.scene.simulation.now_ms
            self.steps_ms.append(now_ms - self.over_ms)
            self.over_ms = now_ms
        if step + 1 < self.steps:
            self._forward(place)
        elif self.ended[-1] == len(self.done):
            self.scene.crew.stop()
