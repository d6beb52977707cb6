"""Runs the tasks of a run to their end: starts workers, hears them, restarts what fails, stops when asked.

Bounds within which something is noticed: a worker that dies, at once; one that is silent (stopped, or on a
host that was cut off), after ``silence_s``; workers that are alive but make no step, after ``stall_s`` or
twenty times their longest step. A task that failed goes on from its last checkpoint; others do not notice.
"""

from __future__ import annotations

import math
import queue
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from plait.burst.leftover import WORKER_VARIABLE
from plait.burst.phases import RUN_VARIABLE
from plait.engine.asking import Asking
from plait.engine.channel import BEAT_S, Board, Caller, Said
from plait.engine.course import Attempt, Course, Limits
from plait.engine.launcher import Launcher, Worker
from plait.engine.live import View
from plait.engine.record import Record, write_whole
from plait.engine.result import FILE, JobResult, number
from plait.engine.retries import Failure, Retries
from plait.engine.sinks import Sinks
from plait.engine.task import Task
from plait.engine.telling import ATTEMPT_FILE
from plait.engine.worker import EXIT_STOPPED, Situation
from plait.errors import FileError
from plait.units import counted
from plait.worker import Place

_TICK_S = 0.05
_STARTING_S = 180.0
"""Within which a worker that was started says its first word."""
_STALL_STEPS = 20
_HEARING_S = 2.0
"""After the first worker of a task failed, how long the others may take to say why they did."""
_MOST_HEARD = 1000
"""Messages that are taken in at once: a worker that talks without end must not keep others waiting."""
_STOPPING_S = 120.0
"""How long workers may take to come to a checkpoint once they are asked to stop."""


class Supervisor:
    """The tasks of one run under way."""

    def __init__(
        self,
        tasks: Sequence[Task],
        launcher: Launcher,
        record: Record,
        view: View,
        sinks: Sinks,
        *,
        limits: Limits,
        narrow: Callable[[Task, frozenset[str]], Task | None],
        first_attempt: int = 0,
    ) -> None:
        """``narrow(task, devices)`` makes a task for the devices that are left, or None."""
        self._courses = {
            task.name: Course(
                task=task,
                retries=Retries(limits.restarts, first_s=limits.backoff_s),
                attempts=first_attempt,
            )
            for task in tasks
        }
        self._launcher, self._record, self._view, self._sinks = launcher, record, view, sinks
        self._limits, self._narrow = limits, narrow
        self._token, self._name = secrets.token_hex(16), secrets.token_hex(8)
        """What workers show, and by what they know those of this run."""
        self._asking = Asking()
        """Ctrl-C and SIGTERM ask to stop at a checkpoint; a second time, at once."""
        self._asked_s: float | None = None
        self._told_s = -math.inf
        self._unwritten = 0
        """Rows for which the disk had no room."""

    def run(self) -> dict[str, JobResult]:
        """Carry out all tasks; what came of each job."""
        listening = self._launcher.listen()
        self._engine = (self._launcher.reach(), int(listening.getsockname()[1]))
        self._board = Board(listening, self._token)
        try:
            with self._asking.listening():
                while any(course.end is None for course in self._courses.values()):
                    self._record.check_there()
                    self._hear()
                    self._look()
                    if self._asking.count:
                        self._stop()
                    else:
                        self._start()
            return self._results()
        finally:
            for course in self._courses.values():
                self._kill(course)
            self._board.close()
            self._launcher.close()

    @property
    def interrupted(self) -> bool:
        """Whether it was asked to stop before the end."""
        return self._asking.count > 0

    # --- asked to stop --------------------------------------------------------------------------------

    def _stop(self) -> None:
        now = time.monotonic()
        if self._asked_s is None:
            self._asked_s, self._told_s = now, -math.inf
            self._event("stopping", "asked to stop: jobs end at a checkpoint; ask again to end at once")
        late = now - self._asked_s > _STOPPING_S
        again = self._is_due(now)
        for course in self._courses.values():
            if course.end is not None:
                continue
            if course.attempt is None or self._asking.count > 1 or late:
                self._kill(course)
                self._end(course, "stopped")
            elif again:
                self._board.tell(course.task.name, {"stop": True})

    def _is_due(self, now: float) -> bool:
        """Whether it is time to tell workers something again: those that had not begun yet hear it, too."""
        due = now - self._told_s > BEAT_S
        self._told_s = now if due else self._told_s
        return due

    # --- starting -------------------------------------------------------------------------------------

    def _start(self) -> None:
        now = time.monotonic()
        left = [course.task for course in self._courses.values() if course.end is None]
        if all(task.priority == "background" for task in left) and self._is_due(now):
            for task in left:
                self._board.tell(task.name, {"alone": True})
        available: frozenset[str] | None = None
        for course in self._courses.values():
            if course.end is not None or course.attempt is not None or course.not_before_s > now:
                continue
            if any(self._courses[name].end is None for name in course.task.after if name in self._courses):
                continue
            if available is None:
                available = self._launcher.available()
            if self._can_start(course, available, now):
                try:
                    self._begin(course)
                except (FileError, OSError) as error:
                    self._fail(course, Failure(cause="disk", text=str(error)))

    def _can_start(self, course: Course, available: frozenset[str], now: float) -> bool:
        missing = set(course.task.devices) - available
        if not missing:
            course.missing_s = None
            return True
        if course.missing_s is None:
            course.missing_s = now
            self._event("waiting", f"waits for {', '.join(sorted(missing))}, which cannot be had now", course)
        if now - course.missing_s < self._limits.missing_s:
            return False
        task = self._narrow(course.task, available)
        if task is None:
            course.error = (
                f"its devices {', '.join(sorted(missing))} are gone, and it cannot go on without them"
            )
            self._event("failed", course.error, course)
            self._end(course, "failed")
            return False
        before, course.task, course.missing_s = len(course.task.devices), task, None
        self._event("decision", f"goes on with {len(task.devices)} of {before} devices", course)
        return True

    def _begin(self, course: Course) -> None:
        task, number = course.task, course.attempts
        course.attempts += 1
        folder = self._record.task_folder(task.name)
        task.save(folder)
        for name in task.names:
            write_whole(self._record.folder(name) / ATTEMPT_FILE, f"{number}\n")
        address, port = self._launcher.meeting(task.devices[0])
        now = time.monotonic()
        workers: list[Worker] = []
        course.attempt = Attempt(number=number, workers=workers, started_s=now, moved_s=now)
        course.started_s = course.started_s or now
        for rank in range(task.workers):
            cores = task.cores[rank] if rank < len(task.cores) else ()
            if task.kind != "train":
                cores = tuple(sorted({core for each in task.cores for core in each}))
            situation = Situation(
                engine=self._engine,
                token=self._token,
                attempt=number,
                silence_s=self._limits.silence_s,
                cores=cores,
            )
            place = Place(rank=rank, world=task.workers, address=address, port=port)
            workers.append(
                self._launcher.start(
                    [str(folder)],
                    device=task.devices[rank],
                    environment=self._environment(task, place, situation),
                    log=folder / f"rank{rank}.log",
                )
            )
        where = ", ".join(task.devices)
        verb = "restarted" if course.retries.count else "started"
        self._event(verb, f"{task.strategy} on {where}", course, attempt=number)

    def _environment(self, task: Task, place: Place, situation: Situation) -> dict[str, str]:
        own = {**place.environment(), **situation.environment()}
        own |= {RUN_VARIABLE: self._name, WORKER_VARIABLE: secrets.token_hex(8)}
        if task.priority == "foreground" and task.kind == "train":
            own["PLAIT_PUBLISH"] = "foreground"  # so that background work beside it knows when it must wait
        return own

    # --- hearing --------------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Take in what workers have said, so much at a time; waits a moment where nobody has."""
        for count in range(_MOST_HEARD):
            try:
                said = self._board.inbox.get_nowait() if count else self._board.inbox.get(timeout=_TICK_S)
            except queue.Empty:
                return
            course = self._courses.get(said.caller.task)
            attempt = None if course is None else course.attempt
            if course is not None and attempt is not None and attempt.number == said.caller.attempt:
                self._take(course, attempt, said)

    def _take(self, course: Course, attempt: Attempt, said: Said) -> None:
        message = said.message
        if (row := message.get("row")) is not None:
            if "evaluation" not in row:
                attempt.step(row, time.monotonic())
            job = str(row["job"])
            row |= course.facts.get(job, {})
            course.heard.add(job)
            self._keep(row)
            self._sinks.row(row)
            self._view.update(job, row)
        if (facts := message.get("facts")) is not None:
            course.facts |= dict.fromkeys(facts.pop("jobs"), facts)
        if (doing := message.get("doing")) is not None:
            for name in doing["jobs"]:
                self._view.doing(str(name), str(doing["text"]))
        if (event := message.get("event")) is not None:
            self._event(str(event["kind"]), str(event["text"]), course)
        if (name := message.get("result")) is not None:
            course.settled.add(str(name))
        if (error := message.get("error")) is not None:
            attempt.blame(error)

    def _keep(self, row: dict[str, Any]) -> None:
        """Write a row down; a disk that is full for a while must not end what trains."""
        try:
            self._record.step(row)
        except FileError as error:
            if not self._unwritten:
                self._view.event(f"steps are not written down: {error.what}")
            self._unwritten += 1

    # --- looking --------------------------------------------------------------------------------------

    def _look(self) -> None:
        now = time.monotonic()
        for course in self._courses.values():
            attempt = course.attempt
            if attempt is None:
                continue
            codes = [worker.poll() for worker in attempt.workers]
            if all(code == 0 for code in codes):
                self._hear_out(course)
                if left := [
                    name for name in course.expected if course.result(name, self._record.folder(name)) is None
                ]:
                    text = f"its workers ended as if all was done, and left no result of {', '.join(left)}"
                    self._fail(course, attempt.failed("raised", text))
                    continue
                self._kill(course)
                self._end(course, "finished")
            elif all(code in (0, EXIT_STOPPED) for code in codes):
                self._hear_out(course)
                if self._asking.count:
                    self._kill(course)
                    self._end(course, "stopped")
                else:
                    self._fail(course, attempt.failed("killed", "somebody else asked its workers to stop"))
            elif (failure := self._failure(course, attempt, codes, now)) is not None:
                self._fail(course, failure)

    def _hear_out(self, course: Course) -> None:
        """Take in what workers said before they ended, which may still be on its way."""
        until = time.monotonic() + _HEARING_S
        more = True
        while more and time.monotonic() < until:
            more = self._board.connected(course.task.name)  # before hearing: what it said is there by then
            self._hear()
            more = more or not self._board.inbox.empty()

    def _failure(
        self, course: Course, attempt: Attempt, codes: list[int | None], now: float
    ) -> Failure | None:
        bad = [rank for rank, code in enumerate(codes) if code not in (None, 0, EXIT_STOPPED)]
        if bad:
            attempt.ended_s = attempt.ended_s or now
            if attempt.is_unsure and None in codes and now - attempt.ended_s < _HEARING_S:
                return None
            log = self._record.task_folder(course.task.name) / f"rank{bad[0]}.log"
            return attempt.ended(codes, bad[0], log)
        for rank, worker in enumerate(attempt.workers):
            if codes[rank] is not None:
                continue
            speaker = -1 if course.task.priority == "background" else rank
            silent = self._board.silent_s(Caller(task=course.task.name, attempt=attempt.number, rank=speaker))
            if silent is None and now - attempt.started_s > _STARTING_S:
                text = f"rank {rank} on {worker.name} has not begun within {_STARTING_S:g} s"
                return attempt.failed("lost", text)
            if silent is not None and silent > self._limits.silence_s:
                return attempt.unheard(rank, silent, self._limits.silence_s)
        bound = max(self._limits.stall_s, _STALL_STEPS * attempt.longest_s)
        if now - attempt.moved_s > bound and course.task.priority == "foreground":
            return attempt.failed("stalled", f"no step was made for {now - attempt.moved_s:.0f} s")
        return None

    def _fail(self, course: Course, failure: Failure) -> None:
        self._kill(course)
        if self._asking.count:
            self._event("failed", f"{failure.text}, while stopping", course)
            self._end(course, "stopped")
            return
        verdict = course.retries.after(failure)
        if verdict.again_s is None:
            course.error = failure.text
            self._event("failed", f"{failure.text}; {verdict.why}", course)
            self._end(course, "failed")
        else:
            course.not_before_s = time.monotonic() + verdict.again_s
            self._event("broken", f"{failure.text}; {verdict.why}", course, cause=failure.cause)

    # --- ending ---------------------------------------------------------------------------------------

    def _kill(self, course: Course) -> None:
        attempt, course.attempt = course.attempt, None
        if attempt is not None:
            for worker in attempt.workers:
                worker.kill()
            for name in course.task.names:
                self._view.doing(name, "")

    def _end(self, course: Course, end: str) -> None:
        course.end, course.ended_s = end, time.monotonic()
        if end != "failed":
            self._event(
                end,
                f"after {counted(course.retries.count, 'restart')}" if course.retries.count else end,
                course,
            )

    def _results(self) -> dict[str, JobResult]:
        found: dict[str, JobResult] = {}
        for course in self._courses.values():
            seconds = course.ended_s - (course.started_s or course.ended_s)
            if course.task.kind == "search" and course.end != "failed":  # it may have, before it went on
                for name in course.task.names:
                    (self._record.folder(name) / FILE).unlink(missing_ok=True)
            for name in sorted({*course.settled, *course.expected}):
                settled = made = course.result(name, self._record.folder(name))
                if made is None:
                    rows = self._record.rows().get(name, ())
                    losses = tuple(number(row["loss"]) for row in rows if "loss" in row)
                    end: Any = "failed" if course.end == "failed" else "stopped"
                    made = JobResult(
                        name=name, end=end, strategy=course.task.strategy, losses=losses, error=course.error
                    )
                found[name] = replace(made, seconds=seconds, restarts=course.retries.count)
                try:
                    found[name].save(self._record.folder(name))
                    if settled is not None:  # else some steps may be missing among the losses, too
                        self._record.complete(name, settled.losses, settled.evaluations)
                except (OSError, FileError) as error:  # what came of it is told all the same
                    self._view.event(f"{name}: its result is not written down: {error}")
        return found

    def _event(self, kind: str, text: str, course: Course | None = None, **facts: Any) -> None:
        job = None if course is None else course.task.name
        try:
            self._record.event(kind, text, job=job, **facts)
        except FileError as error:  # as with rows: a full disk must not end what trains
            self._view.event(f"this is not written down: {error.what}")
        said = kind if text == kind else f"{kind}: {text}"
        self._view.event(text if job is None else f"{job}: {said}", () if course is None else course.heard)
