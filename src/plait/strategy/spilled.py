"""Spilling as an option: one device, with the tiers of its host below it, from a profile alone.

The model of :mod:`plait.spill.forecast` is asked with what a profile knows. What it does not know is taken so
that a plan needs rather more than less:

- all that a block saves is its own, and nothing of it is cheap to compute again (``thrift`` gains nothing);
- of blocks that share a weight, all weights of the first are taken to be shared;
- the loss takes the time that the last block's figures hold of it, and as much memory as the outputs;
- every weight is trained.

Where a job is at hand, ``plait.spill.fit`` measures all that itself. On a CPU the device's budget is divided
between the arena and the device's own memory, as a run does it, once about as much is taken off as its
processes hold by themselves; with a GPU, whose memory they do not take, the host's RAM is the arena.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from plait.burst.live import sharers
from plait.cluster import Cluster
from plait.cluster.parts import Tier
from plait.errors import UsageError
from plait.profile import BlockProfile
from plait.spill.description import BlockCost, BlockShape, Costs, Description, Parameter, saved_bytes
from plait.spill.footprint import likely_bytes
from plait.spill.forecast import Machine
from plait.spill.intervals import Intervals
from plait.spill.partition import Smallest, best_cut, smallest
from plait.spill.plan import SpillPlan
from plait.spill.segment import PAGE_BYTES
from plait.strategy.demand import Demand
from plait.strategy.option import Option
from plait.strategy.site import Site, covering, enough
from plait.units import counted, format_bytes
from plait.value import Value

_DIVISIONS = (3, 2, 4, 1, 5, 0)
"""Ways to divide a CPU's memory, of which 0 leaves a device the least and 5 the most, in the order in which
they are tried: one that computes all the time is as good as any."""
_NEAR = 1.001
_FEW_SCALARS = 4096
"""More bytes of optimizer state than that beyond whole copies of the weights are another copy."""


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """What lies below a device."""

    memory_bytes: int
    """For the arena and the device's own memory, where both are the same RAM; else the device's own."""
    arena_bytes: int | None
    """None where it comes out of ``memory_bytes``."""
    own_bytes: int
    """Of ``memory_bytes``, about what the run's processes hold by themselves."""
    disk: Tier

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        device: str,
        budget_bytes: int,
        *,
        at_once: int = 1,
        counted_bytes: int = 0,
    ) -> Tiers:
        """Those of the host of a device; an error says what is not known of them.

        ``at_once`` devices have one process that serves them all. Of what processes hold, ``counted_bytes``
        are off the budget already.
        """
        its = cluster.device(device)
        disks = [tier for tier in cluster.tiers_of(its.host) if tier.name != "ram"]
        if not disks:
            raise UsageError(
                f"host {its.host!r} has no tier below its memory to spill to",
                setting="tiers",
                works=f'a tier "disk" of host "{its.host}" with its read and write rates',
            )
        disk = disks[-1]
        if disk.read_bytes_per_s is None or disk.write_bytes_per_s is None:
            raise UsageError(
                f"how fast tier {disk.name!r} of host {its.host!r} reads and writes is not known",
                setting="tiers.read, tiers.write",
                works='the rates, or Cluster.measure(["disk"])',
            )
        if its.kind == "cpu":
            own_bytes = max(0, -(-likely_bytes(at_once) // at_once) - counted_bytes)
            return cls(memory_bytes=budget_bytes, arena_bytes=None, own_bytes=own_bytes, disk=disk)
        ram = [tier for tier in cluster.tiers_of(its.host) if tier.name == "ram"]
        if not ram:
            raise UsageError(
                f"host {its.host!r} has no tier 'ram' below its GPU",
                setting="tiers",
                works='a tier "ram" with its capacity',
            )
        return cls(memory_bytes=budget_bytes, arena_bytes=ram[0].capacity_bytes, own_bytes=0, disk=disk)

    def machines(self, least: Smallest, *, at_once: int = 1) -> list[Machine]:
        """The ways to divide the memory, for so many jobs at a time that share arena and disk."""
        if self.arena_bytes is not None:
            return [self._machine(self.arena_bytes, self.memory_bytes, at_once)]
        arena_least, room = least.arena_bytes, self.memory_bytes - self.own_bytes
        most = max(least.private_bytes, room - arena_least)
        shares = [
            int(least.private_bytes * (most / max(1, least.private_bytes)) ** (i / max(_DIVISIONS)))
            for i in _DIVISIONS
        ]
        left = [(room - own) // PAGE_BYTES * PAGE_BYTES for own in shares]
        return [
            self._machine(arena * at_once, own, at_once)
            for own, arena in zip(shares, left, strict=True)
            if arena >= arena_least
        ]

    def _machine(self, arena_bytes: int, private_bytes: int, at_once: int) -> Machine:
        assert self.disk.read_bytes_per_s is not None, "checked when it was made"
        assert self.disk.write_bytes_per_s is not None, "checked when it was made"
        return Machine(
            arena_bytes=arena_bytes,
            private_bytes=private_bytes,
            read_bytes_per_s=self.disk.read_bytes_per_s,
            write_bytes_per_s=self.disk.write_bytes_per_s,
            devices=at_once,
        )


def spilled(demand: Demand, site: Site, *, device: int = 0, at_once: int = 1) -> Option:
    """A job on one device; ``at_once`` jobs share the disk (and, below a GPU, the arena)."""
    name, budget = site.names[device], site.budgets[device]
    here = demand.slower(site.speeds[device])
    tiers = Tiers.of(site.cluster, name, budget, at_once=at_once, counted_bytes=site.process_bytes)
    intervals = spill_intervals(here)
    least = smallest(intervals)
    plans = []
    for machine in tiers.machines(least, at_once=at_once):
        try:
            plans.append(best_cut(intervals, machine, steps=demand.steps))
        except UsageError:  # more of the one leaves too little of the other
            continue
        if plans[-1].forecast.step_ms <= _NEAR * here.alone_ms:
            break
    if not plans:
        return _too_small(demand, tiers, least, at_once=at_once)
    plan = min(plans, key=lambda one: one.forecast.step_ms)
    forecast = plan.forecast
    if forecast.disk_bytes > tiers.disk.capacity_bytes:
        return Option(
            strategy="spill",
            name="spill",
            batch=demand.batch,
            why_not=f"{format_bytes(forecast.disk_bytes)} are stored, and tier {tiers.disk.name!r} holds "
            f"{format_bytes(tiers.disk.capacity_bytes)}",
            works=f"{enough(forecast.disk_bytes)} of disk",
        )
    held = tiers.own_bytes + forecast.private_peak_bytes
    if tiers.arena_bytes is None:  # what the arena has beyond the window is used, too, to save transfers
        held += min(plan.arena_bytes, int(intervals.weights[0, -1] + intervals.moments[0, -1]))
        held = max(held, tiers.own_bytes + forecast.private_peak_bytes + forecast.arena_peak_bytes)
    step_ms = forecast.step_ms
    return Option(
        strategy="spill",
        name="spill",
        batch=demand.batch,
        step_ms=step_ms,
        memory_bytes={name: min(held, budget)},
        budget_bytes={name: budget},
        parts_ms={"compute": forecast.compute_ms, "waiting": forecast.stall_ms},
        idle_ms={other: forecast.stall_ms if other == name else step_ms for other in site.names},
        plan=_with_room(plan, here),
        remarks=(
            f"a step reads {format_bytes(forecast.read_bytes)} and writes "
            f"{format_bytes(forecast.written_bytes)}, limited by {forecast.bottleneck}",
            *([f"{_taken(tiers, at_once)}, which counts as held"] if tiers.own_bytes else []),
            *covering(demand.profile, demand.micro_batches(demand.batch)),
        ),
    )


def _with_room(plan: SpillPlan, demand: Demand) -> SpillPlan:
    """The plan with the room that spilled activations take, which a run allots by it."""
    description, costs = _description(demand), _costs(demand)
    shards = (
        replace(shard, saved_bytes=saved_bytes(description, costs, shard.first, shard.end, thrift=True))
        if shard.activations == "spill"
        else shard
        for shard in plan.shards
    )
    return replace(plan, shards=tuple(shards))


def _too_small(demand: Demand, tiers: Tiers, least: Smallest, *, at_once: int) -> Option:
    need, takes = least.private_bytes, f"{format_bytes(least.private_bytes)} of the device"
    if tiers.arena_bytes is None:
        need += least.arena_bytes
        takes = format_bytes(need)
    else:
        takes += f" and {format_bytes(least.arena_bytes)} of its host's memory"
    beside = f", {_taken(tiers, at_once)}" if tiers.own_bytes else ""
    return Option(
        strategy="spill",
        name="spill",
        batch=demand.batch,
        why_not=f"training takes at least {takes}{beside}, and the device may hold "
        f"{format_bytes(tiers.memory_bytes)}",
        works=f"about {enough(tiers.own_bytes + need)} of memory, or more micro-batches",
    )


def _taken(tiers: Tiers, at_once: int) -> str:
    """What processes hold by themselves, in words."""
    on = "" if at_once == 1 else " on each device"
    return f"{counted(at_once + 1, 'process')} take about {format_bytes(tiers.own_bytes)}{on} by themselves"


# --- a profile as the spill planner sees a job --------------------------------------------------------


def spill_intervals(demand: Demand) -> Intervals:
    """Every run of blocks as a shard, from a profile."""
    return Intervals.of(_description(demand), _costs(demand))


def _description(demand: Demand) -> Description:
    blocks = demand.profile.blocks
    users = sharers(demand.profile)
    return Description(
        job=demand.name,
        digest="",
        base="",
        blocks=tuple(
            BlockShape(
                name=block.name,
                reads=_read(blocks, place),
                writes=(block.name,),
                kind=str(place),
            )
            for place, block in enumerate(blocks)
        ),
        parameters=tuple(
            Parameter(
                name=block.name,
                shape=(block.parameter_bytes,),
                stride=(1,),
                dtype="uint8",
                trained=True,
                blocks=(place, *users.get(place, ())),
                state=_state(block),
            )
            for place, block in enumerate(blocks)
            if block.parameter_bytes
        ),
        buffers=(),
        values=tuple(
            Value(
                name=block.name,
                dtype="uint8",
                itemsize=1,
                dimensions=((1, 0), (0, block.output_bytes_per_sample)),
                differentiable=True,
            )
            for block in blocks
        ),
        inputs=(),
        outputs=(blocks[-1].name,),
        micro_batches=demand.micro_batches(demand.batch),
        steps=demand.steps,
        clips=demand.clips,
        skips=False,
    )


def _read(blocks: tuple[BlockProfile, ...], place: int) -> tuple[str, ...]:
    its = blocks[place].inputs
    if its is not None:
        return its
    return (blocks[place - 1].name,) if place else ()


def _state(block: BlockProfile) -> tuple[tuple[str, bool, str], ...]:
    """The optimizer's state as copies of the weights, and single numbers for what is left."""
    copies, rest = divmod(block.optimizer_bytes, block.parameter_bytes)
    if rest > _FEW_SCALARS:
        copies, rest = copies + 1, 0
    whole = tuple((f"state {i}", True, "uint8") for i in range(copies))
    return whole + tuple((f"number {i}", False, "float32") for i in range(-(-rest // 4)))


def _costs(demand: Demand) -> Costs:
    rows = demand.micro_rows(demand.batch)
    blocks = demand.profile.blocks
    return Costs(
        rows=rows,
        threads=demand.profile.threads,
        blocks=tuple(
            BlockCost(
                forward_ms=block.forward_ms(rows),
                backward_ms=block.backward_ms(rows),
                thrift_ms=0.0,
                update_ms=block.optimizer_milliseconds,
                saved_bytes=rows * block.saved_bytes_per_sample,
                thrift_bytes=rows * block.saved_bytes_per_sample,
                transient_bytes=block.transient(rows),
                thrift_transient_bytes=block.transient(rows),
            )
            for block in blocks
        ),
        loss_ms=0.0,
        output_bytes=rows * blocks[-1].output_bytes_per_sample,
    )
