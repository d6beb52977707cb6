"""What the stages of a pipeline do and hold, read from the profile of the chain that was cut into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.errors import UsageError
from plait.pipeline.balance import wire_bytes_per_row
from plait.pipeline.candidate import Candidate
from plait.pipeline.events import Load
from plait.pipeline.memory import StageMemory
from plait.pipeline.plan import PipelinePlan
from plait.pipeline.sharing import Sharing, copied, sharings, with_copies
from plait.profile import Profile


@dataclass(frozen=True, kw_only=True)
class Staging:
    """A profiled chain, cut into stages."""

    profile: Profile
    ends: tuple[int, ...]
    """0, then the block after each stage's last."""

    @classmethod
    def of(cls, plan: PipelinePlan, profile: Profile) -> Staging:
        """The stages of a plan; the profile must have as many blocks."""
        if plan.stages[-1].end != len(profile.blocks):
            raise UsageError(
                f"a plan of {plan.stages[-1].end} blocks and a profile of {len(profile.blocks)}",
                setting="profile",
                works="the profile that the plan was made from",
            )
        return cls(profile=profile, ends=(0, *(stage.end for stage in plan.stages)))

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.ends) - 1

    def loads(self, rows: int) -> tuple[Load, ...]:
        """What each stage does for a micro-batch of so many rows, on the device that was profiled."""
        wire = wire_bytes_per_row(self.profile.blocks)
        return tuple(
            Load(
                forward_ms=sum(block.forward_ms(rows) for block in self.profile.blocks[begin:end]),
                backward_ms=sum(block.backward_ms(rows) for block in self.profile.blocks[begin:end]),
                output_bytes=rows * wire[end],
                gradient_bytes=rows * wire[begin],
            )
            for begin, end in self._ranges
        )

    @property
    def optimizer_ms(self) -> tuple[float, ...]:
        """By stage, the update of its weights, its copies of shared ones among them."""
        blocks = self.profile.blocks
        return tuple(
            sum(b.optimizer_milliseconds for b in (*blocks[begin:end], *copied(blocks, begin, end)))
            for begin, end in self._ranges
        )

    @property
    def shared(self) -> tuple[Sharing, ...]:
        """Weights that several stages hold."""
        return sharings(self.profile.blocks, self.ends)

    def memories(self, rows: int) -> tuple[StageMemory, ...]:
        """The sizes of each stage, what a pass needs for a moment being that of so many rows."""
        wire = wire_bytes_per_row(self.profile.blocks)
        found = []
        for begin, end in self._ranges:
            its = self.profile.blocks[begin:end]
            found.append(
                StageMemory(
                    static_bytes=sum(2 * block.parameter_bytes + block.optimizer_bytes for block in its),
                    saved_bytes_per_row=sum(block.saved_bytes_per_sample for block in its),
                    input_bytes_per_row=wire[begin],
                    output_bytes_per_row=wire[end],
                    transient_bytes=max(block.transient(rows) for block in its),
                )
            )
        return with_copies(found, self.profile.blocks, self.ends)

    def remarks(self, candidates: Sequence[Candidate]) -> tuple[str, ...]:
        """What the profile does not say of these, in words."""
        sizes = sorted({candidate.rows for candidate in candidates})
        found = [remark for rows in sizes if (remark := self.profile.extrapolates(rows)) is not None]
        return (*found, *(each.remark for each in self.shared))

    @property
    def _ranges(self) -> list[tuple[int, int]]:
        return list(zip(self.ends, self.ends[1:], strict=False))
