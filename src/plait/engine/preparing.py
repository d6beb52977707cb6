"""What is settled before a run starts: who starts workers, on what, by which plan; and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Literal, get_args

from plait.burst.controller import Control
from plait.cluster import Cluster
from plait.destination import not_written
from plait.engine.assignment import narrowed
from plait.engine.diagnosis import explaining
from plait.engine.emit import Kind
from plait.engine.launcher import Launcher, LocalLauncher
from plait.engine.machine import this_machine
from plait.engine.record import Record
from plait.engine.refusal import check_cores, check_evaluations, check_functions
from plait.engine.task import Compress, Task
from plait.engine.workload import Workload
from plait.errors import FileError, UsageError
from plait.job import Strategy
from plait.strategy.comparison import STRATEGIES
from plait.strategy.measuring import check_threads
from plait.strategy.planning import plan as plan_jobs
from plait.strategy.workload import Objective, WorkloadPlan
from plait.units import counted, parse_whole

EngineName = Literal["local", "ray"]
_GOES_ON = {"started", "restarted", "broken", "waiting", "stopped"}
"""The last events of tasks that can be gone on with."""
RUNS = Path("runs")
"""Where runs are kept by default."""


def check(
    strategy: Strategy,
    compress: Compress,
    save_every: int | None,
    engine: EngineName | Launcher,
    write: Kind | None,
    max_slowdown: float,
) -> None:
    """Refuse what cannot be meant."""
    Control(max_slowdown=max_slowdown)
    if write is not None and write not in get_args(Kind):
        raise UsageError(f"nothing is known of {write!r}", setting="emit", works=", ".join(get_args(Kind)))
    if strategy not in get_args(Strategy):
        raise UsageError(
            f"there is no strategy {strategy!r}", setting="strategy", works=", ".join(get_args(Strategy))
        )
    if (
        compress is not None
        and compress != "auto"
        and not 1 <= parse_whole(compress, setting="compress") <= 8
    ):
        raise UsageError(f"gradients in {compress} bits", setting="compress", works="1 to 8, or 'auto'")
    if save_every is not None:
        parse_whole(save_every, setting="save_every")
    if isinstance(engine, str) and engine not in get_args(EngineName):
        raise UsageError(
            f"there is no engine {engine!r}", setting="engine", works=", ".join(get_args(EngineName))
        )


def launcher_of(
    engine: EngineName | Launcher,
    cluster: Cluster | None,
    devices: int | None,
    memory_bytes: int | None,
    directory: Path,
    *,
    starts: bool = True,
) -> tuple[Launcher, Cluster]:
    """Who starts workers, and on what; where it ``starts`` none, the cluster may be anywhere."""
    if cluster is not None and devices is not None:
        cluster = cluster.take(devices)
    if cluster is not None and memory_bytes is not None:
        own = tuple(replace(device, memory_bytes=memory_bytes) for device in cluster.devices)
        cluster = replace(cluster, devices=own)
    if engine == "ray":
        from plait.engine.ray_launcher import RayLauncher

        ray = RayLauncher(cluster, devices=devices, memory_bytes=memory_bytes)
        return ray, ray.cluster
    if not isinstance(engine, str):
        if cluster is None:
            raise UsageError(
                "a launcher without a cluster", setting="cluster", works="the cluster of its devices"
            )
        return engine, cluster
    if cluster is None:
        nearest = next(
            parent for parent in (directory.resolve(), *directory.resolve().parents) if parent.is_dir()
        )
        cluster = this_machine(devices=devices, memory_bytes=memory_bytes, directory=nearest)
    if len(cluster.hosts) > 1 and starts:
        raise UsageError(
            f"the local engine is for this machine alone, and the cluster has {len(cluster.hosts)} hosts",
            setting="engine",
            works="'ray', or a cluster of one host",
        )
    if starts:
        check_cores(cluster)
    return LocalLauncher(cluster.devices), cluster


def planned(
    workload: Workload,
    cluster: Cluster,
    strategy: Strategy,
    objective: Objective,
    profiles: str | Path | None,
    progress: Callable[[str], object],
) -> WorkloadPlan:
    """What is to run where; jobs that were never measured are."""
    every = [*workload.jobs, *(selection.job for selection in workload.sweeps.values())]
    for job in every:
        check_threads(job)
    check_evaluations(every)
    for job in workload.jobs:
        check_functions(job)
    for selection in workload.sweeps.values():
        check_functions(
            selection.job, searched={"steps", *(name.partition(".")[0] for name in selection.space)}
        )
    if not workload.jobs:  # sweeps alone are not compared: they take turns on all there is
        return WorkloadPlan(
            cluster=cluster, objective=objective, ways=(), comparisons={}, bound_ms=0.0,
            bound_samples_per_s=0.0, why="sweeps take turns on the devices of a host",
        )  # fmt: skip
    with explaining(workload.jobs):
        return plan_jobs(
            workload.jobs,
            cluster,
            objective=objective,
            strategies=STRATEGIES if strategy == "auto" else (strategy,),
            directory=profiles,
            progress=_once(progress),
        )


def _once(progress: Callable[[str], object]) -> Callable[[str], None]:
    """Say what is measured, a line a job: a job has hundreds of measurements."""
    said: set[str] = set()

    def tell(text: str) -> None:
        job, _, found = text.partition(":")
        if " batch " in found and job not in said:
            said.add(job)
            progress(f"measuring {job}, once: its profile is kept")

    return tell


def check_placed(made: WorkloadPlan) -> None:
    """Refuse a workload of which a part fits nowhere, with the smallest change that helps."""
    if not made.unplaced:
        return
    compared = [made.comparisons[name] for name in made.unplaced if name in made.comparisons]
    options = [option for each in compared for option in each.options if option.why_not is not None]
    reasons = dict.fromkeys(f"{option.name}: {option.why_not}" for option in options)
    changes = list(dict.fromkeys(change.text for each in compared for change in each.changes[:1]))
    works = changes or list(dict.fromkeys(option.works for option in options if option.works is not None))
    raise UsageError(
        f"{', '.join(made.unplaced)} cannot be run here: {'; '.join(reasons) or made.why}",
        setting="cluster, memory, strategy",
        works="; ".join(works) or "more memory",
    )


def compressed(tasks: tuple[Task, ...], compress: Compress) -> tuple[Task, ...]:
    """With gradients in the bits that were asked for, where several devices share them."""
    if compress is None:
        return tasks
    return tuple(
        replace(task, compress=compress, expected_step_ms=_expected_ms(task, compress))
        if task.strategy in ("data", "burst") and len(task.devices) > 1
        else task
        for task in tasks
    )


def _expected_ms(task: Task, compress: Compress) -> float | None:
    """What was planned for these bits; for others nothing was."""
    return task.expected_step_ms if task.compress == compress else None


def narrow(task: Task, left: frozenset[str], cluster: Cluster) -> Task | None:
    """A task on what is left of its devices, planned anew; None where it cannot be had there."""
    kept = tuple(device for device in cluster.devices if device.name in task.devices and device.name in left)
    if not kept or task.kind != "train":
        return None
    hosts = dict.fromkeys(device.host for device in kept)
    smaller = replace(cluster.only(*hosts), devices=kept)
    (job,) = task.read_jobs()
    made = plan_jobs([replace(job, strategy="auto")], smaller)
    if made.unplaced:
        return None
    return narrowed(task, made.placements[0], smaller)


def new_directory(workload: Workload, *, claim: bool) -> Path:
    """The first of runs/gpt, runs/gpt-2 and so on that is not there yet; ``claim`` makes it at once."""
    names = [*(job.name for job in workload.jobs), *workload.sweeps]
    base = names[0] if len(names) == 1 else f"{names[0]}-and-{len(names) - 1}"
    for number in count(1):
        found = RUNS / (base if number == 1 else f"{base}-{number}")
        if found.exists():
            continue
        if claim:
            try:
                found.mkdir(parents=True)
            except FileExistsError:  # another run was faster
                continue
            except OSError as error:
                raise not_written(found, error, setting="directory") from None
        break
    return found


def unfinished(place: Path, workload: Workload) -> Path | None:
    """The latest run of the same jobs beside a new one, if it can be gone on with."""
    names = {*(job.name for job in workload.jobs), *(each.job.name for each in workload.sweeps.values())}
    earlier: list[Record] = []
    for folder in place.parent.glob("*") if place.parent.is_dir() else ():
        with suppress(FileError, OSError):  # no run, one that is damaged, or somebody else's
            record = Record.read(folder)
            if folder != place and set(record.asked) == names:
                earlier.append(record)
    latest = max(earlier, key=lambda record: record.created, default=None)
    if latest is None:
        return None
    last = {event["job"]: event["kind"] for event in latest.events() if event.get("job") is not None}
    return latest.directory if set(last.values()) & _GOES_ON else None


def told(made: WorkloadPlan, tasks: Sequence[Task]) -> Iterator[str]:
    """The plan, in lines."""
    yield f"plan: {made.why}"
    for task in tasks:
        bits = ", bits chosen layer by layer" if task.compress == "auto" else ""
        if isinstance(task.compress, int):
            bits = f", gradients in {counted(task.compress, 'bit')}"
        how = "behind" if task.priority == "background" else "on"
        step = "" if task.expected_step_ms is None else f", {task.expected_step_ms:.4g} ms a step expected"
        if step and how == "behind":
            step = f", {task.expected_step_ms:.4g} ms a step of what is left there, once it has started"
        after = f", after {', '.join(task.after)}" if task.after else ""
        several = "" if len(task.names) == 1 else f" ({', '.join(task.names)})"
        yield f"  {task.name}{several}: {task.strategy} {how} {', '.join(task.devices)}{bits}{step}{after}"
