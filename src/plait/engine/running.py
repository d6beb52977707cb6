"""One call that trains a whole workload: plans it, shows the plan, runs it, and writes down what came of it.

    import plait

    done = plait.run([gpt, sweep, small], directory="runs/first")
    print(done["gpt"].losses[-1], done.report)

What is to run where is decided by :func:`plait.strategy.plan`; each job, or the call, may ask for a strategy
by name. Jobs train in processes of their own (:mod:`plait.engine.worker`), and go on from their checkpoints
where one fails, or where the whole run was stopped: ``plait.run(resume="runs/first")``.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from plait.cluster import Cluster
from plait.engine import expectation
from plait.engine.assignment import Manner, tasks_of
from plait.engine.course import Limits
from plait.engine.emit import Kind, Surroundings, emit
from plait.engine.launcher import Launcher
from plait.engine.live import View
from plait.engine.preparing import (
    EngineName,
    check,
    check_placed,
    compressed,
    launcher_of,
    narrow,
    new_directory,
    planned,
    told,
    unfinished,
)
from plait.engine.record import CLUSTER, Record
from plait.engine.refusal import check_kinds, check_unchanged
from plait.engine.report import report
from plait.engine.result import JobResult
from plait.engine.sinks import Sink, Sinks, chosen
from plait.engine.supervisor import Supervisor
from plait.engine.task import FILE, SELECTION, Compress, Task
from plait.engine.telling import ATTEMPT_FILE
from plait.engine.worker import ATTEMPT
from plait.engine.workload import Workload, being_read
from plait.errors import FileError, UsageError
from plait.job import Job, Strategy
from plait.spill.progress import Show
from plait.spill.selection import Selection
from plait.strategy.workload import Objective, WorkloadPlan
from plait.units import counted, parse_bytes

_MAX_SLOWDOWN = 1.05


@dataclass(frozen=True, kw_only=True, repr=False)
class Run(Mapping[str, JobResult]):
    """What came of a run: by job, its result."""

    directory: Path
    plan: WorkloadPlan | None
    """None where a run was gone on with: its directory has the plan."""
    results: Mapping[str, JobResult]
    report: Path | None
    """A page on all of it; None of a run that was only planned."""
    interrupted: bool = False
    """Whether it was asked to stop before the end; it can be gone on with."""

    def __getitem__(self, name: str) -> JobResult:
        if name not in self.results:
            raise UsageError(f"there is no job {name!r}", setting="name", works=", ".join(self.results))
        return self.results[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r}: {'; '.join(map(str, self.values()))})"

    @property
    def finished(self) -> bool:
        """Whether all jobs have."""
        return all(
            result.finished or (result.end == "stopped" and not self.interrupted) for result in self.values()
        )


def run(
    jobs: Job | Selection | Iterable[Job | Selection] | None = None,
    cluster: Cluster | None = None,
    engine: EngineName | Launcher = "local",
    *,
    directory: str | Path | None = None,
    resume: str | Path | None = None,
    dry_run: bool = False,
    write: Kind | None = None,
    strategy: Strategy = "auto",
    compress: Compress = None,
    objective: Objective = "makespan",
    devices: int | None = None,
    memory: str | int | None = None,
    save_every: int | None = None,
    max_slowdown: float = _MAX_SLOWDOWN,
    limits: Limits | None = None,
    sinks: Sequence[str | Sink] = ("tensorboard",),
    profiles: str | Path | None = None,
    show: Show = None,
) -> Run:
    """Train jobs and sweeps, and return what came of each.

    Args:
        jobs: One or several; a sweep is a :class:`plait.spill.Selection`.
        cluster: What there is to train on; None is this machine, or with Ray the cluster's nodes.
        engine: ``"local"`` starts processes here, ``"ray"`` actors on a Ray cluster; or a launcher.
        directory: Of this run; None is a new one under ``runs``.
        resume: The directory of a run to go on with; only engine, limits, sinks and show may be given then.
        dry_run: Plan, print the plan, and stop there.
        write: Plan, and write files by which Slurm, Kubernetes or torchrun start the same workers.
        strategy: For jobs that leave it open: ``"auto"`` takes the fastest that fits.
        compress: Bits of gradients on the wire (1 to 8, or ``"auto"``) wherever several devices share them;
            None is what the plan picks.
        objective: See :func:`plait.plan`.
        devices: How many of them to use, and ``memory`` how much each has.
        save_every: Steps between checkpoints; None saves about every 30 seconds.
        max_slowdown: What a step in the foreground may take beside background jobs, of what it takes alone.
        limits: When something is taken for broken, and how often it is tried again.
        sinks: Where numbers go besides the directory: ``"tensorboard"``, ``"wandb"``, ``"mlflow"``.
        profiles: Where measured profiles are kept; None is the user's cache.
        show: None shows a table on a terminal and lines elsewhere; False nothing; a function gets the lines.
    """
    if (file := being_read.get()) is not None or ATTEMPT in os.environ:
        who = (
            "a worker reads a script for the functions of" if file is None else f"plait run reads {file} for"
        )
        raise UsageError(
            f"plait.run is called where {who} its jobs",
            setting="script",
            works="what runs jobs under: if __name__ == '__main__'",
        )
    check_kinds(
        cluster=cluster, limits=limits, max_slowdown=max_slowdown, directory=directory, profiles=profiles,
        sinks=sinks, devices=devices,
    )  # fmt: skip
    limits = limits or Limits()
    if resume is not None:
        check_unchanged(
            resume, jobs=jobs, cluster=cluster, directory=directory, dry_run=dry_run, write=write,
            strategy=strategy != "auto", compress=compress, objective=objective != "makespan",
            devices=devices, memory=memory, save_every=save_every,
            max_slowdown=max_slowdown != _MAX_SLOWDOWN, profiles=profiles,
        )  # fmt: skip
        return _go_on(Path(resume), engine, limits, sinks, show)
    if jobs is None:
        raise UsageError("there are no jobs to run", setting="jobs", works="plait.run([job])")
    check(strategy, compress, save_every, engine, write, max_slowdown)
    memory_bytes = None if memory is None else parse_bytes(memory, setting="memory")
    manner = Manner(save_every=save_every, max_slowdown=max_slowdown, memory_bytes=memory_bytes)
    return _set_out(
        Workload.of(jobs),
        _Asked(
            strategy=strategy, compress=compress, objective=objective, manner=manner, dry_run=dry_run,
            write=write, limits=limits, sinks=sinks, profiles=profiles, show=show,
        ),
        engine, cluster, devices, directory,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """How a new run was asked for."""

    strategy: Strategy
    compress: Compress
    objective: Objective
    manner: Manner
    dry_run: bool
    write: Kind | None
    limits: Limits
    sinks: Sequence[str | Sink]
    profiles: str | Path | None
    show: Show

    def config(self, engine: EngineName | Launcher, devices: int | None) -> dict[str, object]:
        """As it is written down."""
        return {
            "engine": engine if isinstance(engine, str) else type(engine).__name__,
            "strategy": self.strategy,
            "compress": self.compress,
            "objective": self.objective,
            "devices": devices,
            "memory": self.manner.memory_bytes,
            "save_every": self.manner.save_every,
            "max_slowdown": self.manner.max_slowdown,
        }


def _set_out(
    workload: Workload,
    asked: _Asked,
    engine: EngineName | Launcher,
    cluster: Cluster | None,
    devices: int | None,
    directory: str | Path | None,
) -> Run:
    """Plan a workload, show the plan, and carry it out."""
    if directory is not None:
        return _set_out_in(Path(directory), workload, asked, engine, cluster, devices)
    place = new_directory(workload, claim=not asked.dry_run)
    try:
        return _set_out_in(place, workload, asked, engine, cluster, devices)
    finally:
        with suppress(OSError):  # it holds a run, or was never made; what is empty was made for it
            place.rmdir()
            place.parent.rmdir()


def _set_out_in(
    place: Path,
    workload: Workload,
    asked: _Asked,
    engine: EngineName | Launcher,
    cluster: Cluster | None,
    devices: int | None,
) -> Run:
    Record.check_free(place)
    chosen(asked.sinks, place / "tensorboard")  # refused, if they are, before anything is done
    starts = not asked.dry_run and asked.write is None
    launcher, known = launcher_of(engine, cluster, devices, asked.manner.memory_bytes, place, starts=starts)
    with closing(launcher):
        view = View(asked.show)
        if (earlier := unfinished(place, workload)) is not None:
            view.event(
                f"{earlier} has not finished, and this is a new run; to go on: plait run --resume {earlier}"
            )
        view.event(f"planning for {counted(len(known.devices), 'device')}")
        made = planned(workload, known, asked.strategy, asked.objective, asked.profiles, view.event)
        check_placed(made)
        jobs = {job.name: job for job in workload.jobs}
        tasks = compressed(tasks_of(made, jobs, workload.sweeps, asked.manner), asked.compress)
        # A plan is what a dry run is for, so it goes where output goes, and not to where progress is shown.
        aloud = asked.dry_run and asked.show is None
        say: Callable[[str], object] = print if aloud else view.event
        for text in told(made, tasks):
            say(text)
        if asked.dry_run:
            return Run(directory=place, plan=made, results={}, report=None)

        def keep(record: Record) -> None:
            """What going on needs, also of tasks whose turn does not come before this run is stopped."""
            known.save(place / CLUSTER)
            for name, selection in workload.sweeps.items():
                (record.task_folder(name) / SELECTION).write_bytes(pickle.dumps(selection))
            for task in tasks:
                task.save(record.task_folder(task.name))

        every = [*workload.jobs, *(selection.job for selection in workload.sweeps.values())]
        config = asked.config(engine, devices)
        with Record.create(place, config=config, plan=made.to_json(), jobs=every, keep=keep) as record:
            record.event("planned", made.why)
            if asked.write is None:
                return _carry_out(tasks, made, known, launcher, record, view, asked.limits, asked.sinks)
            for file in _written(tasks, asked.write, place, known):
                view.event(f"written: {file}")
            return Run(directory=place, plan=made, results={}, report=None)


def _written(tasks: Sequence[Task], kind: Kind, place: Path, cluster: Cluster) -> list[Path]:
    """Files by which others start the workers of tasks."""
    given = Surroundings(
        python=sys.executable if kind == "torchrun" else "python",
        gpu=any(device.kind == "cuda" for device in cluster.devices),
    )
    return [file for task in tasks for file in emit(place, task, kind, given=given)]


def _go_on(
    directory: Path, engine: EngineName | Launcher, limits: Limits, sinks: Sequence[str | Sink], show: Show
) -> Run:
    """Go on with a run where it stopped: its tasks are in its directory."""
    with Record.open(directory) as record:
        cluster = Cluster.load(directory / CLUSTER)
        files = sorted((directory / "tasks").glob(f"*/{FILE}"))
        tasks = [Task.load(file.parent) for file in files]
        _check_whole(tasks, record)
        asked = record.config["engine"] if engine == "local" else engine
        launcher, _ = launcher_of(asked, cluster, None, None, directory)
        left = [task for task in tasks if not _has_finished(task, record)]
        names = {task.name for task in left}
        left = [replace(task, after=tuple(name for name in task.after if name in names)) for task in left]
        view = View(show)
        if not left:
            launcher.close()
            view.event(f"nothing is left to do of {directory}")
            found = {job.name: JobResult.load(record.folder(job.name)) for job in record.jobs}
            kept = {name: result for name, result in found.items() if result is not None}
            return Run(directory=directory, plan=None, results=kept, report=_report(record, view))
        record.event("resumed", f"{len(left)} of {len(tasks)} tasks are left")
        view.event(f"going on with {directory}: {len(left)} of {len(tasks)} tasks are left")
        return _carry_out(left, None, cluster, launcher, record, view, limits, sinks)


def _check_whole(tasks: Sequence[Task], record: Record) -> None:
    """Refuse to go on without a job: nobody would miss it until its weights are needed."""
    there = {name for task in tasks for name in task.names}
    gone = [name for name in record.asked if name not in there]
    if gone:
        raise FileError(
            f"{record.directory / 'tasks'} has no {FILE} for {', '.join(gone)}",
            setting="directory",
            works="the run's directory as it was left, or the jobs file in another directory",
        )


def _has_finished(task: Task, record: Record) -> bool:
    if task.kind == "search":
        return False  # which trials it has, the search itself knows
    found = [JobResult.load(record.folder(name)) for name in task.names]
    return all(result is not None and result.finished for result in found)


def _carry_out(
    tasks: Sequence[Task],
    made: WorkloadPlan | None,
    cluster: Cluster,
    launcher: Launcher,
    record: Record,
    view: View,
    limits: Limits,
    sinks: Sequence[str | Sink],
) -> Run:
    taking = Sinks(chosen(sinks, record.directory / "tensorboard"), warn=view.event)
    taking.open(record.name, record.config)
    first = _first_attempt(record)
    supervisor = Supervisor(
        tasks, launcher, record, view, taking, limits=limits, first_attempt=first,
        narrow=lambda task, left: narrow(task, left, cluster),
    )  # fmt: skip
    view.begin(
        [
            {"job": job.name, "strategy": task.strategy, "devices": list(task.devices), "steps": job.steps}
            for task in tasks
            for job in task.read_jobs()
        ]
    )
    try:
        try:
            results = supervisor.run()
        finally:
            taking.close()
            view.end()
        for job in record.jobs:  # of a run that goes on, what had finished before
            kept = JobResult.load(record.folder(job.name))
            if kept is not None and job.name not in results:
                results[job.name] = kept
        for said in expectation.lines(record):
            view.event(said)
        page = _report(record, view)
    except (KeyboardInterrupt, SystemExit):  # asked once more, when all has been stopped or is about to be
        view.event(f"go on with: plait run --resume {record.directory}")
        raise
    return Run(
        directory=record.directory,
        plan=made,
        results=results,
        report=page,
        interrupted=supervisor.interrupted,
    )


def _report(record: Record, view: View) -> Path | None:
    """The page; what has been trained is not lost where it cannot be made."""
    try:
        return report(record.directory)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        with suppress(FileError):  # the disk that has no room for the page
            record.event("failed", f"the report cannot be made: {reason}")
        view.event(f"the report cannot be made: {reason}")
        return None


def _first_attempt(record: Record) -> int:
    """Above that of every attempt there was: what those still send is not taken for ours."""
    told = [int(row.get("attempt", 0)) for row in record.history()]
    for file in (record.directory / "jobs").glob(f"*/{ATTEMPT_FILE}"):  # also of one that made no step
        with suppress(OSError, ValueError):
            told.append(int(file.read_text()))
    return 1 + max(told, default=-1)
