"""What came of the jobs of a run: an outcome each, and for all together what was foretold and measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, overload

from plait.errors import FileError, UsageError
from plait.evaluation import Evaluated
from plait.spill.makespan import Disk, Load
from plait.units import format_bytes, format_seconds

FORMAT = "plait.spill.outcome/1"
End = Literal["finished", "stopped", "interrupted", "failed"]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a run takes: foretold, or measured."""

    memory_bytes: int
    """Peak of all processes: anonymous and shared."""
    disk_bytes: int
    """Peak of the files."""
    read_bytes: int
    written_bytes: int
    """Foretold: to make room. Measured: commits, too."""
    busy_seconds: float
    """Of all devices together: computing."""
    seconds: float
    """From the first unit to the last."""

    def __add__(self, later: Figures) -> Figures:
        """With what is added to a run under way: memory is there already, time comes at most on top."""
        sums = {name: getattr(self, name) + getattr(later, name) for name in vars(self)}
        return Figures(**{**sums, "memory_bytes": max(self.memory_bytes, later.memory_bytes)})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A job and how far it came; the histories go back to the first step, also after a resume."""

    name: str
    end: End
    """``stopped``: by a call of ``stop`` or by model selection; ``interrupted``: can be resumed."""
    losses: tuple[float, ...] = ()
    """One for each step."""
    evaluations: tuple[Evaluated, ...] = ()
    skipped: tuple[int, ...] = ()
    """The steps that were not finite, where the job skips them."""
    weights: Path | None = None
    """The trained weights (safetensors), of a job that has finished."""
    error: str | None = None
    """Why it failed, with the traceback where the job's own code raised."""
    busy_seconds: float = 0.0
    """How long devices computed for it, in this run."""
    forecast_seconds: float | None = None
    """How long that was expected to be."""
    job: str = ""
    """The job, as JSON."""

    @property
    def steps(self) -> int:
        """How many steps were done."""
        return len(self.losses)

    @property
    def finished(self) -> bool:
        """Whether these were all steps of the job."""
        return self.end == "finished"

    def to_json(self) -> str:
        """The outcome as JSON text, format "plait.spill.outcome/1"."""
        plain = {**asdict(self), "weights": None if self.weights is None else self.weights.name}
        return json.dumps({"format": FORMAT, **plain}, indent=1)

    @classmethod
    def load(cls, file: Path) -> Outcome:
        """Read what :meth:`to_json` wrote into a file; the weights are beside it."""
        try:
            return cls.from_json(json.loads(file.read_text()), folder=file.parent)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileError(
                f"{file} is not the outcome of a job: {error}",
                setting="directory",
                works=f"what fit() wrote; or delete {file}, and the job goes on from its state, or begins",
            ) from None

    @classmethod
    def from_json(cls, data: dict[str, Any], *, folder: Path) -> Outcome:
        """Read what :meth:`to_json` gave, taken out of its text; weights are in that folder."""
        content = dict(data)
        if content.pop("format") != FORMAT:
            raise ValueError("another format")
        weights = content.pop("weights")
        evaluations = tuple(Evaluated(**evaluated) for evaluated in content.pop("evaluations"))
        losses, skipped = tuple(content.pop("losses")), tuple(content.pop("skipped"))
        return cls(
            weights=None if weights is None else folder / weights,
            evaluations=evaluations,
            losses=losses,
            skipped=skipped,
            **content,
        )

    def __str__(self) -> str:
        loss = f", loss {self.losses[-1]:.4g}" if self.losses else ""
        text = f"{self.name}: {self.end} after {self.steps} steps{loss}"
        return text if self.error is None else f"{text}: {self.error.splitlines()[0]}"


class Outcomes(Sequence[Outcome]):
    """The outcomes in the order of the jobs, by number or by name, and the figures of the whole run."""

    def __init__(
        self,
        outcomes: Iterable[Outcome],
        *,
        forecast: Figures,
        measured: Figures,
        bound_seconds: float,
        notes: Sequence[str] = (),
        loads: Sequence[Load] = (),
        below: Disk | None = None,
    ) -> None:
        self._outcomes = tuple(outcomes)
        self.forecast = forecast
        self.measured = measured
        self.bound_seconds = bound_seconds
        """No schedule of these units is shorter: all shared evenly by the devices, or the longest job."""
        self.notes = tuple(notes)
        """What happened on the way: devices that died, jobs that went back."""
        self.loads = tuple(loads)
        """What was planned of the jobs that ran, and the memory and disk that they had: see `play_spill`."""
        self.below = below

    @overload
    def __getitem__(self, place: int | str) -> Outcome: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Outcome, ...]: ...
    def __getitem__(self, place: int | str | slice) -> Outcome | tuple[Outcome, ...]:
        if isinstance(place, str):
            for outcome in self._outcomes:
                if outcome.name == place:
                    return outcome
            names = ", ".join(outcome.name for outcome in self._outcomes)
            raise UsageError(f"there is no job {place!r}", setting="name", works=names)
        return self._outcomes[place]

    def __len__(self) -> int:
        return len(self._outcomes)

    def __iter__(self) -> Iterator[Outcome]:
        return iter(self._outcomes)

    def __str__(self) -> str:
        rows = [(name, *row) for name, *row in comparison(self.forecast, self.measured)]
        lines = [str(outcome) for outcome in self._outcomes]
        lines += [f"{name:<22} foretold {told:>12}   measured {got:>12}" for name, told, got in rows]
        lines.append(f"{'shortest possible':<22} {format_seconds(self.bound_seconds)}")
        return "\n".join([*lines, *self.notes])


def comparison(forecast: Figures, measured: Figures) -> list[tuple[str, str, str]]:
    """Rows of what was foretold and what was measured, as people read them."""
    kinds = {
        "memory_bytes": ("peak memory", format_bytes),
        "disk_bytes": ("peak disk", format_bytes),
        "read_bytes": ("read", format_bytes),
        "written_bytes": ("written", format_bytes),
        "busy_seconds": ("computing", format_seconds),
        "seconds": ("time", format_seconds),
    }
    return [
        (title, text(getattr(forecast, field)), text(getattr(measured, field)))
        for field, (title, text) in kinds.items()
    ]
