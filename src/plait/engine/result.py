"""What came of a job, in a file beside its checkpoint and weights: ``result.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from plait.engine.record import write_whole
from plait.errors import FileError
from plait.evaluation import Evaluated
from plait.units import counted

FORMAT = "plait.result/1"
FILE = "result.json"

End = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """A job and how far it came; the histories go back to the first step, also after a restart."""

    name: str
    end: End
    """``stopped`` can be gone on with."""
    strategy: str
    losses: tuple[float, ...] = ()
    """One for each step."""
    evaluations: tuple[Evaluated, ...] = ()
    skipped: tuple[int, ...] = ()
    """The steps that were not finite, where the job skips them."""
    seconds: float = 0.0
    """From the first start to the end, restarts included."""
    restarts: int = 0
    error: str | None = None
    """Why it failed."""
    weights: Path | None = None
    """What it learned, as safetensors."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Of a job that spills, ``foretold`` and ``measured`` figures of all that took turns with it: bytes read
    and written, peak memory and disk, and time, since the last start (:class:`plait.spill.outcome.Figures`).
    Of a trial that its search gave up before the end, ``given_up``; of the one that it found best, ``best``.
    """

    @property
    def steps(self) -> int:
        """How many steps were done."""
        return len(self.losses)

    @property
    def finished(self) -> bool:
        """Whether these were all steps of the job."""
        return self.end == "finished"

    def save(self, folder: Path) -> None:
        """Write it, whole or not at all."""
        plain = {**asdict(self), "weights": None if self.weights is None else self.weights.name}
        write_whole(folder / FILE, json.dumps(_finite({"format": FORMAT, **plain}), allow_nan=False) + "\n")

    @classmethod
    def load(cls, folder: Path) -> JobResult | None:
        """Read it; None where there is none."""
        file = folder / FILE
        if not file.exists():
            return None
        try:
            content = dict(json.loads(file.read_text()))
            if content.pop("format", None) != FORMAT:
                raise ValueError("another format")
            content["losses"] = tuple(map(number, content["losses"]))
            content["evaluations"] = tuple(
                Evaluated(
                    step=each["step"],
                    loss=number(each["loss"]),
                    metrics={name: number(value) for name, value in each["metrics"].items()},
                )
                for each in content["evaluations"]
            )
            content["skipped"] = tuple(content["skipped"])
            content["facts"] = dict(content.get("facts", {}))  # those of earlier versions have none
            content["weights"] = None if content["weights"] is None else folder / content["weights"]
            return cls(**content)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FileError(
                f"{file} is not a result: {error}", setting="directory", works="another run"
            ) from None

    def __str__(self) -> str:
        loss = f", loss {self.losses[-1]:.4g}" if self.losses else ""
        if self.evaluations:
            found = self.evaluations[-1].figures.items()
            loss += f" (evaluated: {', '.join(f'{name} {value:.4g}' for name, value in found)})"
        again = f", {counted(self.restarts, 'restart')}" if self.restarts else ""
        best = ", the best trial" if self.facts.get("best") else ""
        end = "given up" if self.facts.get("given_up") else self.end
        text = f"{self.name}: {end} after {self.steps} steps{loss}{best}{again}"
        return text if self.error is None else f"{text}: {self.error.splitlines()[0]}"


def number(value: float | None) -> float:
    """What a file has null for is not a number."""
    return math.nan if value is None else value


def _finite(value: Any) -> Any:
    """As JSON can hold it: what is not finite is null."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
