"""What jobs take on disk: their files, and at most what a step or an evaluation may spill; pure.

The store promises the disk's room to every segment when it is defined, whether it is ever written or not, so
that no step fails halfway. The same sum is made here before anything is defined.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from plait.spill import units
from plait.spill.description import Description
from plait.spill.homes import Plan, homes
from plait.spill.segment import Segment
from plait.spill.task import Task


def kept_bytes(segments: Iterable[Segment]) -> int:
    """Of persistent segments: two slots each, or one for what never changes."""
    return sum((1 if units.is_constant(segment.key) else 2) * segment.nbytes for segment in segments)


def scratch_bytes(description: Description, plan: Plan, *, autocast: bool = False) -> int:
    """The most that is defined at once of what comes and goes within a step, or in an evaluation.

    Under autocast every tied weight may be copied wherever it is used; whether it is shows in the first step.
    """
    home = homes(description, plan)
    casts = {s: tuple(home.tied_in(s)) for s in range(home.count)} if autocast else {}
    head = units.Head(job=description.job, stage="step", casts=casts)
    order = [units.Unit(head.job, 0, phase, shard) for phase, shard in units.step_order(description, plan)]
    order += [
        units.Unit(head.job, 0, "evaluate", shard, part)
        for part, shard in units.evaluation_order(description, plan)
    ]
    held: dict[str, int] = {}
    most = 0
    for unit in order:
        held |= {s.key: s.nbytes for s in units.scratch_for(description, plan, unit, head)}
        most = max(most, sum(held.values()))
        for key in units.spent(description, plan, unit):
            held.pop(key, None)
    return most


def commit_bytes(task: Task) -> int:
    """What a commit after a step writes: all that steps change, whether it has left memory or not."""
    every = units.segments(task.description, task.plan)
    return sum(segment.nbytes for segment in every if not units.is_constant(segment.key))


def disk_bytes(tasks: Sequence[Task], *, have: Collection[str] = ()) -> int:
    """All that jobs may come to take on the disk together, beside segments that have their room already.

    What several jobs share counts once.
    """
    segments = {s.key: s for task in tasks for s in units.segments(task.description, task.plan)}
    scratch = (
        scratch_bytes(task.description, task.plan, autocast=task.job.precision == "bf16") for task in tasks
    )
    return kept_bytes(s for key, s in segments.items() if key not in have) + sum(scratch)
