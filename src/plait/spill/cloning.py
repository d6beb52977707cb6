"""A clone: another job that begins where one stands, with the same state and other hyperparameters."""

from __future__ import annotations

from dataclasses import replace

from plait.errors import UsageError
from plait.spill import units
from plait.spill.preparation import Known, unit_seconds
from plait.spill.segment import Request
from plait.spill.sharing import define
from plait.spill.store import Store
from plait.spill.task import Task


def cloned(source: Task, known: Known) -> Task:
    """The clone of a task, still without its state; refused where the state would not fit it."""
    then, now = source.description, known.description
    for field in ("blocks", "parameters", "buffers", "micro_batches"):
        if getattr(then, field) != getattr(now, field):
            raise UsageError(
                f"job {now.job!r} differs in its {field.replace('_', '-')} from {then.job!r}, whose state it "
                "would take over",
                setting="changes",
                works="the same model, shapes of data, and kind of optimizer",
            )
    return Task(
        job=known.job,
        description=replace(now, shares=then.shares),
        plan=replace(source.plan, forecast=replace(source.plan.forecast, steps=now.steps)),
        head=units.Head(job=now.job),
        unit_seconds=unit_seconds(known, source.plan),
        load=source.load and replace(source.load, name=now.job, steps=now.steps),
        shared=source.shared,
        disk=source.disk,
    )


def take_over(store: Store, source: Task, clone: Task) -> None:
    """Copy all that a task at rest has come to; waits for room in memory."""
    old, new = f"{source.name}/", f"{clone.name}/"
    head = source.head
    define(store, clone.description, clone.plan)
    for segment in units.segments(source.description, source.plan):
        if not segment.key.startswith(old):
            continue  # shared
        if "/moments" in segment.key and "1" not in head.present.get(segment.key, ""):
            continue  # not there yet
        to = new + segment.key.removeprefix(old)
        with store.request([Request(segment.key, "read"), Request(to, "write")]).result() as lease:
            at, there = lease.places[segment.key], lease.places[to]
            store.memory[there : there + segment.nbytes] = store.memory[at : at + segment.nbytes]
    present = {new + key.removeprefix(old): marks for key, marks in head.present.items()}
    clone.head = replace(head, job=clone.name, present=present, stage="step")
    if head.step >= clone.description.steps:
        clone.head = replace(clone.head, stage="done")
