"""What a directory knows of its jobs: outcomes of those that finished, commits of those that did not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from plait.destination import not_written
from plait.errors import FileError, UsageError
from plait.job import Job
from plait.spill.disk import ENDING
from plait.spill.group import committed_groups
from plait.spill.manifest import Manifest, name_of
from plait.spill.outcome import Outcome
from plait.spill.settings import Settings


class Record:
    """The files beside a run's state."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._notes: dict[str, dict[str, Any]] = {}

    @cached_property
    def _held(self) -> list[str]:
        """What was there before the run; looked at when the directory is ours."""
        state = self._settings.state
        return committed_groups(state) if state.is_dir() else []

    def check(self, jobs: Sequence[Job]) -> None:
        """Refuse to begin jobs where earlier ones would be lost, or to go on with jobs that have changed."""
        directory, resume = self._settings.path, self._settings.resume
        found = [job.name for job in jobs if self._settings.outcome_of(job.name).exists()]
        if not resume and (self._held or found):
            names = ", ".join(sorted({*self._held, *found})[:5])
            raise FileError(
                f"{directory} holds jobs of an earlier run: {names}",
                setting="resume, directory",
                works="resume=True to go on with them, or another directory",
            )
        for job in jobs:
            if self.trouble(job.name) is not None:
                continue
            text = self.job_of(job.name)
            other = None if text is None else job.differs(text)
            if other is not None:
                field, then, now = other
                raise FileError(
                    f"job {job.name!r} in {directory} was begun with another {field}: {then!r}, now {now!r}",
                    setting=field,
                    works=repr(then),
                )
            outcome = self.outcome(job.name)
            if outcome is not None and job.steps is not None and job.steps > outcome.steps:
                raise UsageError(
                    f"job {job.name!r} has finished after {outcome.steps} steps and keeps no state to go on "
                    f"to {job.steps} from",
                    setting="steps",
                    works=f"{outcome.steps}, or another directory",
                )

    def trouble(self, name: str) -> FileError | None:
        """Why a job cannot go on: what the directory holds of it is damaged."""
        try:
            if self.outcome(name) is None:
                self.note(name)
        except FileError as error:
            return error
        return None

    def job_of(self, name: str) -> str | None:
        """The job of that name as it was begun, as JSON."""
        outcome, note = self.outcome(name), self.note(name)
        if outcome is not None:
            return outcome.job
        return None if note is None else str(note["job"])

    def outcome(self, name: str) -> Outcome | None:
        """What came of a job, if it has finished."""
        file = self._settings.outcome_of(name)
        if not self._settings.resume or not file.exists():
            return None
        outcome = Outcome.load(file)
        return outcome if outcome.weights is None or outcome.weights.exists() else None

    def note(self, name: str) -> dict[str, Any] | None:
        """What the last commit says of a job."""
        if not self._settings.resume or name not in self._held:
            return None
        if name not in self._notes:
            self._notes[name] = dict(Manifest.load(self._settings.state / (name_of(name) + ENDING)).note)
        return self._notes[name]

    def save(self, outcome: Outcome) -> None:
        """Write the outcome of a job that has finished, all of it or nothing."""
        file = self._settings.outcome_of(outcome.name)
        partial = file.with_suffix(".partial")
        try:
            partial.write_text(outcome.to_json())
            partial.replace(file)
        except OSError as error:
            raise not_written(file, error, setting="directory") from None
