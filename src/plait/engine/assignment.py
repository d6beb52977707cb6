"""A plan for many jobs as tasks: what each group of workers does, and which of them wait for which; pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from plait.cluster import Cluster
from plait.engine.task import Task
from plait.job import Job
from plait.spill.selection import Selection
from plait.spill.settings import check_likely
from plait.strategy.option import Option
from plait.strategy.workload import Placement, WorkloadPlan

_SPILL = "spill"
"""What a task is called in which several jobs take turns."""
_CLOSE_MS = 1e-6
_SAVE_MS = 30e3
"""Between two checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How tasks are carried out, where the plan leaves that open."""

    save_every: int | None = None
    max_slowdown: float = 1.05
    memory_bytes: int | None = None
    """Of each device, for jobs that spill; None is what the plan has."""


def tasks_of(
    plan: WorkloadPlan,
    jobs: Mapping[str, Job],
    sweeps: Mapping[str, Selection],
    manner: Manner,
) -> tuple[Task, ...]:
    """The tasks of a plan, and of the sweeps beside it."""
    made = _placed(plan, jobs, manner)
    for name, selection in sweeps.items():
        made.append(_sweep(name, selection, plan, made, manner))
    return tuple(made)


def narrowed(task: Task, placement: Placement, cluster: Cluster) -> Task:
    """The same task as another placement has it: on other devices, with another plan."""
    option, devices = placement.option, placement.devices
    return replace(
        task,
        strategy=option.strategy,
        devices=devices,
        cores=_cores(cluster, devices),
        plan=_plan(option),
        compress=option.bits,
        expected_step_ms=option.step_ms,
    )


def _placed(plan: WorkloadPlan, jobs: Mapping[str, Job], manner: Manner) -> list[Task]:
    made: list[Task] = []
    ends: list[tuple[Task, float]] = []
    in_turns: dict[tuple[str, ...], list[Placement]] = {}
    for placement in sorted(plan.placements, key=lambda each: (each.how == "background", each.start_ms)):
        if placement.how == "alternated":
            in_turns.setdefault(placement.devices, []).append(placement)
            continue
        task = _one(placement, jobs[placement.job], plan.cluster, manner)
        if placement.how != "background":
            task = replace(task, after=_before(ends, task.devices, placement.start_ms))
        made.append(task)
        ends.append((task, placement.end_ms))
    for number, (devices, placements) in enumerate(in_turns.items()):
        name = _SPILL if number == 0 else f"{_SPILL}-{number + 1}"
        while name in jobs:
            name += "-"
        task = Task(
            name=name,
            kind="spill",
            strategy="spill",
            jobs=tuple(jobs[placement.job].to_json() for placement in placements),
            devices=devices,
            cores=_cores(plan.cluster, devices),
            memory_bytes=_memory(
                placements[0].option, [jobs[each.job] for each in placements], plan.cluster, devices, manner
            ),
            save_every=manner.save_every,
            expected_step_ms=placements[0].option.step_ms,
        )
        start_ms = min(placement.start_ms for placement in placements)
        made.append(replace(task, after=_before(ends, devices, start_ms)))
    return made


def _one(placement: Placement, job: Job, cluster: Cluster, manner: Manner) -> Task:
    option, behind = placement.option, placement.how == "background"
    spills = option.strategy == "spill"
    return Task(
        name=job.name,
        kind="spill" if spills else "train",
        strategy=option.strategy,
        jobs=(job.to_json(),),
        devices=placement.devices,
        cores=_cores(cluster, placement.devices),
        plan=_plan(option),
        compress=option.bits,
        priority="background" if behind else "foreground",
        memory_bytes=_memory(option, [job], cluster, placement.devices, manner) if spills else None,
        max_slowdown=manner.max_slowdown,
        # Who spills commits about every 30 seconds by the clock, which needs no forecast.
        save_every=manner.save_every or (None if spills else _save_every(option)),
        expected_step_ms=option.step_ms,
    )


def _sweep(name: str, selection: Selection, plan: WorkloadPlan, made: Sequence[Task], manner: Manner) -> Task:
    """A search on all devices of the idlest host, after the jobs in the foreground or behind them."""
    cluster, behind = plan.cluster, selection.job.priority == "background"
    idle_ms = _idle_ms(plan)
    hosts = dict.fromkeys(device.host for device in cluster.devices)
    host = max(hosts, key=lambda each: sum(idle_ms[device.name] for device in cluster.devices_of(each)))
    names = tuple(device.name for device in cluster.devices_of(host))
    limits = [limit for limit in (selection.job.memory_bytes, manner.memory_bytes) if limit is not None]
    each = min(limits or [cluster.device(device).memory_bytes for device in names])
    if cluster.device(names[0]).kind == "cpu":  # a GPU's memory is not what processes take
        check_likely(each * len(names), len(names), what=f"sweep {name!r}")
    foreground = [task for task in made if task.priority == "foreground"]
    return Task(
        name=name,
        kind="search",
        strategy="spill",
        jobs=(selection.job.to_json(),),
        devices=names,
        cores=_cores(cluster, names),
        priority="background" if behind else "foreground",
        after=() if behind else tuple(task.name for task in foreground if set(task.devices) & set(names)),
        memory_bytes=each * len(names),
        max_slowdown=manner.max_slowdown,
        save_every=manner.save_every,
    )


def _idle_ms(plan: WorkloadPlan) -> dict[str, float]:
    """By device, how long no job has it until the last foreground job ends; background jobs count whole."""
    end_ms = max((each.end_ms for each in plan.placements if each.how != "background"), default=0.0)
    idle_ms = {device.name: end_ms for device in plan.cluster.devices}
    for placement in plan.placements:
        step_ms = placement.option.step_ms or 1.0
        for device in placement.devices:
            busy = 1 - placement.option.idle_ms.get(device, 0.0) / step_ms
            idle_ms[device] -= (placement.end_ms - placement.start_ms) * busy
    return idle_ms


def _before(ends: Sequence[tuple[Task, float]], devices: Sequence[str], start_ms: float) -> tuple[str, ...]:
    """The tasks on these devices that end before one begins which is planned for then."""
    return tuple(
        task.name
        for task, end_ms in ends
        if task.priority == "foreground"
        and set(task.devices) & set(devices)
        and end_ms <= start_ms + _CLOSE_MS
    )


def _save_every(option: Option) -> int:
    """So many steps that little is lost by a failure, and saving takes little."""
    return max(1, round(_SAVE_MS / option.step_ms)) if option.step_ms else 1


def _cores(cluster: Cluster, devices: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(cluster.device(name).cores) for name in devices)


def _memory(
    option: Option, jobs: Sequence[Job], cluster: Cluster, devices: Sequence[str], manner: Manner
) -> int:
    """What all processes of jobs that take turns may hold together: a job's own limit can only lower it."""
    if manner.memory_bytes is not None:
        own = [job.memory_bytes for job in jobs if job.memory_bytes is not None]
        return min(manner.memory_bytes, *own) * len(devices) if own else manner.memory_bytes * len(devices)
    return sum(option.budget_bytes.get(name, cluster.device(name).memory_bytes) for name in devices)


def _plan(option: Option) -> dict[str, object] | None:
    """The plan as a runtime reads it."""
    if option.plan is None or option.strategy not in ("pipeline", "burst"):
        return None
    return dict(json.loads(json.dumps(option.plan.to_json())))
