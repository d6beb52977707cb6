"""What comes of a run: outcomes of jobs as they end, weights written beside the loop, and figures."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from plait.evaluation import Evaluated
from plait.job import Job
from plait.spill.announcement import bound_seconds
from plait.spill.export import export
from plait.spill.makespan import Disk
from plait.spill.outcome import Figures, Outcome, Outcomes
from plait.spill.record import Record
from plait.spill.settings import Settings
from plait.spill.store import Store
from plait.spill.task import Task
from plait.units import format_bytes


class Results:
    """Collects them; weights are exported one job at a time, in a thread of its own."""

    def __init__(self, settings: Settings, record: Record) -> None:
        self._settings = settings
        self._record = record
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="plait-export")
        self._outcomes: dict[str, Outcome] = {}
        self._forecast: Figures | None = None
        self._below: Disk | None = None
        self._disk_bytes = 0
        self.store: Store | None = None
        """Where the jobs' state is, once there is one."""
        self.seconds = 0.0
        """How long the loop ran."""
        self.notes: list[str] = []
        """What happened on the way: devices that died, jobs that went back."""

    def expect(self, told: Figures, below: Disk) -> None:
        """Jobs were added that should take this, with such a memory and disk."""
        self._below = below
        self._forecast = told if self._forecast is None else self._forecast + told

    def look(self) -> None:
        """See how much room the store's files have."""
        if self.store is not None:
            self._disk_bytes = max(self._disk_bytes, self.store.statistics().disk_bytes)

    def recall(self, jobs: Sequence[Job]) -> None:
        """Take over outcomes of earlier runs that the directory holds."""
        for job in jobs:
            if (outcome := self._record.outcome(job.name)) is not None:
                self.put(outcome)

    def put(self, outcome: Outcome) -> None:
        """Take over the outcome of a job that does not run."""
        self._outcomes[outcome.name] = outcome

    def take(self, task: Task) -> None:
        """Take down what came of a task that has ended."""
        if task.end == "finished":
            self.export(task)
        else:
            self.put(self._outcome(task))

    def export(self, task: Task) -> None:
        """Have a finished task's weights and outcome written, and its state's room given back."""
        self._writer.submit(self._export, task)

    def finish(self, *, cancel: bool = False) -> None:
        """Wait until all is written; ``cancel`` leaves out what has not begun."""
        self._writer.shutdown(wait=True, cancel_futures=cancel)

    def has_finished(self, names: Sequence[str]) -> bool:
        """Whether nothing of these jobs is left to do."""
        ends = [self._outcomes[name].end if name in self._outcomes else None for name in names]
        return all(end in ("finished", "stopped") for end in ends)

    def _export(self, task: Task) -> None:
        assert self.store is not None, "the run has begun"
        weights = self._settings.weights_of(task.name) if self._settings.export else None
        try:
            # First the outcome, which counts once the weights are there; then what it was made from can go.
            self._record.save(self._outcome(task, weights))
            if weights is not None:
                export(self.store, task.description, task.plan, weights)
            self.store.drop_group(task.name)
        except Exception as error:  # its state stays, and resume tries again
            task.fail(error)
            task.end, weights = "failed", None
        self.put(self._outcome(task, weights))

    def _outcome(self, task: Task, weights: Path | None = None) -> Outcome:
        head = task.head
        assert task.end is not None, f"{task.name} has ended"
        return Outcome(
            name=task.name,
            end=task.end,
            losses=head.losses[: head.step],
            evaluations=tuple(Evaluated(**evaluated) for evaluated in head.evaluations),
            skipped=head.skipped,
            weights=weights,
            error=task.error,
            busy_seconds=task.busy_seconds,
            forecast_seconds=task.plan.forecast.compute_ms * head.step / 1e3,
            job=task.job.to_json(),
        )

    def outcome_of(self, name: str) -> Outcome | None:
        """What came of a job, if that is known already."""
        return self._outcomes.get(name)

    def outcomes(
        self,
        names: Sequence[str],
        tasks: Sequence[Task],
        *,
        memory_bytes: int,
        budget_bytes: int,
        devices: int,
    ) -> Outcomes:
        """All outcomes, in the order of the names, with what was foretold and what was measured."""
        moved = None if self.store is None else self.store.statistics()
        busy = [task.busy_seconds for task in tasks]
        if memory_bytes > budget_bytes:
            self.notes.append(
                f"all processes together held {format_bytes(memory_bytes)} at their peak, "
                f"{format_bytes(memory_bytes - budget_bytes)} more than the {format_bytes(budget_bytes)} of "
                "memory they were given: a job's own code, or this program, took more than when jobs were "
                "measured"
            )
        measured = Figures(
            memory_bytes=memory_bytes,
            disk_bytes=self._disk_bytes,
            read_bytes=0 if moved is None else moved.read_bytes,
            written_bytes=0 if moved is None else moved.written_bytes,
            busy_seconds=sum(busy),
            seconds=self.seconds,
        )
        return Outcomes(
            [self._outcomes[name] for name in names],
            forecast=self._forecast or measured,
            measured=measured,
            bound_seconds=bound_seconds(busy, devices),
            notes=self.notes,
            loads=[task.load for task in tasks if task.load is not None],
            below=self._below,
        )
