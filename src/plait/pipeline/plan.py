"""The plan of a pipelined job: the stages, the order, the size of micro-batches, and what it should take.

A plan is plain data, made by :mod:`plait.pipeline.planning` and read by whoever runs the job or plays it.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plait.destination import write_text
from plait.document import checked, read_json
from plait.errors import FileError, UsageError
from plait.pipeline.candidate import Candidate
from plait.pipeline.orders import Order

FORMAT = "plait.plan.pipeline/1"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Consecutive blocks of the chain that run on one device."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    first: int
    end: int
    """The block after the last."""

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end:
            what = f"a stage of blocks {self.first} to {self.end}"
            raise UsageError(what, setting="stages", works="first below end")


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a step should take."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    step_ms: float
    """Forward and backward of the global batch, with the sums of gradients that stages share; the optimizer
    left out."""
    busy_ms: tuple[float, ...]
    """By stage, what it computes."""
    peak_bytes: tuple[int, ...]
    """By stage, the most that it holds."""

    def __post_init__(self) -> None:
        for name in ("step_ms", "busy_ms", "peak_bytes"):
            figures = getattr(self, name)
            for figure in figures if isinstance(figures, tuple) else (figures,):
                if not 0 <= figure < math.inf:
                    raise UsageError(f"{name} has {figure}", setting=name, works="0 or more")

    @property
    def idle(self) -> float:
        """The share of all stages' time in which they wait."""
        total_ms = self.step_ms * len(self.busy_ms)
        return 1 - sum(self.busy_ms) / total_ms if total_ms else 0.0


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """How a job is trained in stages."""

    stages: tuple[Stage, ...]
    order: Order
    global_batch: int
    """Rows of a step, cut into the order's micro-batches."""
    forecast: Forecast

    def __post_init__(self) -> None:
        end = 0
        for stage in self.stages:
            if stage.first != end:
                raise UsageError(
                    f"a stage begins at block {stage.first} where the one before it ends at {end}",
                    setting="stages",
                    works="every block in one stage, in their order",
                )
            end = stage.end
        counts = (len(self.forecast.busy_ms), len(self.forecast.peak_bytes), self.order.stages)
        if set(counts) != {len(self.stages)}:
            raise UsageError(
                f"{len(self.stages)} stages, an order of {self.order.stages} "
                f"and a forecast of {counts[0]} and {counts[1]}",
                setting="stages",
                works="the same number in all",
            )
        Candidate(order=self.order, global_batch=self.global_batch)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Where the chain is cut: ``chain.cut(plan.cuts)`` has a block for each stage."""
        return tuple(stage.first for stage in self.stages[1:])

    @property
    def candidate(self) -> Candidate:
        """What the schedule runs."""
        return Candidate(order=self.order, global_batch=self.global_batch)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        return {
            "format": FORMAT,
            "stages": [asdict(stage) for stage in self.stages],
            "order": self.order.to_json(),
            "global_batch": self.global_batch,
            "forecast": {
                **asdict(self.forecast),
                "busy_ms": list(self.forecast.busy_ms),
                "peak_bytes": list(self.forecast.peak_bytes),
            },
        }

    @classmethod
    def from_json(cls, data: Any, *, source: str = "plan") -> PipelinePlan:
        """Read what ``to_json`` gives; ``source`` names the file in errors."""
        read = checked(_Plain, data, format=FORMAT, source=source)
        try:
            return cls(
                stages=read.stages,
                order=Order.from_json(read.order),
                global_batch=read.global_batch,
                forecast=read.forecast,
            )
        except UsageError as error:
            raise FileError(f"{source}: {error.what}", setting=error.setting, works=error.works) from None

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        write_text(Path(path), json.dumps(self.to_json(), indent=1) + "\n", setting="plan file")

    @classmethod
    def load(cls, path: str | Path) -> PipelinePlan:
        """Read a plan; an error names the file and the field."""
        return cls.from_json(read_json(path, works="what PipelinePlan.save writes"), source=str(path))


@dataclass(frozen=True, kw_only=True)
class _Plain:
    """The file's fields; the order is read by its own rules."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    stages: tuple[Stage, ...]
    order: dict[str, Any]
    global_batch: int
    forecast: Forecast
