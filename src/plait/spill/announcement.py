"""What is said before a run: how memory is divided, and what jobs should take of it, of disk and of time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from plait.cluster.disk import DiskSpeed
from plait.spill.outcome import Figures
from plait.spill.preparation import Budget
from plait.spill.room import commit_bytes, disk_bytes
from plait.spill.task import Task
from plait.units import counted, format_bytes, format_seconds


def foretell(tasks: Sequence[Task], budget: Budget) -> Figures:
    """What the steps that are left should take, without commits: how many fit in, their time decides."""
    left = [(task, task.description.steps - task.head.step) for task in tasks]
    run_seconds = [steps * task.plan.forecast.step_ms / 1e3 for task, steps in left]
    private = max((task.plan.forecast.private_peak_bytes for task in tasks), default=0)
    return Figures(
        memory_bytes=budget.own_bytes + budget.arena_bytes + budget.devices * private,
        disk_bytes=disk_bytes(tasks),
        read_bytes=sum(steps * task.plan.forecast.read_bytes for task, steps in left),
        written_bytes=sum(steps * task.plan.forecast.written_bytes for task, steps in left),
        busy_seconds=sum(steps * task.plan.forecast.compute_ms / 1e3 for task, steps in left),
        seconds=max([sum(run_seconds) / budget.devices, *run_seconds]),
    )


def bound_seconds(busy_seconds: Sequence[float], devices: int) -> float:
    """No schedule is shorter: all computing shared evenly by the devices, or the longest job."""
    return max([sum(busy_seconds) / devices, *busy_seconds])


def announce(tasks: Sequence[Task], budget: Budget, disk: DiskSpeed) -> list[str]:
    """The forecast, in lines."""
    told = foretell(tasks, budget)
    lines = [
        f"memory {format_bytes(told.memory_bytes)} of {format_bytes(budget.memory_bytes)}: processes by "
        f"themselves {format_bytes(budget.own_bytes)}, shared {format_bytes(budget.arena_bytes)}, each "
        f"device's own {format_bytes(budget.private_bytes)}; disk {format_bytes(told.disk_bytes)}, which "
        f"reads {format_bytes(disk.read_bytes_per_s)}/s and writes {format_bytes(disk.write_bytes_per_s)}/s"
    ]
    for task in tasks:
        plan, left = task.plan.forecast, task.description.steps - task.head.step
        modes = Counter(shard.activations for shard in task.plan.shards[:-1])
        kept = ", ".join(f"{count} {mode}" for mode, count in modes.items())
        shards = counted(len(task.plan.shards), "shard") + (f" (activations: {kept})" if kept else "")
        lines.append(
            f"{task.name}: {shards}; a step {format_seconds(plan.step_ms / 1e3)}, of which "
            f"{plan.bottleneck} takes most, reads {format_bytes(plan.read_bytes)} and writes "
            f"{format_bytes(plan.written_bytes)}; {counted(left, 'step')}; "
            f"each commit writes {format_bytes(commit_bytes(task))} besides"
        )
    least = bound_seconds(
        [(t.description.steps - t.head.step) * t.plan.forecast.compute_ms / 1e3 for t in tasks],
        budget.devices,
    )
    lines.append(f"all of it about {format_seconds(told.seconds)}, at least {format_seconds(least)}")
    if len(tasks) < budget.devices:
        idle = budget.devices - len(tasks)
        have = "has" if idle == 1 else "have"
        lines.append(
            f"{idle} of {budget.devices} devices {have} nothing to do: a job runs on one at a time; "
            "lend=True gives their cores to the jobs"
        )
    crowded = [task for task in tasks if task.job.threads > budget.cores]
    if crowded:
        lines.append(
            f"{crowded[0].name} has {crowded[0].job.threads} threads on a device of {budget.cores} cores, "
            "which is slow"
        )
    return lines
