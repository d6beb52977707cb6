"""The plan of a burst-parallel job: how many devices each block runs on, and what a step should take.

A plan is plain data, made by :mod:`plait.burst.planner` (or by hand, ``BurstPlan.of``) and read by whoever
runs the job or plays it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from plait.burst import rows
from plait.destination import write_text
from plait.document import checked, read_json
from plait.errors import UsageError
from plait.units import parse_whole

FORMAT = "plait.plan.burst/1"


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a step should take."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    step_ms: float
    """Forward, backward, what is left of the gradients' synchronisation, and the optimizer."""
    device_ms: float
    """What all devices spend on it together; those that a block leaves out are free for other work."""
    single_ms: float
    """The step on one device."""
    idle_ms: tuple[float, ...]
    """By device, how long no block of the step is on it."""
    gap: float = 0.0
    """No plan has both figures less than these over 1 + gap; 0 where the plan is known to be the best."""

    def __post_init__(self) -> None:
        for name in ("step_ms", "device_ms", "single_ms", "idle_ms", "gap"):
            figures = getattr(self, name)
            for figure in figures if isinstance(figures, tuple) else (figures,):
                if not 0 <= figure < math.inf:
                    raise UsageError(f"{name} has {figure}", setting=name, works="0 or more")

    @property
    def amplification(self) -> float:
        """The devices' time over that of one device alone."""
        return self.device_ms / self.single_ms if self.single_ms else 1.0

    @property
    def speedup(self) -> float:
        """One device's step over this one."""
        return self.single_ms / self.step_ms if self.step_ms else 1.0


@dataclass(frozen=True, kw_only=True)
class BurstPlan:
    """How wide each block of a chain runs. A block of width w is on devices (ranks) 0 to w - 1."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    blocks: tuple[str, ...]
    """The names of the chain's blocks, in order."""
    widths: tuple[int, ...]
    """Block by block."""
    devices: int
    """How many there are; the last ones may have no block."""
    batch: int
    """Rows of a step over all devices."""
    forecast: Forecast | None = field(default=None)
    """None for a plan made by hand."""

    def __post_init__(self) -> None:
        parse_whole(self.devices, setting="devices")
        parse_whole(self.batch, setting="batch")
        if not self.blocks or len(self.blocks) != len(self.widths):
            raise UsageError(
                f"{len(self.widths)} widths for {len(self.blocks)} blocks",
                setting="widths",
                works="one for each block",
            )
        if len(set(self.blocks)) != len(self.blocks):
            twice = next(name for name in self.blocks if self.blocks.count(name) > 1)
            raise UsageError(f"two blocks are called {twice!r}", setting="blocks", works="one name each")
        most = min(self.devices, self.batch)
        for width in set(self.widths):
            if parse_whole(width, setting="widths") > most:
                name = self.blocks[self.widths.index(width)]
                raise UsageError(
                    f"block {name!r} has width {width}, with {self.devices} devices and {self.batch} rows",
                    setting="widths",
                    works=f"1 to {most}",
                )
        if self.forecast is not None and len(self.forecast.idle_ms) != self.devices:
            raise UsageError(
                f"a forecast of {len(self.forecast.idle_ms)} devices for {self.devices}",
                setting="idle_ms",
                works=f"{self.devices} figures",
            )

    @classmethod
    def of(
        cls, blocks: Sequence[str], widths: Sequence[int], *, batch: int, devices: int | None = None
    ) -> BurstPlan:
        """A plan made by hand, with no forecast; as many devices as its widest block if not given."""
        count = max(widths, default=1) if devices is None else devices
        return cls(blocks=tuple(blocks), widths=tuple(widths), devices=count, batch=batch)

    @property
    def width(self) -> int:
        """That of the widest block: how many devices the plan uses."""
        return max(self.widths)

    def shares(self, block: int) -> tuple[int, ...]:
        """The rows of each device that a block runs on."""
        return rows.shares(self.batch, self.widths[block])

    def held(self, rank: int) -> tuple[int, ...]:
        """The blocks that a device runs."""
        return tuple(place for place, width in enumerate(self.widths) if rank < width)

    def difference(self, other: BurstPlan) -> str | None:
        """The first thing in which another plan would train differently, in words; None where nothing is."""
        for name in ("devices", "batch"):
            if getattr(self, name) != getattr(other, name):
                return f"{name} is {getattr(self, name)} and {getattr(other, name)}"
        if len(self.blocks) != len(other.blocks):
            return f"there are {len(self.blocks)} and {len(other.blocks)} blocks"
        pairs = zip(self.blocks, other.blocks, self.widths, other.widths, strict=True)
        for place, (name, its, width, its_width) in enumerate(pairs):
            if name != its:
                return f"block {place} is {name!r} and {its!r}"
            if width != its_width:
                return f"block {name!r} has width {width} and {its_width}"
        return None

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        data = asdict(self)
        data["blocks"], data["widths"] = list(self.blocks), list(self.widths)
        if self.forecast is None:
            del data["forecast"]
        else:
            data["forecast"]["idle_ms"] = list(self.forecast.idle_ms)
        return {"format": FORMAT, **data}

    @classmethod
    def from_json(cls, data: Any, *, source: str = "plan") -> BurstPlan:
        """Read what ``to_json`` gives; ``source`` names the file in errors."""
        return checked(cls, data, format=FORMAT, source=source)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        write_text(Path(path), json.dumps(self.to_json(), indent=1) + "\n", setting="plan file")

    @classmethod
    def load(cls, path: str | Path) -> BurstPlan:
        """Read a plan; an error names the file and the field."""
        return cls.from_json(read_json(path, works="what BurstPlan.save writes"), source=str(path))
