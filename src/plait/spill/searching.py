"""Model selection over jobs that take turns: trials begin, pause, go on and are given up as they compare.

What was asked of the selection and told to it is written down as it happens. A selection is pure, so the
same calls bring it to the same state: a search that was killed goes on where it was, and one that is over
gives its outcomes again.
"""

from __future__ import annotations

import json
import os
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from plait.errors import FileError, UsageError
from plait.job import Job
from plait.spill.handle import Fitting
from plait.spill.outcome import End, Outcome, Outcomes
from plait.spill.selection import DECISIONS, Decision, Selection
from plait.spill.task import Task
from plait.units import parse_whole

LOG = "selection.jsonl"
_OUTCOME = "outcome"


def search(
    selection: Selection, *, at_once: int | None = None, metric: str = "loss", **settings: Any
) -> Outcomes:
    """Run the trials of a selection until it is done; ``selection.best`` is the best of them.

    Trials are compared by what their evaluation says (``metric`` is ``"loss"`` or one of its metrics), or by
    the loss of their steps where the job has no evaluation. A trial that is given up frees its memory and
    disk at once; one that is paused waits on disk.

    Args:
        at_once: Trials under way at a time; by default two for each device.
        settings: As for :func:`plait.spill.fit`. With ``resume=True``, give a selection made like the first;
            where the search is over already, its outcomes are returned again.
    """
    with ExitStack() as after, Fitting(**settings) as fitting:
        count = 2 * fitting.settings.devices if at_once is None else parse_whole(at_once, setting="at_once")
        driver = _Driver(selection, fitting, metric, after)
        fitting.decide, fitting.on_end = driver.decide, driver.ended
        try:
            while not fitting.is_over and driver.fill(count):
                driver.wait()
            driver.finish()
        except KeyboardInterrupt:
            fitting.interrupt()
        return fitting.wait()


class _Driver:
    """Between a selection and a fitting: the loop's thread reports, the caller's thread adds."""

    def __init__(self, selection: Selection, fitting: Fitting, metric: str, after: ExitStack) -> None:
        """``after`` is left when the fitting is over, and nobody reports any more."""
        evaluation = selection.job.evaluation
        known = ["loss", *(evaluation.metrics if evaluation is not None else ())]
        if metric not in known:
            raise UsageError(f"trials report no {metric!r}", setting="metric", works=", ".join(known))
        self._selection = selection
        self._fitting = fitting
        self._metric = metric
        self._lock = threading.Condition()
        self._news = False
        self._added: set[str] = set()
        self._log = _Log(fitting.settings.path / LOG, resume=fitting.settings.resume)
        after.callback(self._log.close)
        self._ended = self._log.replay(selection)
        """Trials of an earlier run that were stopped or failed."""
        for outcome in self._ended.values():
            fitting.recall(outcome)

    # In the caller's thread.

    def fill(self, count: int) -> bool:
        """Have as many trials under way as there should be; False when the selection is done."""
        with self._lock:
            self._news = False
            stopped = self._selection.given_up()
            begin = self._begin(count)
            done = self._selection.done
        fresh = [job for job in begin if job.name not in self._added]
        if fresh:
            self._added |= {job.name for job in fresh}
            self._fitting.add(fresh)
        for job in begin:
            if job not in fresh:
                self._fitting.go_on(job.name)
        for name in stopped:
            if name in self._added:
                self._fitting.stop(name)
        return not done

    def _begin(self, count: int) -> list[Job]:
        # Of a search that goes on, all but those whose end was written down: what was paused is to come to
        # the same step again, and what has finished may not have been exported.
        known = {*self._added, *self._ended}
        begin = {name: trial.job for name, trial in self._selection.trials.items() if name not in known}
        while sum(trial.state == "running" for trial in self._selection.trials.values()) < count:
            job = self._selection.next()
            if job is not None and job.name not in known and job.name not in begin:
                self._check(job)
            self._log.write("next", None if job is None else job.name)
            if job is None:
                break
            begin[job.name] = job
        return list(begin.values())

    def _check(self, job: Job) -> None:
        """Refuse a new trial that has an outcome already: nothing would be reported of it."""
        file = self._fitting.settings.outcome_of(job.name)
        if file.exists():
            raise FileError(
                f"{file} is of a trial that {self._log.path} does not know",
                setting="directory",
                works="another directory, or the log of that search beside its outcomes",
            )

    def wait(self) -> None:
        """Wait until something has been reported."""
        with self._lock:
            while not self._news:
                self._lock.wait(0.5)  # so that Ctrl-C gets through
                if self._fitting.is_over:
                    return

    def finish(self) -> None:
        """The selection is done: what is still paused will not go on."""
        for name, trial in self._selection.trials.items():
            if trial.state != "finished" and name in self._added and not self._fitting.is_over:
                self._fitting.stop(name)

    # In the loop's thread.

    def decide(self, task: Task) -> Decision:
        """What becomes of a trial between two steps."""
        head = task.head
        if task.job.evaluation is not None:
            if not head.evaluations:
                return "continue"
            last = head.evaluations[-1]
            step = int(last["step"])
            value = float(last["loss"] if self._metric == "loss" else last["metrics"][self._metric])
        elif head.losses:
            step, value = head.step, head.losses[-1]
        else:
            return "continue"
        with self._lock:
            trial = self._selection.trials[task.name]
            if step < trial.step:
                return "continue"  # gone back: this is known
            if step == trial.step:
                return DECISIONS[trial.state]
            self._log.write("report", task.name, step, value)
            decision = self._selection.report(task.name, step, value)
            self._tell()
        return decision

    def ended(self, name: str, end: End, outcome: Outcome | None) -> None:
        """A trial has ended; one that failed is not waited for."""
        with self._lock:
            if end == "failed" and name in self._selection.trials:
                self._log.write("fail", name)
                self._selection.fail(name)
            if outcome is not None and end in ("stopped", "failed"):
                self._log.write(_OUTCOME, json.loads(outcome.to_json()))
            self._tell()

    def _tell(self) -> None:
        self._news = True
        self._lock.notify_all()


class _Log:
    """The calls of a selection, in their order, and what came of trials that were given up: lines of JSON."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        if not resume and path.exists():
            raise FileError(
                f"{path.parent} holds a search of an earlier run",
                setting="resume, directory",
                works="resume=True to go on with it, or another directory",
            )
        self._file = path.open("a+", encoding="ascii")

    def replay(self, selection: Selection) -> dict[str, Outcome]:
        """Bring a selection to where the log ends; its last line may be cut short."""
        self._file.seek(0)
        whole, outcomes = 0, {}
        for line in self._file.read().splitlines(keepends=True):
            if not line.endswith("\n"):
                break
            whole += len(line)
            call, *args = json.loads(line)
            if call == "next":
                job = selection.next()
                name = None if job is None else job.name
                if name != args[0]:
                    raise FileError(
                        f"{self.path} is of another selection: trial {args[0]!r} was next, now {name!r} is",
                        setting="selection",
                        works="the same job, space, rules, sampler and seed",
                    )
            elif call == _OUTCOME:
                outcome = Outcome.from_json(args[0], folder=self.path.parent)
                outcomes[outcome.name] = outcome
            else:
                getattr(selection, call)(*args)
        self._file.truncate(whole)
        return outcomes

    def write(self, *call: Any) -> None:
        """Write down a call before it takes effect."""
        self._file.write(json.dumps(call) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Nothing more happens."""
        self._file.close()
