"""What a planner must know of a job: its profile, its batch, how long it runs, and what it may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from plait.data import share
from plait.errors import UsageError
from plait.job import Job, Priority, Strategy
from plait.profile import Profile
from plait.units import parse_whole

STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Numbers that an optimizer keeps for each parameter."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """A job as planning sees it."""

    name: str
    profile: Profile
    batch: int
    """Rows of a step over all devices."""
    steps: int = 1
    accumulate: int = 1
    """Micro-batches that a step's rows are cut into on each device."""
    priority: Priority = "foreground"
    strategy: Strategy = "auto"
    memory_bytes: int | None = None
    """Its own limit for each device."""
    clips: bool = False
    """Gradients are clipped by their norm, so no update begins before the last gradient is there."""

    def __post_init__(self) -> None:
        if not isinstance(self.profile, Profile):
            works = (
                f"Profile.load({str(self.profile)!r})"
                if isinstance(self.profile, str | Path)
                else "Profile.load(file)"
            )
            raise UsageError(
                f"the profile of {self.name!r} is {self.profile!r}", setting="profile", works=works
            )
        for name in ("batch", "steps", "accumulate"):
            parse_whole(getattr(self, name), setting=name)
        for name, choices in (("priority", get_args(Priority)), ("strategy", get_args(Strategy))):
            if getattr(self, name) not in choices:
                what = f"there is no {name} {getattr(self, name)!r}"
                raise UsageError(what, setting=name, works=", ".join(choices))

    @classmethod
    def of(cls, job: Job, profile: Profile, *, steps: int | None = None) -> Demand:
        """That of a job; ``steps`` where the job gives epochs."""
        total = job.steps if steps is None else steps
        if total is None:
            raise UsageError(
                f"job {job.name!r} runs for {job.epochs} epochs; how many steps that is depends on its data",
                setting="steps",
                works="steps=job.total_steps(job.build_batches().steps_per_epoch)",
            )
        return cls(
            name=job.name,
            profile=profile,
            batch=job.batch,
            steps=total,
            accumulate=job.accumulate,
            priority=job.priority,
            strategy=job.strategy,
            memory_bytes=job.memory_bytes,
            clips=job.clip_norm is not None,
        )

    def assuming(self, optimizer: str | None) -> Demand:
        """With the state of an optimizer in place of the profile's; None leaves that as it is."""
        if optimizer is None:
            return self
        if optimizer not in STATES:
            raise UsageError(
                f"nothing is known of the optimizer {optimizer!r}",
                setting="optimizer",
                works=", ".join(STATES),
            )
        blocks = tuple(
            replace(block, optimizer_bytes=STATES[optimizer] * block.parameter_bytes)
            for block in self.profile.blocks
        )
        return replace(self, profile=replace(self.profile, blocks=blocks))

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the profile leaves out."""
        found = []
        blocks = self.profile.blocks
        for field, what in (
            ("saved_bytes_per_sample", "activations that are saved"),
            ("optimizer_bytes", "state of an optimizer"),
            ("optimizer_milliseconds", "time of an optimizer"),
        ):
            if not any(getattr(block, field) for block in blocks):
                found.append(f"the profile has no {what}: none is counted")
        return tuple(found)

    def micro_batches(self, rows: int) -> tuple[int, ...]:
        """The rows of each micro-batch that a device's share is cut into, the largest first."""
        parts = min(self.accumulate, rows)
        return tuple(len(share(rows, part, parts)) for part in range(parts))

    def micro_rows(self, rows: int) -> int:
        """Of the largest."""
        return -(-rows // min(self.accumulate, rows))

    @property
    def alone_ms(self) -> float:
        """A step on one device that has room for all of it."""
        rows, blocks = self.micro_batches(self.batch), self.profile.blocks
        passes_ms = sum(block.forward_ms(n) + block.backward_ms(n) for n in rows for block in blocks)
        return passes_ms + sum(block.optimizer_milliseconds for block in blocks)

    @property
    def alone_bytes(self) -> int:
        """What such a device holds."""
        return self.held_bytes(self.micro_rows(self.batch), copies=2)

    def held_bytes(self, rows: int, *, copies: int) -> int:
        """Weights so many times, the optimizer's state, what rows save, and the largest transient."""
        blocks = self.profile.blocks
        fixed = sum(copies * block.parameter_bytes + block.optimizer_bytes for block in blocks)
        saved = rows * sum(block.saved_bytes_per_sample for block in blocks)
        return fixed + saved + max(block.transient(rows) for block in blocks)

    def slower(self, speed: float) -> Demand:
        """On devices of another speed than the profile's, in multiples of it."""
        if speed == 1:
            return self

        def scaled(block: Any) -> Any:
            times = {
                size: replace(each, forward=each.forward / speed, backward=each.backward / speed)
                for size, each in block.milliseconds.items()
            }
            optimizer_ms = block.optimizer_milliseconds / speed
            return replace(block, milliseconds=times, optimizer_milliseconds=optimizer_ms)

        blocks = tuple(scaled(block) for block in self.profile.blocks)
        return replace(self, profile=replace(self.profile, blocks=blocks))

    def to_json(self) -> Mapping[str, Any]:
        """The job as plain data, without its profile."""
        return {
            name: getattr(self, name)
            for name in ("name", "batch", "steps", "accumulate", "priority", "strategy", "memory_bytes")
        }
