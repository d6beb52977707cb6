"""What each block of a chain costs: the one file that a planner needs.

A profile holds, for every block, forward and backward time by batch size and the bytes it keeps, saves
and passes on. Reading one needs neither a model nor a device nor torch. The file is JSON, format
"plait.profile/1"; docs/profile.md lists its fields.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.destination import write_text
from plait.document import read_json
from plait.errors import FileError, UsageError

if TYPE_CHECKING:
    from plait.chain import Chain
    from plait.job import Job

FORMAT = "plait.profile/1"
_SIZE = re.compile("0|-?[1-9][0-9]{0,17}")
"""A whole number, written in the one way that there is."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """A block's time at one batch size: medians, and how far the middle half of the runs lies apart."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    forward: float
    backward: float
    forward_spread: float = 0.0
    backward_spread: float = 0.0
    repetitions: int = 0

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "forward_spread", "backward_spread", "repetitions"):
            _at_least_zero(f"milliseconds.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """The costs of one block. Sizes are bytes; what follows the batch is given for one sample."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    name: str
    parameter_bytes: int
    output_bytes_per_sample: int
    milliseconds: dict[int, Times]
    """By measured batch size."""
    optimizer_bytes: int = 0
    """State of the optimizer that was measured with."""
    tied: tuple[str, ...] = ()
    """Parameters that other blocks use too; they are counted in ``parameter_bytes`` of the first."""
    saved_bytes_per_sample: int = 0
    """What forward keeps for backward, parameters and the model's inputs apart, each tensor once."""
    transient_bytes: int = 0
    transient_bytes_per_sample: int = 0
    """What a pass needs for a moment beyond what is there before or after it."""
    optimizer_milliseconds: float = 0.0
    inputs: tuple[str, ...] | None = None
    """Names of the blocks it reads from; None where that is just the block before it."""

    def __post_init__(self) -> None:
        if not self.milliseconds:
            raise UsageError(
                f"block {self.name!r} has no times", setting="milliseconds", works='{"1": {...}}'
            )
        for batch in self.milliseconds:
            if batch < 1:
                raise UsageError(
                    f"block {self.name!r} has times for batch {batch}", setting="milliseconds", works="1"
                )
        for name, value in asdict(self).items():
            if isinstance(value, (int, float)):
                _at_least_zero(name, value)

    def forward_ms(self, batch: float) -> float:
        """Forward time at a batch size, between and beyond the measured ones on straight lines."""
        return _on_line(batch, {size: times.forward for size, times in self.milliseconds.items()})

    def backward_ms(self, batch: float) -> float:
        """Backward time at a batch size."""
        return _on_line(batch, {size: times.backward for size, times in self.milliseconds.items()})

    def transient(self, batch: int) -> int:
        """Bytes needed for a moment at a batch size."""
        return self.transient_bytes + self.transient_bytes_per_sample * batch


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The costs of a chain, block by block."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    blocks: tuple[BlockProfile, ...]
    model: str = ""
    device: str = ""
    threads: int = field(default=1)

    def __post_init__(self) -> None:
        if not self.blocks:
            raise UsageError("a profile needs at least one block", setting="blocks", works="[{...}]")
        if self.threads < 1:
            raise UsageError(f"a profile of {self.threads} threads", setting="threads", works="1")
        seen: set[str] = set()
        for block in self.blocks:
            if block.name in seen:
                raise UsageError(
                    f"two blocks are called {block.name!r}", setting="blocks.name", works="one name each"
                )
            for name in block.inputs or ():
                if name not in seen:
                    raise UsageError(
                        f"block {block.name!r} reads from {name!r}, which is no block before it",
                        setting="blocks.inputs",
                        works=f"one of {sorted(seen)}" if seen else "no inputs for the first block",
                    )
            seen.add(block.name)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes that were measured for every block."""
        sizes = [set(block.milliseconds) for block in self.blocks]
        return tuple(sorted(set.intersection(*sizes)))

    def extrapolates(self, batch: float) -> str | None:
        """A sentence where a batch size lies beyond what was measured for some block, else None."""
        for block in self.blocks:
            low, high = min(block.milliseconds), max(block.milliseconds)
            if not low <= batch <= high:
                return f"batch {batch:g} lies beyond the measured {low} to {high} of block {block.name!r}"
        return None

    def step_ms(self, batch: float) -> float:
        """Forward, backward and optimizer of all blocks, one after another."""
        return sum(b.forward_ms(batch) + b.backward_ms(batch) + b.optimizer_milliseconds for b in self.blocks)

    # --- files ----------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The profile as the file has it."""
        head = {"format": FORMAT, "model": self.model, "device": self.device, "threads": self.threads}
        blocks = []
        for block in self.blocks:
            row = asdict(block)
            row["milliseconds"] = {
                str(size): row["milliseconds"][size] for size in sorted(row["milliseconds"])
            }
            row["tied"] = list(block.tied)
            row["inputs"] = list(block.inputs or ())
            if block.inputs is None:
                del row["inputs"]
            blocks.append(row)
        return {**head, "blocks": blocks}

    @classmethod
    def from_json(cls, data: Any, *, source: str = "profile") -> Profile:
        """Read what ``to_json`` gives; ``source`` names the file in errors."""
        from pydantic import TypeAdapter, ValidationError

        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise FileError(f"{source}: field 'format' is {found!r}", setting="format", works=repr(FORMAT))
        rest = {key: value for key, value in data.items() if key != "format"}
        _check_sizes(rest.get("blocks"), source)
        try:
            return TypeAdapter(cls).validate_python(rest)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "blocks"
            more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
            what = str(first["ctx"]["error"]) if "error" in first.get("ctx", {}) else first["msg"]
            raise FileError(
                f"{source}: field {where!r}: {what}{more}", setting=where, works="docs/profile.md"
            ) from None

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        write_text(Path(path), json.dumps(self.to_json(), indent=1) + "\n", setting="profile file")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile; an error names the file and the field."""
        works = "what `plait profile FILE --out profile.json` writes"
        return cls.from_json(read_json(path, works=works, setting="FILE"), source=str(path))

    # --- measuring ------------------------------------------------------------------------------------

    @classmethod
    def measure(
        cls,
        chain: Chain,
        batch_sizes: Sequence[int] = (1, 2, 4, 8),
        *,
        optimizer: Callable[[Any], Any] | None = None,
        repetitions: int = 5,
        threads: int | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> Profile:
        """Measure every block of a chain at several batch sizes.

        ``optimizer`` takes parameters and gives a `torch.optim.Optimizer`; AdamW if not given. The chain's
        weights, buffers and gradients, and the random generators, are as before afterwards.
        """
        from plait.profiler import measure

        return measure(
            chain,
            batch_sizes,
            optimizer=optimizer,
            repetitions=repetitions,
            threads=threads,
            progress=progress,
        )

    @classmethod
    def of_job(
        cls,
        job: Job,
        batch_sizes: Sequence[int] = (1, 2, 4, 8),
        *,
        repetitions: int = 5,
        threads: int | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> Profile:
        """Measure a job: the blocks of its model under its precision, with its optimizer and its threads.

        The first block's forward holds fetching the rows, the last block's passes hold the loss.
        """
        from plait.around import Around
        from plait.chain import Chain
        from plait.profiler import measure

        around = Around.of(job)
        return measure(
            Chain.of_job(job, batches=around.batches),
            batch_sizes,
            optimizer=lambda parameters: job.build_optimizer((str(i), p) for i, p in enumerate(parameters)),
            repetitions=repetitions,
            threads=job.threads if threads is None else threads,
            progress=progress,
            around=around,
        )


def _check_sizes(blocks: Any, source: str) -> None:
    """Batch sizes are keys, which JSON has as text: "1" and "01" would be the same size, and one be lost."""
    for i, block in enumerate(blocks if isinstance(blocks, list) else []):
        times = block.get("milliseconds") if isinstance(block, dict) else None
        for size in times if isinstance(times, dict) else ():
            if isinstance(size, str) and not _SIZE.fullmatch(size):
                where = f"blocks.{i}.milliseconds"
                raise FileError(
                    f"{source}: field {where!r}: {size!r} is no batch size", setting=where, works='"1"'
                )


def _at_least_zero(name: str, value: float) -> None:
    if not 0 <= value < 2**63:
        raise UsageError(f"{name} is {value}", setting=name, works="0 or more")


def _on_line(batch: float, points: dict[int, float]) -> float:
    """Piecewise linear through the points; beyond them, on the last piece's line, never below zero."""
    if not 0 < batch < math.inf:
        raise UsageError(f"a batch of {batch:g} has no time", setting="batch", works="1")
    sizes = sorted(points)
    if len(sizes) == 1:
        return points[sizes[0]] * batch / sizes[0]
    place = min(max(bisect_left(sizes, batch), 1), len(sizes) - 1)
    left, right = sizes[place - 1], sizes[place]
    slope = (points[right] - points[left]) / (right - left)
    return max(0.0, points[left] + slope * (batch - left))
