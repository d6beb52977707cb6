"""Trains one job in this process, with a store: what a device and the alternator do between them, in a loop.

It is the plainest way to run a plan, and what the exactness of all others is judged by: ``execute(job, plan,
store)`` leaves the same weights in the store as ``plait.reference.train(job)`` has in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from plait.job import Job
from plait.spill import units
from plait.spill.description import Description
from plait.spill.homes import Plan, homes
from plait.spill.runner import Runner
from plait.spill.segment import Request
from plait.spill.store import Store
from plait.spill.units import Head, Unit
from plait.spill.views import Views

_AHEAD = 4
"""Units that the store is told of in advance."""


def execute(
    job: Job,
    plan: Plan,
    store: Store,
    *,
    runner: Runner | None = None,
    description: Description | None = None,
    weights: str | Path | None = None,
    commit_every: int | None = None,
    on_unit: Callable[[Unit, Head], None] | None = None,
) -> Head:
    """Train a job to its end, from its last commit in the store if there is one, and commit the result.

    Args:
        weights: A safetensors file, or a folder as Hugging Face saves it, to start from.
        commit_every: Steps between commits; None commits once, at the end.
        on_unit: Called after each unit with what is known then.
    """
    runner = Runner(store.memory) if runner is None else runner
    description = runner.describe(job) if description is None else description
    runner.adopt(job, plan, description, weights=weights)
    note = store.committed(job.name)
    if note is None:
        for segment in units.segments(description, plan):
            store.define(segment, constant=units.is_constant(segment.key))
        head = Head(job=job.name)
    else:
        head = Head.from_json(note["head"])
    while (unit := units.next_unit(description, plan, head)) is not None:
        before = head
        for segment in units.scratch_for(description, plan, unit, head):
            store.define(segment)
        store.expect(units.upcoming(description, plan, head, _AHEAD))
        lease = store.request(units.requests(description, plan, unit, head)).result()
        try:
            report = runner.perform(unit, lease.places, head, lease.extents)
        finally:
            lease.release()
        head = units.advance(description, plan, head, unit, report)
        for key in units.drops(description, plan, unit, before, head):
            store.drop(key)
        if head.rests and _due(before, head, commit_every):
            store.commit(job.name, {"head": head.to_json()}).result()
        if on_unit is not None:
            on_unit(unit, head)
    return head


def _due(before: Head, head: Head, every: int | None) -> bool:
    if head.stage == "done":
        return before.stage != "done"
    return every is not None and head.step != before.step and head.step % every == 0


def tensors(
    description: Description, plan: Plan, head: Head, store: Store
) -> Iterator[tuple[str, str | None, torch.Tensor]]:
    """Copies of what a job has in the store: name, None or the name of the optimizer's state, tensor.

    For looking at results; one segment at a time is in memory.
    """
    home = homes(description, plan)
    views = Views(store.memory)
    strides = {parameter.name: parameter.stride for parameter in description.parameters}
    strides |= {buffer.name: buffer.stride for buffer in description.buffers}
    for segment in home.persistent:
        present = (
            head.present.get(segment.key, "0" * len(segment.entries)) if "/moments" in segment.key else None
        )
        if present is not None and "1" not in present:
            continue
        lease = store.request([Request(segment.key, "read")]).result()
        try:
            views.use(lease.places)
            for place, entry in enumerate(segment.entries):
                name, _, state = entry.name.rpartition("|") if present is not None else (entry.name, "", None)
                if present is not None and present[place] == "0":
                    continue
                stride = strides[name] if len(entry.shape) == len(strides[name]) else ()
                yield name, state, views.entry(segment.key, entry, stride).clone()
        finally:
            lease.release()
