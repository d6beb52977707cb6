"""Plays burst plans on a cluster, with background work in what they leave idle.

A step is that of :mod:`plait.burst.costs`: blocks forward and back, each on its own first devices; where
widths differ, rows move, one message at a time for each rank that sends or receives
(:mod:`plait.sim.exchange`); gradients are synchronised one block after another from the end of each backward
on, and stand still while rows move; the optimizer follows when all are through. Where nothing disturbs that,
a step takes what :mod:`plait.burst.events` says; a codec that shares the device with the computing takes it
first, as in :mod:`plait.sim.data` (that event model knows nothing of it).

    device0  F0 F1 | F2 F3 B3 B2 | B1   B0   wait  optimizer
    device1  F0 F1 | background  | B1   B0   wait  optimizer

Here devices may be slower than others, change their speed and jitter, and go at their own pace until rows
move; the network is shared with others. With a ``control`` the controller of a run
(:mod:`plait.burst.controller`, its own code) decides after each step what the background may do in the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Unpack

from plait.burst.burst_plan import BurstPlan
from plait.burst.controller import LADDER, Control, Controller
from plait.burst.live import cut_bytes, sharers
from plait.burst.phases import Phase
from plait.burst.rows import Move, moves
from plait.cluster import Cluster
from plait.errors import UsageError
from plait.profile import Profile
from plait.sim.between import between
from plait.sim.device import Device
from plait.sim.exchange import Exchange
from plait.sim.played import Played
from plait.sim.reduction import Estimate, Reduction, reduction_of
from plait.sim.scene import Circumstances, Scene
from plait.sim.wire import Sync, Wire
from plait.units import parse_whole

Action = Callable[[], None]


def play_burst(
    plan: BurstPlan,
    profile: Profile,
    cluster: Cluster,
    *,
    steps: int = 3,
    collective: Estimate | None = None,
    control: Control | None = None,
    **circumstances: Unpack[Circumstances],
) -> Played:
    """Play steps of a plan; device i of it is ``cluster.devices[i]``.

    Without a ``control`` the background may always run, at its lower priority. The rest is what
    :class:`plait.sim.scene.Circumstances` has.
    """
    parse_whole(steps, setting="steps")
    if tuple(block.name for block in profile.blocks) != plan.blocks:
        raise UsageError(
            f"the plan's {len(plan.blocks)} blocks are not the profile's {len(profile.blocks)}",
            setting="profile",
            works="the profile that the plan was made from",
        )
    scene = Scene(cluster, plan.devices, **circumstances)
    held = held_bytes(plan, profile)
    scene.check_memory(held)
    controller = None if control is None else Controller(control=control)
    run = _Run(scene, plan, profile, reduction_of(collective, None), controller)
    run.play(steps)
    return scene.played(
        run.steps_ms,
        work_ms=run.work_ms,
        peak_bytes=held,
        decisions=(*_remarks(plan, profile), *run.decisions),
    )


def held_bytes(plan: BurstPlan, profile: Profile) -> tuple[int, ...]:
    """By device, the most that it holds of the blocks that it runs: weights, gradients, optimizer state and
    activations, and what the most demanding pass needs for a moment."""
    blocks, shared = profile.blocks, sharers(profile)
    shares = [plan.shares(place) for place in range(len(blocks))]
    found = []
    for rank in range(plan.devices):
        own = set(plan.held(rank))
        # A weight that blocks share is counted with the first of them, and is wherever one of them runs.
        weights = own | {first for first, later in shared.items() if own.intersection(later)}
        fixed = sum(2 * blocks[place].parameter_bytes + blocks[place].optimizer_bytes for place in weights)
        saved = sum(shares[place][rank] * blocks[place].saved_bytes_per_sample for place in own)
        passing = max((blocks[place].transient(shares[place][rank]) for place in own), default=0)
        found.append(fixed + saved + passing)
    return tuple(found)


def _remarks(plan: BurstPlan, profile: Profile) -> tuple[str, ...]:
    """What the profile does not say of the plan's shares, in words."""
    rows = {share for place in range(len(plan.blocks)) for share in plan.shares(place)}
    found = (profile.extrapolates(share) for share in sorted({min(rows), max(rows)}))
    return tuple(remark for remark in found if remark is not None)


class _Op:
    """What the first ``width`` ranks do: compute, move rows, or come together."""

    __slots__ = ("after", "arrived", "before", "kind", "ms", "name", "place", "width")

    def __init__(
        self,
        kind: str,
        name: str,
        place: int,
        width: int,
        ms: float = 0.0,
        *,
        before: int = 0,
        after: int = 0,
    ) -> None:
        self.kind, self.name, self.place, self.width, self.ms = kind, name, place, width, ms
        self.before, self.after = before, after
        """Of a move, the widths on both sides. A rank beyond ``before`` is idle until all have come."""
        self.arrived = 0
        """Ranks that have come to it (or, computing, have ended it) in this step."""


class _Rank:
    """A device on its way through a step."""

    __slots__ = ("at", "device", "index", "program", "run")

    def __init__(self, run: _Run, index: int, device: Device, program: Sequence[_Op]) -> None:
        self.run, self.index, self.device, self.program = run, index, device, program
        self.at = 0

    def go(self) -> None:
        """Begin what comes next."""
        op, crew = self.program[self.at], self.run.crew
        if op.ms:
            self.device.run(op.name, op.ms * crew.stretch(self.index), self.end)
            crew.phase(self.index, Phase.COMPUTE)
        else:
            crew.phase(self.index, Phase.COLLECTIVE if self.index < op.before else Phase.IDLE)
            self.run.meet(op)

    def end(self) -> None:
        """What it computed has ended."""
        op = self.program[self.at]
        self.at += 1
        self.run.ended(op)
        self.go()


class _Run:
    """Steps under way."""

    def __init__(
        self,
        scene: Scene,
        plan: BurstPlan,
        profile: Profile,
        reduction: Reduction,
        controller: Controller | None,
    ) -> None:
        self.plan, self.profile, self.reduction, self.controller = plan, profile, reduction, controller
        self.simulation, self.network, self.crew = scene.simulation, scene.network, scene.crew
        self.names = scene.names
        self.links = between(scene.cluster, plan.width)
        self.alive = cut_bytes(profile)
        self.sharers = sharers(profile)
        self.syncs = [self._sync(place) for place in range(len(profile.blocks))]
        ops = self._ops()
        self.ranks = [
            _Rank(self, index, scene.devices[index], [op for op in ops if index < op.width])
            for index in range(plan.width)
        ]
        self.wire = Wire(self.network, dict(zip(self.names, scene.devices, strict=True)))
        self.decisions: list[str] = []
        self.steps_ms: list[float] = []
        self.work_ms = 0.0
        self._steps = self._level = 0
        self._begun_ms = 0.0

    def play(self, steps: int) -> None:
        """Play so many."""
        self._steps = steps
        if self.controller is not None:
            self._level = self.controller.level
            self.crew.allow(LADDER[self._level])
        self.crew.begin()
        self._begin()
        self.simulation.run()
        assert len(self.steps_ms) == steps, "all steps come to an end"

    def _ops(self) -> list[_Op]:
        """A step, in order; ranks leave out what is wider than they reach."""
        blocks, widths = self.profile.blocks, self.plan.widths
        ops: list[_Op] = []

        def move(place: int, before: int, after: int) -> None:
            if before != after:
                name = f"reshard {blocks[place].name}"
                ops.append(_Op("move", name, place, max(before, after), before=before, after=after))

        def compute(kind: str, place: int, ms: float) -> None:
            if ms or kind == "backward":
                ops.append(_Op(kind, f"{kind} {blocks[place].name}", place, widths[place], ms))

        for place, block in enumerate(blocks):
            if place:
                move(place, widths[place - 1], widths[place])
            compute("forward", place, max(map(block.forward_ms, set(self.plan.shares(place)))))
        for place in reversed(range(len(blocks))):
            compute("backward", place, max(map(blocks[place].backward_ms, set(self.plan.shares(place)))))
            if place:
                move(place, widths[place], widths[place - 1])
        ops.append(_Op("wait", "wait", 0, self.plan.width, before=widths[0]))
        # A device updates its own blocks one after another; wide ones first, all devices begin together.
        for place in sorted(range(len(blocks)), key=lambda place: -widths[place]):
            compute("optimizer", place, blocks[place].optimizer_milliseconds)
        ops.append(_Op("end", "end", 0, self.plan.width))
        return ops

    # Through a step

    def _begin(self) -> None:
        self._begun_ms = self.simulation.now_ms
        for rank in self.ranks:
            rank.at = 0
        for rank in self.ranks:
            rank.go()

    def ended(self, op: _Op) -> None:
        """A rank has computed."""
        self.work_ms += op.ms
        op.arrived += 1
        if op.arrived == op.width:
            op.arrived = 0
            if op.kind == "backward":
                self._synchronise(op.place)

    def meet(self, op: _Op) -> None:
        """A rank has come to where it waits for others."""
        op.arrived += 1
        if op.arrived < op.width:
            return
        op.arrived = 0
        if op.kind == "move":
            self._move(op)
        elif op.kind == "wait":
            self.wire.when_free(partial(self._pass, op))
        elif op.kind == "backward":  # takes no time
            self._synchronise(op.place)
            self._pass_soon(op)
        else:
            self._end()

    def _pass(self, op: _Op) -> None:
        """All that met go on."""
        for rank in self.ranks[: op.width]:
            rank.at += 1
        for rank in self.ranks[: op.width]:
            rank.go()

    def _pass_soon(self, op: _Op) -> None:
        """As an event of its own: a long row of such ops would be as many calls in each other."""
        self.simulation.at(self.simulation.now_ms, partial(self._pass, op))

    def _move(self, op: _Op) -> None:
        """Bring all that is alive before a block from a width to another; syncs stand still."""
        row_bytes = self.alive[op.place]
        if not row_bytes:
            self._pass_soon(op)
            return
        for index in range(op.width):
            self.crew.phase(index, Phase.COLLECTIVE)
        self.wire.hold()

        def send(move: Move, then: Action) -> None:
            source, target = self.names[move.source], self.names[move.target]
            self.network.send(op.name, source, target, move.rows * row_bytes, then, track="wire")

        def end() -> None:
            self.wire.release()
            self._pass(op)

        Exchange(moves(self.plan.batch, op.before, op.after), send, end).begin()

    def _sync(self, place: int) -> Sync | None:
        """What the gradients of a block take; shared ones go with their first block, over the widest."""
        block = self.profile.blocks[place]
        width = max(self.plan.widths[user] for user in (place, *self.sharers.get(place, ())))
        if width == 1 or not block.parameter_bytes:
            return None
        link = self.links.ring(width)
        alone_ms = self.reduction.estimate_ms(block.parameter_bytes, width, link)
        # Nobody sends more than the wire takes, whatever a collective says of its time.
        most_bytes = alone_ms * link.bandwidth_bytes_per_s / 1e3
        edge_bytes = min(self.reduction.wire_bytes(block.parameter_bytes, width), most_bytes)
        busy_ms = self.reduction.busy_ms(block.parameter_bytes, width)
        return Sync(f"sync {block.name}", self.names[:width], edge_bytes, alone_ms, busy_ms)

    def _synchronise(self, place: int) -> None:
        """Queue the gradients of a block whose backward has ended."""
        sync = self.syncs[place]
        if sync is not None:
            self.wire.add(sync)

    def _end(self) -> None:
        """The step has ended: let the controller see it, and begin the next."""
        number, length_ms = len(self.steps_ms), self.simulation.now_ms - self._begun_ms
        self.steps_ms.append(length_ms)
        if self.controller is not None:
            level = self.controller.observe(number, length_ms, self._level)
            if level != self._level:
                self._level = level
                self.crew.allow(LADDER[level])
                self.decisions.append(
                    f"step {number}: {LADDER[level].name}: {self.controller.decisions[-1].reason}"
                )
        if len(self.steps_ms) < self._steps:
            self._begin()
        else:
            self.crew.stop()
