"""Plays a pipeline: stages on devices, orders of any family, messages that share the network with others.

The rules are those of :mod:`plait.pipeline.events`, which predicts a step for the planner: a stage asks the
order what may run and waits where its input is not there, and of each wire the messages go one at a time.
Where nothing else is on the devices and the network, both come to the same figures. Here steps follow each
other, each stage with its update between them, and speeds and rates may change at any time.

    stage0  F0 F1 .. B0 F2 B1 F3 B2 .. B3 opt | F0 F1
    stage1  .. F0 B0 F1 B1 F2 B2 F3 B3 opt    | .. F0

Weights that several stages hold are summed before they are updated (:mod:`plait.sim.summing`).

A step is counted from one begin of the first stage to the next: its last backward is the last of all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Unpack

from plait.cluster import Cluster
from plait.pipeline.candidate import Candidate
from plait.pipeline.events import Load
from plait.pipeline.memory import peak_bytes
from plait.pipeline.orders import Kind
from plait.pipeline.plan import PipelinePlan
from plait.pipeline.validity import check
from plait.profile import Profile
from plait.sim.played import Played
from plait.sim.scene import Circumstances, Scene
from plait.sim.staging import Staging
from plait.sim.summing import Summing
from plait.units import parse_whole


def play_pipeline(
    plan: PipelinePlan,
    profile: Profile,
    cluster: Cluster,
    *,
    steps: int = 3,
    **circumstances: Unpack[Circumstances],
) -> Played:
    """Play so many steps of a plan, its stages on the first devices of a cluster.

    The rest is what :class:`plait.sim.scene.Circumstances` has.
    """
    parse_whole(steps, setting="steps")
    check(plan.order)
    staging = Staging.of(plan, profile)
    scene = Scene(cluster, staging.stages, track="stage", **circumstances)
    candidate = plan.candidate
    held = peak_bytes(candidate, staging.memories(candidate.rows))
    scene.check_memory(held)
    stages, steps_ms, loads = Stages(scene, staging), list[float](), staging.loads(candidate.rows)

    def following(step_ms: float) -> None:
        steps_ms.append(step_ms)
        if len(steps_ms) < steps:
            stages.begin(candidate, loads, following)

    scene.crew.begin()
    stages.begin(candidate, loads, following)
    scene.simulation.run()
    return scene.played(
        steps_ms,
        work_ms=stages.work_ms,
        peak_bytes=held,
        decisions=staging.remarks([candidate]),
    )


class Passed(NamedTuple):
    """A forward or backward that has ended."""

    stage: int
    kind: Kind
    micro_batch: int
    start_ms: float
    end_ms: float


class Message(NamedTuple):
    """A message that has come."""

    wire: int
    """2i leads from stage i to the next, 2i+1 back to it."""
    micro_batch: int
    size_bytes: float
    sent_ms: float
    arrived_ms: float


class Stages:
    """The stages of a pipeline, and the step that they are in."""

    def __init__(self, scene: Scene, staging: Staging) -> None:
        self.scene, self._optimizer_ms = scene, staging.optimizer_ms
        self._summing = Summing(scene, staging.shared, self._update)
        self.passed: list[Passed] = []
        self.messages: list[Message] = []
        """Of the step under way, or of the last."""
        count = len(scene.devices)
        self._last = count - 1
        self._enders = [{kind: partial(self._end, stage, kind) for kind in _KINDS} for stage in range(count)]
        self._updating = [False] * count
        self._unfinished = 0
        """Stages that have not ended their step, of all steps that have begun."""
        self.work_ms = 0.0
        """Given to the devices so far, at full speed."""
        self._then: Callable[[float], None] = _nothing
        self._touched: set[int] = set()
        self._outgoing: list[tuple[int, int]] = []
        """Of a step under a rule: messages to be sent when the stages have chosen."""

    def begin(self, candidate: Candidate, loads: Sequence[Load], then: Callable[[float], None]) -> None:
        """Begin a step now; when the first stage has ended it, ``then`` is called with its milliseconds."""
        self._order, self._shares, self._loads, self._then = candidate.order, candidate.shares, loads, then
        self._listed = candidate.order.steps is not None
        self.passed, self.messages = [], []
        count = self._last + 1
        self._begun_ms = self.scene.simulation.now_ms
        self._started_ms = [0.0] * count
        self._running = self._updating.copy()  # a stage may begin later, after its last update
        self._forwards, self._backwards = [0] * count, [0] * count
        # What has come; the first stage has all of its inputs, the last makes its own gradients.
        self._inputs, self._gradients = [0] * count, [0] * count
        self._inputs[0] = candidate.order.micro_batches
        self._unfinished += count
        for stage in range(count):
            self._touch(stage)

    def _touch(self, stage: int) -> None:
        """Something has changed for a stage.

        A list says what comes, at any time. A rule chooses by what is there, so it is asked when all that
        happens at this moment has happened, and what is sent after that reaches nobody before.
        """
        if self._listed:
            self._choose(stage)
            return
        if not self._touched:
            self.scene.simulation.settle(self._settle)
        self._touched.add(stage)

    def _settle(self) -> None:
        touched, self._touched = sorted(self._touched), set()
        outgoing, self._outgoing = self._outgoing, []
        for stage in touched:
            self._choose(stage)
        for wire, micro_batch in outgoing:
            self._send(wire, micro_batch)

    def _choose(self, stage: int) -> None:
        """Start what a stage may run now, if anything."""
        if self._running[stage]:
            return
        forwards, backwards = self._forwards[stage], self._backwards[stage]
        for kind in self._order.choices(stage, forwards, backwards):
            there, done = (self._inputs, forwards) if kind == "F" else (self._gradients, backwards)
            if there[stage] > done:
                load = self._loads[stage]
                work_ms = (load.forward_ms if kind == "F" else load.backward_ms) * self._shares[done]
                self._running[stage] = True
                self._started_ms[stage] = self.scene.simulation.now_ms
                self._compute(stage, f"{kind}{done}", work_ms, self._enders[stage][kind])
                return

    def _compute(self, stage: int, name: str, work_ms: float, then: Callable[[], None]) -> None:
        self.work_ms += work_ms
        self.scene.devices[stage].run(name, work_ms * self.scene.crew.stretch(stage), then)

    def _end(self, stage: int, kind: Kind) -> None:
        """A computation ends: its result goes to the neighbour, and the stage is free."""
        self._running[stage] = False
        counts = self._forwards if kind == "F" else self._backwards
        micro_batch = counts[stage]
        counts[stage] += 1
        now_ms = self.scene.simulation.now_ms
        self.passed.append(Passed(stage, kind, micro_batch, self._started_ms[stage], now_ms))
        if kind == "F" and stage == self._last:
            self._gradients[stage] += 1
        elif kind == "F" or stage > 0:
            wire = 2 * stage if kind == "F" else 2 * stage - 1
            if self._listed:
                self._send(wire, micro_batch)
            else:
                self._outgoing.append((wire, micro_batch))
        if self._backwards[stage] == self._order.micro_batches:
            self._running[stage] = self._updating[stage] = True
            self._summing.ready(stage)
        self._touch(stage)

    def _send(self, wire: int, micro_batch: int) -> None:
        link, backward = divmod(wire, 2)
        load = self._loads[link + backward]
        size = (load.gradient_bytes if backward else load.output_bytes) * self._shares[micro_batch]
        ends = self.scene.names[link], self.scene.names[link + 1]
        source, target = reversed(ends) if backward else ends
        self.scene.network.send(
            f"{'FB'[backward]}{micro_batch}",
            source,
            target,
            size,
            partial(self._arrive, wire, micro_batch, size, self.scene.simulation.now_ms),
            channel=wire,
            track=f"link{link} {'backward' if backward else 'forward'}",
        )

    def _arrive(self, wire: int, micro_batch: int, size_bytes: float, sent_ms: float) -> None:
        now_ms = self.scene.simulation.now_ms
        self.messages.append(Message(wire, micro_batch, size_bytes, sent_ms, now_ms))
        link, backward = divmod(wire, 2)
        stage = link + 1 - backward
        (self._gradients if backward else self._inputs)[stage] += 1
        self._touch(stage)

    def _update(self, stage: int) -> None:
        self._compute(stage, "optimizer", self._optimizer_ms[stage], partial(self._updated, stage))

    def _updated(self, stage: int) -> None:
        """A stage has ended its step; the first goes on with the next, if there is one."""
        self._running[stage] = self._updating[stage] = False
        self._unfinished -= 1
        if stage == 0:
            self._then(self.scene.simulation.now_ms - self._begun_ms)
        else:
            self._touch(stage)
        if not self._unfinished:
            self.scene.crew.stop()


_KINDS: tuple[Kind, ...] = ("F", "B")


def _nothing(_: float) -> None:
    """Before the first step, nobody waits."""
