"""What there is to tell of a run, read once: whatever is missing or damaged is told too, and left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from plait.engine import figures, timelines
from plait.engine.figures import Placed
from plait.engine.record import Record, latest
from plait.engine.recording import Recorded
from plait.engine.result import FILE as RESULT
from plait.engine.result import JobResult
from plait.engine.task import FILE as TASK
from plait.engine.task import Task
from plait.engine.trials import load_trials
from plait.errors import PlaitError, UsageError
from plait.timeline import Timeline
from plait.timeline.span import natural

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
    tasks: Mapping[str, Task]
    trials: Mapping[str, Mapping[str, Row]]
    """By task that is a search, what each trial was tried with."""
    results: Mapping[str, JobResult]
    """Of jobs that have ended."""
    recorded: Sequence[Recorded]
    """What workers left."""
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

        folders = sorted(file.parent for file in record.directory.glob(f"tasks/*/{TASK}"))
        loaded = [(folder, read(partial(Task.load, folder))) for folder in folders]
        tasks = {task.name: (task, folder) for folder, task in loaded if task is not None}
        searches = {name: folder for name, (task, folder) in tasks.items() if task.kind == "search"}
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
            tasks={name: task for name, (task, _) in tasks.items()},
            trials={name: read(partial(load_trials, folder)) or {} for name, folder in searches.items()},
            results={result.name: result for result in ended if result is not None},
            recorded=[
                Recorded(task=name, attempt=attempt, rank=rank, timeline=timeline)
                for name, (_, folder) in tasks.items()
                for file, attempt, rank in Recorded.files(folder)
                if (timeline := read(partial(Timeline.load, file))) is not None
            ],
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
        """All that anything is known of, in the order in which they were asked for.

        What trials of a search are made from is none, unless it was trained itself.
        """
        known = dict.fromkeys([*self.asked, *self.placed, *sorted(self.rows, key=natural)])
        bases = {name for task in self.trials for name in self.tasks[task].names}
        return [name for name in known if name not in bases or name in self.rows or name in self.placed]

    def task_of(self, job: str) -> Task | None:
        """The task that a job is part of."""
        for name, task in self.tasks.items():
            if job in self.trials.get(name, ()) or (job in task.names and task.kind != "search"):
                return task
        return None

    def tried(self, job: str) -> Row:
        """What a trial was tried with; nothing of other jobs."""
        return next((trials[job] for trials in self.trials.values() if job in trials), {})

    def wanted(self, job: str) -> Row:
        """How a job was asked for; a trial, as the job that it is made from was."""
        task = self.task_of(job)
        base = job if job in self.asked or task is None else task.names[0]
        return self.asked.get(base, {})

    def told(self, job: str) -> list[Row]:
        """What happened to a job: events bear its name, or that of the task that it is part of."""
        task = self.task_of(job)
        names = {job} if task is None else {job, task.name}
        return [event for event in self.events if event.get("job") in names]

    def last_steps(self, job: str | None, count: int) -> Timeline:
        """What workers recorded within the last steps of a job, on the tracks that a simulation has.

        ``job`` may be None where only one has such a record.
        """
        tasks = dict.fromkeys(one.task for one in self.recorded if self.tasks[one.task].kind == "train")
        kept = [task for task in tasks if job in (None, task)]
        if len(kept) != 1:
            what = f"recorded steps of {len(kept)} jobs" if kept else "no recorded steps"
            of = "" if job is None else f" of job {job!r}"
            works = ", ".join(tasks) or "one whose workers have ended, and do not take turns"
            raise UsageError(f"{self.record.directory} has {what}{of}", setting="job", works=works)
        found = timelines.of_steps([one for one in self.recorded if one.task == kept[0]], count)
        if not found.spans:
            raise UsageError(
                f"the workers of {kept[0]} recorded nothing within their steps",
                setting="job",
                works="one that trains as a pipeline, by burst, or with compressed gradients",
            )
        return found

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
