"""Jobs under way: a handle by which jobs are added, stopped and cloned while others run, and waited for.

    with Fitting(memory="2GiB", devices=2, directory="runs/first") as fitting:
        fitting.add(jobs)
        fitting.clone("a", name="a-slower", optimizer=Factory("torch.optim:AdamW", lr=1e-4))
        outcomes = fitting.wait()

:func:`plait.spill.fit` is this with one call of ``add``. The first call of ``add`` divides the memory; what
is added later has to fit into that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from plait.errors import FileError, UsageError
from plait.evaluation import Evaluated
from plait.job import Job
from plait.spill.alternator import Alternator
from plait.spill.announcement import announce, foretell
from plait.spill.cloning import cloned, take_over
from plait.spill.device import Device, ScriptStop, in_device
from plait.spill.footprint import Footprint
from plait.spill.installation import Installation
from plait.spill.lock import Lock
from plait.spill.outcome import End, Outcome, Outcomes
from plait.spill.policies import policy
from plait.spill.preparation import Known
from plait.spill.progress import OnEvaluation, OnStep, Show, progress
from plait.spill.record import Record
from plait.spill.results import Results
from plait.spill.selection import Decision
from plait.spill.settings import Settings, as_list, check_jobs
from plait.spill.task import Task
from plait.timeline import Timeline

_LOCK = "run.lock"
Result = TypeVar("Result")


class Fitting:
    """Devices, a store, and the jobs that take turns on them; a context manager that leaves nothing behind.

    Arguments are those of :func:`plait.spill.fit`.
    """

    def __init__(
        self, *, timeline: Timeline | None = None, show: Show = None,
        on_step: OnStep = None, on_evaluation: OnEvaluation = None, **settings: Any,
    ) -> None:  # fmt: skip
        if in_device():  # the script that runs this is being read for the functions of its jobs
            raise ScriptStop
        self.settings = Settings(**settings)
        self.decide: Callable[[Task], Decision] | None = None
        """Asked between the steps of every task, in the loop's thread."""
        self.on_end: Callable[[str, End, Outcome | None], None] | None = None
        """Told of every job that ends, in the loop's thread; with its outcome, unless its weights are to be
        written first."""
        if timeline is not None and not isinstance(timeline, Timeline):
            raise UsageError(f"{timeline!r} is no timeline", setting="timeline", works="plait.Timeline()")
        self._timeline, self._on_step, self._on_evaluation = timeline, on_step, on_evaluation
        self._progress = progress(show)
        self._record = Record(self.settings)
        self._stack = ExitStack()
        self._installation = Installation(self._record, timeline)
        self._alternator: Alternator | None = None
        self._names: list[str] = []
        """Of all jobs, in the order in which they came."""
        self._results = Results(self.settings, self._record)
        self._footprint = Footprint(self._installation.pids, self._installation.shared_bytes)
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="plait-clone")
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._interrupted = False
        self._ended = False

    @property
    def devices(self) -> Sequence[Device]:
        """Those that were started."""
        return self._installation.devices

    # Its life.

    def __enter__(self) -> Self:
        # Before anything in the directory is looked at: what another run is about to write is not known.
        self._stack.callback(Lock(self.settings.path / _LOCK).release)
        self._stack.enter_context(self._progress)
        self._stack.enter_context(self._footprint)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            ended = self._alternator is None or self._over.is_set()
            if not ended:
                self._in_loop(Alternator.halt)
                self._over.wait()
            for device in self.devices:
                device.stop()
            if ended:
                self._finish_all()
            finished = self._results.has_finished(self._names)
            self._installation.close(self.settings, keep=not finished, names=self._names)
            self._finish_all()

    def _finish_all(self) -> None:
        """Wait for what is done beside the loop; once the store is closed, that fails rather than waits."""
        self._copier.shutdown(wait=True, cancel_futures=True)
        self._results.finish(cancel=True)

    # What users do.

    def add(self, jobs: Job | Iterable[Job]) -> None:
        """Have more jobs run; the first call starts the devices and divides the memory.

        All that could be wrong with a job is found here, before it begins. Where what the directory holds of
        a job is damaged, that job alone fails.
        """
        if self._ended or self._over.is_set():
            raise UsageError(
                "this run has ended: nothing can be added to it",
                setting="jobs",
                works="add() before wait(), or another Fitting with resume=True",
            )
        given = as_list(jobs)
        check_jobs(given, self._names)
        if not self._installation.is_started:
            given = self._lend(given)
        self._record.check(given)
        sound = []
        for job in given:
            if (trouble := self._record.trouble(job.name)) is not None:
                self._refuse(job, trouble)
            else:
                sound.append(job)
        self._start([job for job in sound if self._record.outcome(job.name) is None])
        self._names += [job.name for job in given]
        self._results.recall(sound)

    def recall(self, outcome: Outcome) -> None:
        """Have the outcome of an earlier run among those of this one, in place of the job itself."""
        self._names.append(outcome.name)
        self._results.put(outcome)

    def stop(self, name: str) -> None:
        """End a job; its memory and disk are free as soon as the unit that it computes is done.

        A job that has ended stays as it is.
        """
        if self._results.outcome_of(name) is not None:
            return

        def stop(loop: Alternator) -> None:
            if name not in loop.tasks or loop.tasks[name].state != "ended":
                loop.leave(self._found(loop, name), "stopped")

        self._in_loop(stop).result()

    def pause(self, name: str) -> None:
        """Let a job wait when the step that it is at is done; others then have its memory."""
        self._in_loop(lambda loop: setattr(self._found(loop, name), "paused", True)).result()

    def go_on(self, name: str) -> None:
        """Let a job that was paused go on; one that was not, or that has ended, stays as it is."""

        def go_on(loop: Alternator) -> None:
            if name in loop.tasks:
                loop.tasks[name].paused = False

        self._in_loop(go_on).result()

    @property
    def is_over(self) -> bool:
        """Whether nothing runs any more, and nothing can be added."""
        return self._over.is_set()

    def clone(self, source: str, *, name: str, **changes: Any) -> Job:
        """Begin another job from where one stands when its present step ends, with some fields changed.

        The clone has the history and the optimizer's state. So its model, the shapes of its data and its kind
        of optimizer stay the same; learning rates, schedules, seeds and steps may change.
        """
        task = self._in_loop(lambda loop: self._found(loop, source)).result()
        unknown = sorted(changes.keys() - {field.name for field in fields(Job)})
        if unknown:
            known_fields = ", ".join(field.name for field in fields(Job))
            raise UsageError(f"a job has no {unknown[0]!r}", setting="changes", works=known_fields)
        job = replace(task.job, name=name, **changes)
        check_jobs([job], self._names)
        self._record.check([job])
        if self._record.job_of(name) is not None:  # of a run that goes on
            self.add(job)
            return job
        (known,) = self._installation.learn([job], self.settings)
        made = cloned(task, known)
        self._names.append(name)
        self._in_loop(lambda loop: loop.hold(task, partial(self._copy, task, made))).result().result()
        return job

    def steps(self) -> dict[str, int]:
        """How many steps each job has done."""
        if self._alternator is None:
            return {}
        return {name: task.head.step for name, task in list(self._alternator.tasks.items())}

    def wait(self) -> Outcomes:
        """Wait until all jobs have ended.

        Ctrl-C lets every job finish its step and commit it, says how to go on, and then raises
        KeyboardInterrupt; another Ctrl-C ends them at once, at their last commit.
        """
        if self._alternator is not None and not self._over.is_set():
            self._in_loop(lambda loop: setattr(loop, "expects_more", False))
            while not self._over.is_set():
                try:
                    self._over.wait()
                except KeyboardInterrupt:
                    if self._interrupted:
                        raise
                    self.interrupt()
        self._ended = True
        self._copier.shutdown(wait=True)
        self._results.finish()
        if self._failure is not None:
            raise self._failure
        if self._interrupted:
            self._progress.say("stopped; the same call with resume=True goes on")
            raise KeyboardInterrupt
        tasks = [] if self._alternator is None else list(self._alternator.tasks.values())
        return self._results.outcomes(
            self._names,
            tasks,
            memory_bytes=self._footprint.peak_bytes,
            budget_bytes=self.settings.memory_bytes,
            devices=self.settings.devices,
        )

    # How it begins.

    def _lend(self, jobs: list[Job]) -> list[Job]:
        """Let jobs have the cores of devices that would be idle, if that is asked for."""
        before = self.settings.devices
        self.settings, wider = self.settings.lent(jobs)
        if self.settings.devices < before:
            threads = ", ".join(f"{job.name} {job.threads}" for job in wider)
            self.noted(
                f"{len(jobs)} devices have the cores of {before}; threads: {threads}. A job's bits are those "
                "of that many threads"
            )
        return wider

    def _start(self, jobs: Sequence[Job]) -> None:
        """Have jobs run that have not finished."""
        if not jobs:
            return
        known = self._installation.learn(jobs, self.settings)
        if self._alternator is None:
            self._begin(known)
        tasks = self._installation.tasks(known, self.settings, self._refuse)
        self._announce(tasks)
        for task in tasks:
            if task.end == "finished":
                self._results.export(task)
            self._in_loop(partial(Alternator.add, task=task))

    def _refuse(self, job: Job, error: FileError) -> None:
        """A job cannot go on; others can."""
        outcome = Outcome(name=job.name, end="failed", error=str(error), job=job.to_json())
        self._results.put(outcome)
        self.noted(f"job {job.name} cannot go on: {error}")
        if self.on_end is not None:
            self.on_end(job.name, "failed", outcome)

    def _begin(self, known: Sequence[Known]) -> None:
        """Divide the memory, open the store, and start the loop."""
        settings, ground = self.settings, self._installation
        ground.open(known, settings)
        assert ground.store is not None, "it is open"
        assert ground.planner is not None, "the memory is divided"
        self._results.store = ground.store
        self._alternator = Alternator(
            store=ground.store,
            devices=ground.devices,
            revive=ground.revive,
            private_bytes=ground.planner.budget.private_bytes,
            policy=policy(settings.policy),
            listener=self,
            commit_every=settings.commit_every,
            prefetch=settings.prefetch,
            timeline=self._timeline,
        )
        self._alternator.expects_more = True
        threading.Thread(
            target=self._run, args=(self._alternator,), name="plait-alternator", daemon=True
        ).start()

    def _run(self, alternator: Alternator) -> None:
        started = time.monotonic()
        try:
            alternator.run()
        except BaseException as error:
            self._failure = error
        finally:
            self._results.seconds = time.monotonic() - started
            self._over.set()

    def _announce(self, tasks: Sequence[Task]) -> None:
        """Say what is to be expected."""
        planner = self._installation.planner
        assert planner is not None, "the run has begun"
        if tasks:
            for line in announce(tasks, planner.budget, planner.disk):
                self._progress.say(line)
            self._results.expect(foretell(tasks, planner.budget), planner.below)

    # What happens meanwhile.

    def _in_loop(self, action: Callable[[Alternator], Result]) -> Future[Result]:
        """Have something done in the loop's thread."""
        future: Future[Result] = Future()
        alternator = self._alternator
        if alternator is None or self._over.is_set():
            raise UsageError(
                "no job is under way", setting="jobs", works="add() before this, and wait() after"
            )

        def run() -> None:
            try:
                future.set_result(action(alternator))
            except BaseException as error:
                future.set_exception(error)

        alternator.post(run)
        return future

    def _found(self, loop: Alternator, name: str) -> Task:
        task = loop.tasks.get(name)
        if task is None or task.state == "ended":
            running = [name for name, task in loop.tasks.items() if task.state != "ended"]
            raise UsageError(f"no job {name!r} is under way", setting="name", works=", ".join(running))
        return task

    def interrupt(self) -> None:
        """End every job when its step is done, and commit it; ``wait`` then raises KeyboardInterrupt."""
        self._interrupted = True

        def leave(loop: Alternator) -> None:
            for task in list(loop.tasks.values()):
                loop.leave(task, "interrupted")

        self._progress.say(
            "finishing the steps under way; Ctrl-C again ends them at once, at their last commit"
        )
        self._in_loop(leave)

    def _copy(self, source: Task, made: Task, resume: Callable[[], None]) -> Future[None]:
        """Copy a task's state to that of its clone, which then begins; the source waits meanwhile."""
        store = self._installation.store
        assert store is not None, "the run has begun"

        def copy() -> None:
            try:
                take_over(store, source, made)
            finally:
                resume()
            self._in_loop(lambda loop: loop.add(made)).result()

        return self._copier.submit(copy)

    def moved(self, task: Task, where: str) -> None:
        """Show where a task is."""
        self._progress.update(task.row(where))
        self._results.look()

    def stepped(self, task: Task) -> Decision:
        """Between steps a task goes on, unless a selection says otherwise."""
        if self._on_step is not None and task.head.losses:
            self._on_step(task.name, task.head.step, task.head.losses[-1])
        judged = task.head.evaluations[-1] if task.head.evaluations else None
        if self._on_evaluation is not None and judged is not None and judged["step"] == task.head.step:
            self._on_evaluation(task.name, Evaluated(**judged))
        return "continue" if self.decide is None else self.decide(task)

    def ended(self, task: Task) -> None:
        """Take down what came of a task."""
        self._results.take(task)
        if self.on_end is not None and task.end is not None:
            self.on_end(task.name, task.end, self._results.outcome_of(task.name))

    def noted(self, text: str) -> None:
        """Keep and show what a user should know."""
        self._results.notes.append(text)
        self._progress.say(text)
