"""Jobs under way: a handle by which jobs are added, stopped and cloned while others run, and waited for.

    with Fitting(memory="2GiB", devices=2, directory="runs/first") as fitting:
        fitting.add(jobs)
        fitting.clone("a", name="a-slower", optimizer=Factory("torch.optim:AdamW", lr=1e-4))
        outcomes = fitting.wait()

:func:`plait.spill.fit` is this with one call of ``add``. The first call of ``add`` divides the memory; what
is added later has to fit into that.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from plait.cluster.disk import measure_disk
from plait.errors import UsageError
from plait.job import Job
from plait.spill import units
from plait.spill.alternator import Alternator
from plait.spill.announcement import announce, foretell
from plait.spill.cloning import cloned, take_over
from plait.spill.device import Device, ScriptStop, in_device
from plait.spill.export import is_exporting
from plait.spill.footprint import Footprint, private_bytes
from plait.spill.outcome import End, Outcomes
from plait.spill.plan import SpillPlan
from plait.spill.policies import policy
from plait.spill.preparation import MARGIN_BYTES, Known, Planner, Preparation, divide, unit_seconds
from plait.spill.progress import Show, progress
from plait.spill.record import Record
from plait.spill.results import Results
from plait.spill.selection import Decision
from plait.spill.settings import Settings, check_jobs
from plait.spill.sharing import define, group_of
from plait.spill.store import Store
from plait.spill.task import Task
from plait.timeline import Timeline

_DISK_PROBE_BYTES = 64 << 20
Result = TypeVar("Result")


class Fitting:
    """Devices, a store, and the jobs that take turns on them; a context manager that leaves nothing behind.

    Arguments are those of :func:`plait.spill.fit`.
    """

    def __init__(self, *, timeline: Timeline | None = None, show: Show = None, **settings: Any) -> None:
        if in_device():  # the script that runs this is being read for the functions of its jobs
            raise ScriptStop
        self.settings = Settings(**settings)
        self.decide: Callable[[Task], Decision] | None = None
        """Asked between the steps of every task, in the loop's thread."""
        self.on_end: Callable[[str, End], None] | None = None
        """Told of every job that ends, in the loop's thread."""
        self._timeline = timeline
        self._progress = progress(show)
        self._record = Record(self.settings)
        self._stack = ExitStack()
        self.devices: list[Device] = []
        """Those that were started."""
        self._prepared: Preparation | None = None
        self._planner: Planner | None = None
        self._device_bytes = 0
        """What the process of a device may hold of its own."""
        self._store: Store | None = None
        self._alternator: Alternator | None = None
        self._names: list[str] = []
        """Of all jobs, in the order in which they came."""
        self._results = Results(self.settings, self._record)
        self._footprint = Footprint(self._pids, self._shared_bytes)
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="plait-clone")
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._interrupted = False

    # Its life.

    def __enter__(self) -> Self:
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
            self._close()
            self._finish_all()

    def _finish_all(self) -> None:
        """Wait for what is done beside the loop; once the store is closed, that fails rather than waits."""
        self._copier.shutdown(wait=True, cancel_futures=True)
        self._results.finish(cancel=True)

    def _close(self) -> None:
        """Give up the store; what is committed of jobs that have not finished stays."""
        if self._store is None:
            return
        self._store.close(keep=not self._results.has_finished(self._names))
        with suppress(OSError):  # it is not empty
            self.settings.state.rmdir()

    # What users do.

    def add(self, jobs: Job | Sequence[Job]) -> None:
        """Have more jobs run; the first call starts the devices and divides the memory.

        All that could be wrong with a job is found here, before it begins.
        """
        given = [jobs] if isinstance(jobs, Job) else list(jobs)
        check_jobs(given, self._names)
        if self._prepared is None:
            given = self._lend(given)
        self._record.check(given)
        fresh = [job for job in given if self._record.outcome(job.name) is None]
        if fresh:
            known = self._preparation(fresh).learn(fresh)
            if self._planner is None:
                self._begin(known)
            tasks = [self._task(one) for one in known]
            self._announce(tasks)
            for task in tasks:
                if task.end == "finished":
                    self._results.export(task)
                self._in_loop(partial(Alternator.add, task=task))
        self._names += [job.name for job in given]
        self._results.recall(given)

    def stop(self, name: str) -> None:
        """End a job; its memory and disk are free as soon as the unit that it computes is done.

        A job that has ended stays as it is.
        """

        def stop(loop: Alternator) -> None:
            if name not in loop.tasks or loop.tasks[name].state != "ended":
                loop.leave(self._found(loop, name), "stopped")

        self._in_loop(stop).result()

    def pause(self, name: str) -> None:
        """Let a job wait after the unit that it computes; others may have its memory."""
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
        job = replace(task.job, name=name, **changes)
        check_jobs([job], self._names)
        self._record.check([job])
        if self._record.job_of(name) is not None:  # of a run that goes on
            self.add(job)
            return job
        (known,) = self._preparation([job]).learn([job])
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
        self._copier.shutdown(wait=True)
        self._results.finish()
        if self._failure is not None:
            raise self._failure
        if self._interrupted:
            self._progress.say("stopped; the same call with resume=True goes on")
            raise KeyboardInterrupt
        tasks = [] if self._alternator is None else list(self._alternator.tasks.values())
        return self._results.outcomes(
            self._names, tasks, memory_bytes=self._footprint.peak_bytes, devices=self.settings.devices
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

    def _preparation(self, jobs: Sequence[Job]) -> Preparation:
        """With the devices, which are started when they are needed first."""
        if self._prepared is None:
            settings, threads = self.settings, max(job.threads for job in jobs)
            self.devices = [
                Device(i, cores=settings.cores(i), threads=threads) for i in range(settings.devices)
            ]
            for device in self.devices:
                device.start()
            self._prepared = Preparation(self.devices)
        return self._prepared

    def _begin(self, known: Sequence[Known]) -> None:
        """Divide the memory, open the store, and start the loop."""
        settings = self.settings
        # Each device will come to hold what the busiest of them does now: torch, and the models as chains.
        idle = max(private_bytes(device.pid) for device in self.devices)
        own = private_bytes() + settings.devices * idle
        planner = self._planner = divide(
            known,
            [SpillPlan.from_json(note["plan"]) for one in known if (note := self._record.note(one.job.name))],
            memory_bytes=settings.memory_bytes,
            own_bytes=own + (settings.devices + 1) * MARGIN_BYTES,
            devices=settings.devices,
            cores=len(settings.cores(0)),
            disk=measure_disk(settings.path, size_bytes=_DISK_PROBE_BYTES),
        )
        opened = Store.open if settings.resume else Store.create
        self._store = opened(settings.state, memory_bytes=planner.budget.arena_bytes, timeline=self._timeline)
        self._results.store = self._store
        self._device_bytes = idle + planner.budget.private_bytes
        for device in self.devices:
            self._map(device)
        self._alternator = Alternator(
            store=self._store,
            devices=self.devices,
            revive=self._revive,
            private_bytes=planner.budget.private_bytes,
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

    def _map(self, device: Device) -> None:
        """Give a device the memory that it computes in: the arena, and what it has of its own."""
        assert self._store is not None, "there is an arena to map"
        device.map(self._store.arena_fd, self._store.arena_bytes)
        device.call("keep_freed", self._device_bytes)

    def _revive(self, device: Device) -> None:
        """Start a device that has died."""
        device.stop()
        device.start()
        self._map(device)

    def _run(self, alternator: Alternator) -> None:
        started = time.monotonic()
        try:
            alternator.run()
        except BaseException as error:
            self._failure = error
        finally:
            self._results.seconds = time.monotonic() - started
            self._over.set()

    def _task(self, known: Known) -> Task:
        """A job as the loop knows it, with its segments defined; from its last commit where there is one."""
        assert self._planner is not None, "the memory is divided"
        assert self._store is not None, "the store is open"
        job, note = known.job, self._record.note(known.job.name)
        if note is None:
            plan, head = self._planner.plan(known), units.Head(job=job.name)
        else:
            plan, head = SpillPlan.from_json(note["plan"]), units.Head.from_json(note["head"])
            if head.stage == "done" and head.step < known.description.steps:
                head = replace(head, stage="step")
        start = self.settings.weights.get(job.name)
        frozen = any(not parameter.trained for parameter in known.description.parameters)
        task = Task(
            job=job,
            description=replace(known.description, shares=frozen, base=f"{known.description.base} {start}"),
            weights=start,
            plan=plan,
            head=head,
            unit_seconds=unit_seconds(known, plan),
            committed_step=head.step,
        )
        task.shared = group_of(task)
        if is_exporting(note):  # all that is left is to write the rest of its weights
            task.state, task.end = "ended", "finished"
        else:
            define(self._store, task.description, plan)
        return task

    def _announce(self, tasks: Sequence[Task]) -> None:
        """Say what is to be expected."""
        assert self._planner is not None, "the run has begun"
        budget = self._planner.budget
        for line in announce(tasks, budget, self._planner.disk):
            self._progress.say(line)
        self._results.expect(foretell(tasks, budget))

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
        assert self._store is not None, "the run has begun"
        store = self._store

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
        return "continue" if self.decide is None else self.decide(task)

    def ended(self, task: Task) -> None:
        """Take down what came of a task."""
        self._results.take(task)
        if self.on_end is not None and task.end is not None:
            self.on_end(task.name, task.end)

    def noted(self, text: str) -> None:
        """Keep and show what a user should know."""
        self._results.notes.append(text)
        self._progress.say(text)

    def _pids(self) -> list[int]:
        return [device.pid for device in self.devices if device.alive]

    def _shared_bytes(self) -> int:
        """Of the arena, what has been touched."""
        try:
            return 0 if self._store is None else os.fstat(self._store.arena_fd).st_blocks * 512
        except OSError:  # it has just been closed
            return 0
