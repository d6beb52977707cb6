"""The plan of a spilled job: the shards, what becomes of their activations, and what it should take.

A plan is plain data, made by `plait.spill.partition` and read by whoever runs the job or plays it.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from plait.destination import write_text
from plait.document import checked, read_json
from plait.errors import UsageError

FORMAT = "plait.plan.spill/1"

Activations = Literal["keep", "thrift", "spill", "recompute"]
"""What becomes of what a shard's forward saves for its backward.

``keep``: it stays in the device's process. ``thrift``: so it does, but what cheap operations made is made
again. ``spill``: the same few tensors go to the store. ``recompute``: nothing stays, forward runs again.
"""
MODES: tuple[Activations, ...] = get_args(Activations)
Bottleneck = Literal["compute", "read", "write"]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Consecutive blocks of the chain that are in memory together."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    first: int
    end: int
    """The block after the last."""
    activations: Activations = "keep"
    """Means nothing for the last shard, which goes back at once."""
    saved_bytes: int = 0
    """Room for what is saved of the largest micro-batch, where it is spilled."""

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end:
            raise UsageError(
                f"a shard of blocks {self.first} to {self.end}", setting="shards", works="first below end"
            )
        if self.activations not in MODES:
            raise UsageError(
                f"there are no activations {self.activations!r}",
                setting="activations",
                works=", ".join(MODES),
            )


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a run should take. Bytes and times of a step are those of every step but the first."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    arena_peak_bytes: int
    """Of the store's memory: the shard at work and the one that comes or goes."""
    private_peak_bytes: int
    """Of a device's own memory: kept activations, gradients of one shard, transients."""
    kept_bytes: int
    """Of these, the activations that stay on the device from forward to backward."""
    disk_bytes: int
    """All that is stored: two slots of what a commit holds, and what a step may spill."""
    read_bytes: int
    written_bytes: int
    compute_ms: float
    read_ms: float
    write_ms: float
    step_ms: float
    steps: int = 1

    def __post_init__(self) -> None:
        for name, figure in vars(self).items():
            if not 0 <= figure < math.inf:
                raise UsageError(f"{name} is {figure}", setting=name, works="0 or more")

    @property
    def bottleneck(self) -> Bottleneck:
        """What is busy for the longest part of a step."""
        busy: dict[Bottleneck, float] = {
            "compute": self.compute_ms, "read": self.read_ms, "write": self.write_ms
        }  # fmt: skip
        return max(busy, key=lambda name: busy[name])

    @property
    def stall_ms(self) -> float:
        """For how long of a step nothing is computed."""
        return max(0.0, self.step_ms - self.compute_ms)

    @property
    def run_ms(self) -> float:
        """All steps."""
        return self.steps * self.step_ms


@dataclass(frozen=True, kw_only=True)
class SpillPlan:
    """How a job is trained in less memory than it needs."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    shards: tuple[Shard, ...]
    arena_bytes: int
    """Of the store's memory, what this job can count on."""
    private_bytes: int
    """What a device has of its own."""
    window_bytes: int
    """Of the arena, what is set aside for the shards at work; the rest saves reading and writing."""
    forecast: Forecast

    def __post_init__(self) -> None:
        end = 0
        for shard in self.shards:
            if shard.first != end:
                raise UsageError(
                    f"a shard begins at block {shard.first} where the one before it ends at {end}",
                    setting="shards",
                    works="every block in one shard, in their order",
                )
            end = shard.end
        if not self.shards:
            raise UsageError("a plan without shards", setting="shards", works="at least one")

    @property
    def cuts(self) -> tuple[int, ...]:
        """Where the chain is cut: ``chain.cut(plan.cuts)`` has a block for each shard."""
        return tuple(shard.first for shard in self.shards[1:])

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        return {"format": FORMAT, **asdict(self), "shards": [asdict(shard) for shard in self.shards]}

    @classmethod
    def from_json(cls, data: Any, *, source: str = "plan") -> SpillPlan:
        """Read what ``to_json`` gives; ``source`` names the file in errors."""
        return checked(cls, data, format=FORMAT, source=source)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        write_text(Path(path), json.dumps(self.to_json(), indent=1) + "\n", setting="plan file")

    @classmethod
    def load(cls, path: str | Path) -> SpillPlan:
        """Read a plan; an error names the file and the field."""
        return cls.from_json(read_json(path, works="what SpillPlan.save writes"), source=str(path))
