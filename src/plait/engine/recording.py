"""What a worker did, as a timeline in its task's folder; it is written when the worker ends.

    tasks/gpt/timeline-0-1.json         attempt 0, rank 1, times in Unix milliseconds

A worker has two kinds of tracks. The one of its device has the steps, and what came between them
(evaluations, checkpoints); beside it ``node0/1: start`` says how long it took to begin. These spans bear
their attempt. The others are the strategy's own, such as ``node0/1: stage1``, in all detail but of the latest
steps only: a ring of fixed size holds them. A step costs a few microseconds; a worker that is killed leaves
nothing here, and its steps are in the run's metrics.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plait.engine.record import write_whole
from plait.engine.task import Task
from plait.job import Job
from plait.timeline import Span, Timeline

if TYPE_CHECKING:
    from plait.progress import Step

KEPT, _STEPS = 4_096, 8_192
"""Of a strategy's own spans the latest so many are held, and of steps."""
_FILE = re.compile(r"timeline-(\d+)-(\d+)\.json")
START = "start"
"""From a worker's first line of code to its first step."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A timeline that a worker left, and whose it is."""

    task: str
    attempt: int
    rank: int
    timeline: Timeline

    @classmethod
    def files(cls, folder: Path) -> list[tuple[Path, int, int]]:
        """Those in the folder of a task, each with its attempt and its rank."""
        found = [(file, _FILE.fullmatch(file.name)) for file in folder.glob("timeline-*.json")]
        return sorted((file, int(match[1]), int(match[2])) for file, match in found if match is not None)


class Recording:
    """What one worker does, from now on."""

    def __init__(self, task: Task, folder: Path, *, attempt: int, rank: int) -> None:
        self._task, self._folder, self._attempt, self._rank = task, folder, attempt, rank
        behind = " (background)" if task.priority == "background" else ""
        self._tracks = [f"{device}{behind}" for device in task.devices]  # as the plan's timeline has them
        self._begun_ns: int | None = time.perf_counter_ns()
        self._steps = Timeline(capacity=_STEPS)
        self.details = Timeline(capacity=KEPT)
        """For the strategy to record on."""

    def follow(
        self, job: Job, should_stop: Callable[[int], bool], on_step: Callable[[Step], None] | None
    ) -> tuple[Callable[[int], bool], Callable[[Step], None]]:
        """Both functions for a trainer: it asks the first where a step ends, then evaluates and saves where
        that is due, and tells the second."""
        clock = self._steps.clock
        ended_ns = asked_ns = 0
        stops = False

        def asked(done: int) -> bool:
            nonlocal ended_ns, asked_ns, stops
            ended_ns = clock()
            stops = should_stop(done)
            asked_ns = clock()
            return stops

        def told(step: Step) -> None:
            self._step(job, step, ended_ns)
            if due := _due(job, step.step + 1, self._task.save_every, stops):
                self._record(" and ".join(due), asked_ns, clock())
            if on_step is not None:
                on_step(step)

        return asked, told

    def _step(self, job: Job, step: Step, ended_ns: int) -> None:
        begun_ns = ended_ns - round(1e9 * step.seconds)
        if self._begun_ns is not None:
            # On a track of its own: a device that waits for its worker to begin is not busy.
            track, when = f"{self._tracks[self._rank]}: {START}", (min(self._begun_ns, begun_ns), begun_ns)
            where = {"job": job.name, "tracks": " | ".join(self._tracks)}
            self._steps.record(track, START, *when, **where, attempt=self._attempt)
            self._begun_ns = None
        self._record(job.name, begun_ns, ended_ns, step=step.step)

    def _record(self, name: str, start_ns: int, end_ns: int, **info: int) -> None:
        track = self._tracks[self._rank]
        self._steps.record(track, name, start_ns, end_ns, **info, attempt=self._attempt)

    def save(self) -> None:
        """Write it by the time of day, on which hosts agree as well as their clocks are set."""
        try:
            whole = self._whole()
            if whole.spans:
                file = self._folder / f"timeline-{self._attempt}-{self._rank}.json"
                write_whole(file, json.dumps(whole.to_json()) + "\n")
        except Exception as error:  # whatever it is, a job that is done must not have failed by it
            with suppress(OSError, ValueError):
                print(f"plait.engine.worker: no timeline is left: {error}", file=sys.stderr, flush=True)

    def _whole(self) -> Timeline:
        offset_ms = 1e3 * time.time() - time.perf_counter_ns() / 1e6
        name = self._task.name if self._task.kind != "train" else self._task.devices[self._rank]
        spans = [span.moved(offset_ms) for span in self._steps.spans]
        spans += [span.moved(offset_ms, to_track=f"{name}: {span.track}") for span in self.details.spans]
        return Timeline.of(spans, dropped=self._steps.dropped + self.details.dropped)


def is_of_steps(span: Span) -> bool:
    """Whether a span is one of steps and what is between them, not one of a strategy's details."""
    return "attempt" in span.info


def tracks_of(starts: Iterable[Span]) -> dict[tuple[str, int | None], tuple[str, ...]]:
    """By job and attempt, the tracks of the devices that it ran on."""
    found = (span.info for span in starts if span.name == START and "tracks" in span.info)
    return {
        (str(info["job"]), int(str(info["attempt"]))): tuple(str(info["tracks"]).split(" | "))
        for info in found
    }


def _due(job: Job, done: int, save_every: int | None, stops: bool) -> list[str]:
    """What follows a step, as :meth:`plait.progress.Progress.advance` has it."""
    last = done == job.steps
    found = []
    if job.evaluation is not None and (last or (job.evaluation.every and not done % job.evaluation.every)):
        found.append("evaluation")
    if last or stops or (save_every and not done % save_every):
        found.append("checkpoint")
    return found
