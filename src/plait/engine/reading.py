"""What there is to tell of a run, read once: whatever is missing or damaged is told too, and left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from plait.engine import figures
from plait.engine.figures import Placed
from plait.engine.record import TIMELINE, Record, latest
from plait.engine.result import FILE as RESULT
from plait.engine.result import JobResult
from plait.engine.task import FILE as TASK
from plait.engine.task import Task
from plait.errors import PlaitError
from plait.timeline import Timeline

_UNDER_WAY = ("started", "restarted")
_STATES = (*_UNDER_WAY, "failed", "finished", "stopped")

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A run as its directory tells it."""

    record: Record
    config: Row
    plan: Row
    environment: Row
    asked: Mapping[str, Row]
    """The jobs as they were asked for, by name."""
    history: Sequence[Row]
    events: Sequence[Row]
    tasks: Mapping[str, Sequence[str]]
    """The jobs of each task."""
    sweeps: Sequence[str]
    """The tasks that are searches."""
    results: Mapping[str, JobResult]
    """Of jobs that have ended."""
    timeline: Timeline | None
    problems: list[str] = field(default_factory=list)
    """What could not be read."""

    @classmethod
    def of(cls, record: Record) -> Reading:
        """Read what there is."""
        problems: list[str] = []

        def read(load: Callable[[], Any]) -> Any:
            try:
                return load()
            except PlaitError as error:
                problems.append(error.what)
                return None

        drawn = record.directory / TIMELINE
        tasks = [read(partial(Task.load, file.parent)) for file in record.directory.glob(f"tasks/*/{TASK}")]
        ended = [
            read(partial(JobResult.load, file.parent)) for file in record.directory.glob(f"jobs/*/{RESULT}")
        ]
        return cls(
            record=record,
            config=record.config,
            plan=read(lambda: record.plan) or {},
            environment=read(lambda: record.environment) or {},
            asked=record.asked,
            history=record.history(),
            events=record.events(),
            tasks={task.name: task.names for task in tasks if task is not None},
            sweeps=[task.name for task in tasks if task is not None and task.kind == "search"],
            results={result.name: result for result in ended if result is not None},
            timeline=read(lambda: Timeline.load(drawn)) if drawn.exists() else None,
            problems=problems,
        )

    @cached_property
    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """By job, the steps in order; of one that was taken again, the last."""
        return latest(self.history)

    @cached_property
    def placed(self) -> dict[str, Placed]:
        """Where jobs were to run."""
        return {one.job: one for one in figures.placements(self.plan)}

    @cached_property
    def jobs(self) -> list[str]:
        """All that anything is known of, in the order in which they were asked for."""
        return list(dict.fromkeys([*self.asked, *self.placed, *self.rows]))

    def told(self, job: str) -> list[Row]:
        """What happened to a job: events bear its name, or that of the task that it is part of."""
        names = {job, *(task for task, jobs in self.tasks.items() if job in jobs)}
        return [event for event in self.events if event.get("job") in names]

    @cached_property
    def begin_s(self) -> float:
        """When the first thing happened that is known of, in Unix seconds."""
        return min(figures.values([*self.events, *self.history], "time"), default=float(self.record.created))

    def state(self, job: str) -> str:
        """``finished``, ``failed``, ``not ended`` and so on, as far as is known."""
        kept = [event["kind"] for event in self.told(job) if event["kind"] in _STATES]
        if job in self.results and (not kept or kept[-1] not in _UNDER_WAY):
            return self.results[job].end
        if kept:
            return "not ended" if kept[-1] in _UNDER_WAY else str(kept[-1])
        return "not ended" if job in self.rows else "not begun"
