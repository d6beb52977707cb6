"""A spilled job as a player sees it, made from its plan and a profile of its model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from plait.errors import UsageError
from plait.profile import Profile
from plait.spill.forecast import Machine
from plait.spill.makespan import Load, ShardLoad
from plait.spill.plan import Shard, SpillPlan
from plait.units import parse_whole


@dataclass(frozen=True, kw_only=True)
class SpilledJob:
    """A job that is trained by a `SpillPlan`, with the times and sizes of a profile.

    A shard that is recomputed runs forward again in backward. Activations that are spilled cross the disk
    once each way in a step, as optimizer state does, and are counted with it. What ``thrift`` makes again is
    cheap, and not in a profile: it counts as nothing.
    """

    name: str
    plan: SpillPlan
    profile: Profile
    batch: int
    """Rows of a step."""
    steps: int
    micro_batches: int = 1
    """The parts in which a step passes them; weights cross the disk once for all."""
    unit_ms: float = Machine.unit_ms
    """What handing a unit to a device costs beside its work, as in the plan's forecast: forward of a shard,
    its backward and its update; the last shard goes forward and back in one."""

    def __post_init__(self) -> None:
        for setting in ("batch", "steps", "micro_batches"):
            parse_whole(getattr(self, setting), setting=setting)
        if self.micro_batches > self.batch:
            raise UsageError(
                f"{self.batch} rows cannot be cut into {self.micro_batches} micro-batches",
                setting="micro_batches",
                works=f"1 to {self.batch}",
            )
        if not 0 <= self.unit_ms < math.inf:
            raise UsageError(
                f"handing a unit of job {self.name!r} to a device costs {self.unit_ms} ms",
                setting="unit_ms",
                works="0 or more",
            )
        if self.plan.shards[-1].end != len(self.profile.blocks):
            raise UsageError(
                f"the plan of job {self.name!r} cuts {self.plan.shards[-1].end} blocks, and its profile has "
                f"{len(self.profile.blocks)}",
                setting="profile",
                works="the profile of the model that was planned",
            )

    @property
    def load(self) -> Load:
        """What the scheduler's own model plays."""
        return Load(name=self.name, steps=self.steps, shards=tuple(map(self._shard, self.plan.shards)))

    @property
    def remark(self) -> str | None:
        """A sentence where times had to be guessed beyond what was measured."""
        found = self.profile.extrapolates(self.batch / self.micro_batches)
        return None if found is None else f"{self.name}: {found}"

    def _shard(self, shard: Shard) -> ShardLoad:
        blocks, rows = self.profile.blocks[shard.first : shard.end], self.batch / self.micro_batches
        forward_ms = self.micro_batches * sum(block.forward_ms(rows) for block in blocks)
        backward_ms = self.micro_batches * sum(block.backward_ms(rows) for block in blocks)
        last = shard is self.plan.shards[-1]
        again_ms = forward_ms if shard.activations == "recompute" and not last else 0.0
        spilled = self.micro_batches * shard.saved_bytes if shard.activations == "spill" and not last else 0
        update_ms = sum(block.optimizer_milliseconds for block in blocks)
        return ShardLoad(
            forward_ms=forward_ms + (0.0 if last else self.unit_ms),
            backward_ms=again_ms + backward_ms + update_ms + 2 * self.unit_ms,
            weight_bytes=sum(block.parameter_bytes for block in blocks),
            moment_bytes=sum(block.optimizer_bytes for block in blocks) + spilled,
        )
