"""The plan of a data-parallel job: every device has the whole model and a part of each batch.

Gradients are averaged in buckets, as `DistributedDataParallel` makes them: blocks are put into a bucket in
the order of backward until it holds ``bucket_bytes`` or more, and a first, smaller one lets the wire start
early.

    backward   B5 B4 | B3 B2 | B1 B0          block 5 is the last of the chain
    wire             |bucket 0 |bucket 1 |bucket 2

A block is the smallest thing that a profile knows, so buckets are made of whole blocks; torch makes them of
whole parameters. In the very first step of a run torch has one bucket for all; a plan is about the others.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from plait.data import share
from plait.destination import write_text
from plait.document import checked, read_json
from plait.errors import UsageError
from plait.profile import Profile
from plait.units import parse_whole

FORMAT = "plait.plan.data/1"
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32)
"""Bits that gradients may travel in."""
BITS_WORK = '1 to 8, 16, 32, "auto" or None'


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """How a job is trained on devices that each have the whole model."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    devices: int
    batch: int
    """Rows of a step, on all devices together."""
    bits: int | Literal["auto"] | None = None
    """That a number of a gradient takes on the wire; a run with ``"auto"`` chooses it layer by layer, None
    leaves it to torch, in fp32."""
    bucket_bytes: int = 25 << 20
    """Gradients of at least so many bytes are averaged at once, as fp32 counts them."""
    first_bucket_bytes: int = 1 << 20
    accumulate: int = 1
    """Micro-batches that a device's rows are cut into; gradients are averaged in the last one's backward."""

    def __post_init__(self) -> None:
        for name in ("devices", "batch", "bucket_bytes", "first_bucket_bytes", "accumulate"):
            parse_whole(getattr(self, name), setting=name)
        if self.batch < self.devices:
            raise UsageError(
                f"a batch of {self.batch} rows for {self.devices} devices",
                setting="batch",
                works=f"{self.devices} or more",
            )
        if self.bits is not None and not known_bits(self.bits):
            raise UsageError(f"gradients of {self.bits!r} bits", setting="bits", works=BITS_WORK)

    @property
    def rows(self) -> tuple[int, ...]:
        """By device, its part of the batch; the first ones have one more where it does not divide."""
        return tuple(len(share(self.batch, device, self.devices)) for device in range(self.devices))

    @property
    def micro_batches(self) -> tuple[tuple[int, ...], ...]:
        """By device, the rows of each of its micro-batches, the largest first; none is empty."""
        parts = [min(self.accumulate, rows) for rows in self.rows]
        return tuple(
            tuple(len(share(rows, part, count)) for part in range(count))
            for rows, count in zip(self.rows, parts, strict=True)
        )

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any, *, source: str = "plan") -> DataPlan:
        """Read what ``to_json`` gives; ``source`` names the file in errors."""
        return checked(cls, data, format=FORMAT, source=source)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        write_text(Path(path), json.dumps(self.to_json(), indent=1) + "\n", setting="plan file")

    @classmethod
    def load(cls, path: str | Path) -> DataPlan:
        """Read a plan; an error names the file and the field."""
        return cls.from_json(read_json(path, works="what DataPlan.save writes"), source=str(path))


def known_bits(bits: object) -> bool:
    """Whether gradients may travel in them."""
    return bits == "auto" or (isinstance(bits, int) and not isinstance(bits, bool) and bits in WIDTHS)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Consecutive blocks whose gradients are averaged at once."""

    first: int
    end: int
    """The block after the last. Backward runs from the last to the first."""
    gradient_bytes: int
    """Zero where no block has weights: then there is nothing to average."""


def buckets(plan: DataPlan, profile: Profile) -> tuple[Bucket, ...]:
    """The buckets, in the order in which they are ready; together they have every block of the chain."""
    found: list[Bucket] = []
    begin = end = len(profile.blocks)
    size, limit = 0, plan.first_bucket_bytes
    for place in reversed(range(end)):
        if profile.blocks[place].parameter_bytes:
            begin, size = place, size + profile.blocks[place].parameter_bytes
        if size >= limit or (size and not place):
            found.append(Bucket(first=begin, end=end, gradient_bytes=size))
            end, size, limit = begin, 0, plan.bucket_bytes
    if end:  # blocks without weights at the beginning of the chain: nothing waits for them
        found.append(Bucket(first=0, end=end, gradient_bytes=0))
    return tuple(found)
