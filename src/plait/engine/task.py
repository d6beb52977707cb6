"""What one group of workers does: a job by one strategy, or jobs that take turns; plain data, in a file.

A plan says what is to run where. A task is one part of that, as its workers need it: they read it from
``task.json`` in their folder, whoever started them and wherever they are.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from plait.engine.record import write_whole
from plait.errors import FileError
from plait.job import Job, Priority

FORMAT = "plait.task/1"
FILE = "task.json"
SELECTION = "selection.pickle"
"""Beside it, what a search tries: an object of the user's own making."""

Kind = Literal["train", "spill", "search"]
StrategyName = Literal["data", "pipeline", "burst", "spill"]
Compress = int | Literal["auto"] | None


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one group of workers does."""

    name: str
    """That of its job, or of the run's part in which several jobs take turns."""
    kind: Kind
    """``train``: one job, a worker on each device. ``spill``: jobs that take turns in one worker's care.
    ``search``: trials that do."""
    strategy: StrategyName
    jobs: tuple[str, ...]
    """Each as JSON."""
    devices: tuple[str, ...]
    """Of the cluster, by name."""
    cores: tuple[tuple[int, ...], ...] = ()
    """By device, those that its worker may use; none: all."""
    plan: dict[str, Any] | None = None
    """What the strategy's runtime executes."""
    compress: Compress = None
    """Bits of gradients on the wire."""
    priority: Priority = "foreground"
    after: tuple[str, ...] = ()
    """Tasks that have ended before this one begins."""
    memory_bytes: int | None = None
    """Of all its processes, where it spills; of the whole work, in the background."""
    max_slowdown: float = 1.05
    """Of the foreground, where this is in the background."""
    save_every: int | None = None
    expected_step_ms: float | None = None
    """As it was planned."""

    @property
    def workers(self) -> int:
        """How many processes are started."""
        return len(self.devices) if self.kind == "train" else 1

    @property
    def names(self) -> tuple[str, ...]:
        """Of its jobs."""
        return tuple(str(json.loads(job)["name"]) for job in self.jobs)

    def read_jobs(self) -> list[Job]:
        """Its jobs as objects."""
        return [Job.from_json(job) for job in self.jobs]

    def save(self, folder: Path) -> None:
        """Write it where its workers look."""
        write_whole(folder / FILE, json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Task:
        """Read what :meth:`save` wrote."""
        file = folder / FILE
        try:
            content = dict(json.loads(file.read_text()))
            if content.pop("format", None) != FORMAT:
                raise ValueError("another format")
            unknown = content.keys() - {field.name for field in fields(cls)}
            if unknown:
                raise ValueError(f"it has {sorted(unknown)[0]!r}")
            for name in ("jobs", "devices", "after"):
                content[name] = tuple(content[name])
            content["cores"] = tuple(tuple(cores) for cores in content["cores"])
            return cls(**content)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FileError(
                f"{file} is not a task: {error}", setting="folder", works="a folder under tasks/ of a run"
            ) from None
