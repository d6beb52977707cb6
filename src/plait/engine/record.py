"""A run's directory: what was planned, on what it ran, and what happened, step by step.

    runs/first/
      config.json  plan.json  environment.json      how it was asked for, planned, and on what it ran
      metrics.jsonl  events.jsonl                   a line a step, a line an event
      jobs/<job>/  tasks/<task>/                    what trainers and workers keep
      tensorboard/<job>/  timeline.json  report.html

Lines are added whole and at once, so that a run which is killed at any moment can be read, and gone on with.
One process writes to a directory at a time; any number may read meanwhile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import quote

from plait.destination import make_folder, not_written
from plait.document import fields_of, read_json
from plait.engine.environment import changed, environment
from plait.engine.journal import Journal, lines, plain
from plait.errors import FileError, UsageError
from plait.evaluation import Evaluated
from plait.job import Job
from plait.spill.lock import Lock

FORMAT = "plait.run/1"
CONFIG, PLAN, ENVIRONMENT = "config.json", "plan.json", "environment.json"
METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
TIMELINE, REPORT, TENSORBOARD = "timeline.json", "report.html", "tensorboard"
CLUSTER = "cluster.toml"
"""What it ran on."""
KINDS = ("planned", "started", "restarted", "failed", "finished", "stopped", "resumed", "decision")
"""Of events."""
_LOCK = "lock"
_LONGEST_NAME = 200
"""Of a file; what systems allow is 255 bytes."""
_WORKS = "a directory that plait run made"


class Record:
    """The directory of a run; made by :meth:`create`, gone on with by :meth:`open`, or only :meth:`read`."""

    def __init__(self, directory: Path, lock: Lock | None = None) -> None:
        self.directory = directory
        self._lock = lock
        self._metrics: Journal | None = None
        self._events: Journal | None = None
        self._attempts: dict[str, int] = {}

    @classmethod
    def create(
        cls,
        directory: str | Path,
        *,
        config: Mapping[str, Any],
        plan: Mapping[str, Any],
        jobs: Sequence[Job],
        keep: Callable[[Self], object] | None = None,
    ) -> Self:
        """A directory for a new run, with what is known of it; one that holds a run already is refused.

        ``keep`` writes what else going on with it needs, before the directory counts as a run.
        """
        path = Path(directory)
        make_folder(path, setting="directory")
        record = cls(path, _locked(path))
        try:
            cls.check_free(path)
            _write(path / PLAN, plan)
            _write(path / ENVIRONMENT, environment())
            for job in jobs:
                record.folder(job.name)
            if keep is not None:
                keep(record)
            made = {
                "format": FORMAT,
                "created": time.time(),
                "config": config,
                "jobs": [json.loads(job.to_json()) for job in jobs],
            }
            _write(path / CONFIG, made)  # the last: what has it is a run
            record._begin()
        except BaseException:
            record.close()
            raise
        return record

    @staticmethod
    def check_free(path: Path) -> None:
        """Refuse a directory that holds a run."""
        there = [name for name in (CONFIG, METRICS, EVENTS) if (path / name).exists()]
        if there:
            raise FileError(
                f"{path} holds a run already: it has {there[0]}",
                setting="directory",
                works="resume to go on with it, or another directory",
            )

    def check_there(self) -> None:
        """Refuse to go on once the directory is gone: what is trained would be kept nowhere."""
        try:
            (self.directory / CONFIG).stat()
        except (FileNotFoundError, NotADirectoryError):
            raise FileError(
                f"{self.directory} is gone: it was deleted or moved while its jobs were training",
                setting="directory",
                works="a new run, or --resume with the place that it was moved to",
            ) from None
        except OSError:  # a file server that does not answer for a moment: whoever writes next is told
            return

    @classmethod
    def open(cls, directory: str | Path) -> Self:
        """A run to go on with; refused while another process has it."""
        record = cls.read(directory)
        record._lock = _locked(record.directory)
        try:
            record._begin()
            now = plain(environment())
            found = changed(record.environment, now)
            if found:
                record.event("resumed", f"not all is as it was: {'; '.join(found)}")
                _write(record.directory / ENVIRONMENT, now)
        except BaseException:
            record.close()
            raise
        return record

    @classmethod
    def read(cls, directory: str | Path) -> Self:
        """A run to look at, also while another process writes it."""
        path = Path(directory)
        if not (path / CONFIG).is_file():
            raise FileError(f"{path} holds no run: it has no {CONFIG}", setting="directory", works=_WORKS)
        record = cls(path)
        record._config()
        return record

    def _begin(self) -> None:
        self._metrics = Journal(self.directory / METRICS)
        self._events = Journal(self.directory / EVENTS)

    def close(self) -> None:
        """Write no more, and let the next one in."""
        for journal in (self._metrics, self._events):
            if journal is not None:
                journal.close()
        self._metrics = self._events = None
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- what it is ----------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The run's name: its directory's."""
        return self.directory.resolve().name

    @property
    def config(self) -> dict[str, Any]:
        """How the run was asked for."""
        return cast("dict[str, Any]", self._config()["config"])

    @property
    def jobs(self) -> list[Job]:
        """What was to be trained."""
        return [Job.from_json(json.dumps(job)) for job in self._config()["jobs"]]

    @property
    def asked(self) -> dict[str, dict[str, Any]]:
        """The same by name, as plain data: nothing of the jobs' own code is needed to read it."""
        return {str(job.get("name")): job for job in self._config()["jobs"] if isinstance(job, dict)}

    @property
    def created(self) -> float:
        """When the run was made, in Unix seconds."""
        return float(self._config()["created"])

    @property
    def plan(self) -> dict[str, Any]:
        """What was planned, as :meth:`plait.strategy.WorkloadPlan.to_json` has it."""
        return self._object(PLAN)

    @property
    def environment(self) -> dict[str, Any]:
        """What it ran on, lastly."""
        return self._object(ENVIRONMENT)

    def _object(self, name: str) -> dict[str, Any]:
        found = read_json(self.directory / name, works=_WORKS, setting="directory")
        if not isinstance(found, dict):
            raise FileError(f"{self.directory / name} is no object", setting="directory", works=_WORKS)
        return found

    def _config(self) -> dict[str, Any]:
        file = self.directory / CONFIG
        found = fields_of(self._object(CONFIG), format=FORMAT, source=str(file))
        for field, kind in (("config", dict), ("jobs", list), ("created", (int, float))):
            if not isinstance(found.get(field), kind):
                raise FileError(f"{file}: field {field!r} is missing", setting=field, works=_WORKS)
        return found

    # --- where things are ----------------------------------------------------------------------------

    def folder(self, job: str) -> Path:
        """Where a job keeps its checkpoint and its weights."""
        return self._folder("jobs", job)

    def task_folder(self, task: str) -> Path:
        """Where the workers of a task find it, and what they print."""
        return self._folder("tasks", task)

    def _folder(self, kind: str, name: str) -> Path:
        found = self.directory / kind / file_name(name)
        if self._lock is not None:
            try:
                found.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise not_written(found, error, setting="directory") from None
        return found

    # --- what happens --------------------------------------------------------------------------------

    def step(self, row: Mapping[str, Any]) -> bool:
        """Add what came of a step, or an evaluation; False for one of an attempt that was given up before."""
        assert self._metrics is not None, "a record that is only read"
        job, step, attempt = row.get("job"), row.get("step"), row.get("attempt", 0)
        if not isinstance(job, str) or not _whole(step) or not _whole(attempt):
            raise UsageError(
                f"a row with job {job!r}, step {step!r} and attempt {attempt!r}",
                setting="row",
                works="{'job': 'gpt', 'step': 0, 'attempt': 0, 'loss': 1.0, 'seconds': 0.1}",
            )
        # What a worker sent before it was given up on may be read after its successor has begun.
        if attempt < self._attempts.get(job, attempt):
            return False
        self._attempts[job] = attempt
        self._metrics.add({"time": time.time(), **row})
        return True

    def complete(self, job: str, losses: Sequence[float], evaluations: Sequence[Evaluated] = ()) -> None:
        """Add the steps that nobody told of: a worker may die between its checkpoint and its word."""
        told = {row["step"] for row in self.rows().get(job, ())}
        attempt = self._attempts.get(job, 0)
        for step, loss in enumerate(losses):
            if step not in told:
                self.step({"job": job, "step": step, "attempt": attempt, "loss": loss})
        judged = {row["step"] for row in self.evaluations().get(job, ())}
        for each in evaluations:
            if each.step - 1 not in judged:
                self.step({"job": job, "step": each.step - 1, "attempt": attempt, "evaluation": each.figures})

    def event(self, kind: str, text: str, *, job: str | None = None, **facts: Any) -> None:
        """Add something that happened; ``kind`` is one of :data:`KINDS`."""
        assert self._events is not None, "a record that is only read"
        of = {} if job is None else {"job": job}
        self._events.add({"time": time.time(), "kind": kind, **of, "text": text, **facts})

    # --- what happened -------------------------------------------------------------------------------

    def history(self) -> list[dict[str, Any]]:
        """Every row in the order in which they came, those of attempts that were given up too."""
        rows = lines(self.directory / METRICS)
        return [row for row in rows if isinstance(row.get("job"), str) and _whole(row.get("step"))]

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """By job, the steps in order; of one that was taken again, the last."""
        return latest(self.history())

    def evaluations(self) -> dict[str, list[dict[str, Any]]]:
        """By job, the rows that have an evaluation, in the order of their steps."""
        return latest(self.history(), evaluations=True)

    def events(self) -> list[dict[str, Any]]:
        """All that happened, in order."""
        return [event for event in lines(self.directory / EVENTS) if isinstance(event.get("kind"), str)]


def latest(
    history: Sequence[Mapping[str, Any]], *, evaluations: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """By job, the last row of each step, in the order of steps: those with a loss, or with an evaluation."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row in history:
        is_step = "loss" in row or "evaluation" not in row
        if isinstance(row.get("evaluation"), Mapping) if evaluations else is_step:
            found.setdefault(row["job"], {})[row["step"]] = dict(row)
    return {job: [steps[step] for step in sorted(steps)] for job, steps in found.items()}


def file_name(name: str) -> str:
    """What the folder of a job or a task is called: its name, odd characters written as ``%2F``."""
    quoted = quote(name, safe=" ()+,=@[]")
    if quoted.startswith("."):
        quoted = "%2E" + quoted[1:]
    if not 0 < len(quoted) <= _LONGEST_NAME:
        raise UsageError(
            f"a folder cannot be called {name[:80]!r}, {len(quoted)} characters",
            setting="name",
            works=f"1 to {_LONGEST_NAME} characters",
        )
    return quoted


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _locked(directory: Path) -> Lock:
    try:
        return Lock(directory / _LOCK)
    except OSError as error:
        raise not_written(directory, error, setting="directory") from None


def _write(path: Path, data: Mapping[str, Any]) -> None:
    """Write a file of plain data, all of it or nothing."""
    write_whole(path, json.dumps(plain(data), indent=1, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file, all of it or nothing: a disk that is full keeps what was there, and nothing beside it."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise not_written(path, error, setting="directory") from None
