"""The turns of a job: which unit comes next, what it needs in memory, and what is known afterwards; pure.

One step of three shards (F forward, T forward, loss and backward of the last shard in one turn, B backward,
U update):

    F0 F1 T2 U2 B1 U1 B0 U0              and, where gradients are clipped by their global norm,
    F0 F1 T2 B1 B0 U2 U1 U0

Micro-batches are looped inside a unit, so weights come into memory once a unit however many there are. The
last shard goes back at once, micro-batch by micro-batch, so that the outputs and their gradients are there
for one micro-batch only. Shards in front that nothing trains have no B, and shards without trained
parameters of their own no U.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from plait.errors import NonfiniteError
from plait.spill.description import Description, Evaluations
from plait.spill.head import Head, Phase, Report, Stage, State, Unit
from plait.spill.homes import CAST, PARAMETER, Homes, Plan, homes
from plait.spill.segment import Request, Segment

__all__ = [
    "Head", "Phase", "Report", "Stage", "State", "Unit", "advance", "bound_to", "cast_before", "drops",
    "evaluation_order", "evaluation_parts", "is_constant", "last_backward", "next_unit", "requests",
    "scratch_for", "segments", "spent", "step_order", "upcoming",
]  # fmt: skip


# --- the order ------------------------------------------------------------------------------------------


def step_order(description: Description, plan: Plan) -> tuple[tuple[Phase, int], ...]:
    """The units of one step, as (phase, shard)."""
    return _order(homes(description, plan))


@lru_cache(maxsize=64)
def _order(home: Homes) -> tuple[tuple[Phase, int], ...]:
    last, clips = home.count - 1, home.description.clips
    order: list[tuple[Phase, int]] = [("forward", s) for s in range(last)]
    back: list[tuple[Phase, int]] = [("turn", last)]
    back += [("backward", s) for s in range(last - 1, -1, -1) if home.returns(s)]
    for phase, s in back:
        order.append((phase, s))
        if not clips and home.at_home[s]:
            order.append(("update", s))
    if clips:
        order += [("update", s) for s in range(last, -1, -1) if home.at_home[s]]
    return tuple(order)


def evaluation_order(description: Description, plan: Plan) -> list[tuple[int, int]]:
    """The units of one evaluation, as (part, shard): some batches at a time go through all shards."""
    if description.evaluation is None:
        return []
    parts = len(evaluation_parts(description, plan))
    return [(part, s) for part in range(parts) for s in range(len(plan.shards))]


def evaluation_parts(description: Description, plan: Plan) -> list[list[range]]:
    """The rows of each batch of an evaluation, in parts.

    A part is as many batches as have room in place of what training needs beside the weights: the values of
    a step's micro-batches and the optimizer's state.
    """
    evaluation = description.evaluation
    assert evaluation is not None, "the job has no evaluation"
    batches = [range(i, min(i + evaluation.batch, evaluation.rows))
               for i in range(0, evaluation.rows, evaluation.batch)]  # fmt: skip
    starts = [shard.first for shard in plan.shards[1:]]
    one = max((description.cut_bytes(place, evaluation.batch) for place in starts), default=0)
    if one == 0:
        return [batches]
    step = max(sum(description.cut_bytes(place, rows) for rows in description.micro_batches)
               for place in starts)  # fmt: skip
    home = homes(description, plan)
    moments = min(sum(p.state_bytes for p in parameters) for parameters in home.at_home)
    count = max(1, (step + moments // 2) // one)
    return [batches[i : i + count] for i in range(0, len(batches), count)]


def next_unit(description: Description, plan: Plan, head: Head) -> Unit | None:
    """The unit to come; None where the job is done."""
    if head.stage == "done":
        return None
    if head.stage == "create":
        return Unit(head.job, 0, "create", head.position)
    if head.stage == "evaluate":
        part, shard = evaluation_order(description, plan)[head.position]
        return Unit(head.job, head.step, "evaluate", shard, part)
    phase, shard = step_order(description, plan)[head.position]
    return Unit(head.job, head.step, phase, shard)


def last_backward(description: Description, plan: Plan) -> int:
    """The shard whose backward is the last of a step."""
    return [s for phase, s in step_order(description, plan) if phase in ("turn", "backward")][-1]


def bound_to(description: Description, plan: Plan, head: Head, unit: Unit) -> int | None:
    """The device that must run a unit, because it holds the shard's graph or gradients; None: any."""
    if unit.phase == "backward" or (unit.phase == "update" and not description.clips):
        return head.devices.get(unit.shard)
    return None


def advance(
    description: Description, plan: Plan, head: Head, unit: Unit, report: Report, *, device: int = 0
) -> Head:
    """What is known after a unit. A loss or norm that is not finite ends the job, or only its step."""
    scratch = {*head.scratch, *(segment.key for segment in scratch_for(description, plan, unit, head))}
    scratch -= set(spent(description, plan, unit))
    after = replace(
        head,
        scratch=tuple(sorted(scratch)),
        present={**head.present, **report.present},
        layouts={**head.layouts, **report.layouts},
        generators={**head.generators, **report.generators},
        references={**head.references, unit.shard: report.references},
        casts={**head.casts, unit.shard: report.casts} if unit.phase == "forward" else head.casts,
        norms={**head.norms, **report.norms},
        norm=report.norm if report.norm is not None else head.norm,
        sums=report.sums or head.sums,
    )
    if unit.phase == "create":
        if unit.shard + 1 < len(plan.shards):
            return replace(after, position=head.position + 1)
        return _begin(description, head=after)
    if unit.phase == "evaluate":
        if report.evaluated is None:
            return replace(after, position=head.position + 1)
        evaluations = (*head.evaluations, report.evaluated)
        return _begin(description, head=replace(after, evaluations=evaluations))
    holds = unit.phase == "forward" and plan.shards[unit.shard].activations != "recompute"
    if holds or (unit.phase in ("turn", "backward") and not description.clips):
        after = replace(after, devices={**after.devices, unit.shard: device})
    if report.loss is not None:
        after = replace(after, losses=(*head.losses, report.loss))
    elif report.weight == 0:
        after = replace(after, losses=(*head.losses, math.nan))
    if _lost(report):
        _refuse(description, head, unit, report)
        return _end(description, replace(after, skipped=(*head.skipped, head.step)))
    if head.position + 1 == len(step_order(description, plan)):
        return _end(description, after)
    return replace(after, position=head.position + 1)


def _lost(report: Report) -> bool:
    values = (report.loss, report.norm)
    return report.weight == 0 or any(value is not None and not math.isfinite(value) for value in values)


def _refuse(description: Description, head: Head, unit: Unit, report: Report) -> None:
    """End a job that does not skip steps which are not finite."""
    if description.skips:
        return
    loss = head.losses[-1] if report.loss is None and report.weight is None else report.loss
    lost = f"a loss of {math.nan if loss is None else loss} over a weight of {report.weight or 0.0:g}"
    norm = report.norm if loss is not None and math.isfinite(loss) else None
    raise NonfiniteError(
        f"job {head.job!r} has {lost if norm is None else f'gradients of norm {norm}'} at step {unit.step}",
        setting="nonfinite",
        works="'skip' to leave such steps out, or a lower learning rate",
    )


def _end(description: Description, head: Head) -> Head:
    """A step is done: forget what belonged to it."""
    done = head.step + 1
    head = replace(
        head, step=done, layouts={}, generators={}, references={}, casts={}, norms={}, scratch=(), devices={}
    )
    evaluation = description.evaluation
    if evaluation is not None and _due(evaluation, done, description.steps):
        return replace(head, stage="evaluate", position=0, sums=())
    return _begin(description, head=head)


def _begin(description: Description, *, head: Head) -> Head:
    """The next step, or the end."""
    stage: Stage = "step" if head.step < description.steps else "done"
    return replace(head, stage=stage, position=0, sums=(), layouts={}, references={}, scratch=())


def _due(evaluation: Evaluations, done: int, last: int) -> bool:
    return done == last or (evaluation.every is not None and done % evaluation.every == 0)


# --- what a unit needs ------------------------------------------------------------------------------------


def segments(description: Description, plan: Plan) -> tuple[Segment, ...]:
    """The persistent segments of a job, to define at its start (shared ones too: skip those that exist)."""
    return tuple(homes(description, plan).persistent)


def is_constant(key: str) -> bool:
    """Whether a persistent segment never changes once it was created."""
    return "/frozen" in key


def scratch_for(description: Description, plan: Plan, unit: Unit, head: Head) -> tuple[Segment, ...]:
    """The scratch segments to define before a unit."""
    home, s = homes(description, plan), unit.shard
    counts = range(len(description.micro_batches))
    found: list[Segment] = []
    if unit.phase == "forward":
        shard = plan.shards[s]
        found += [home.value_segment("value", p.name, m) for p in home.writes[s] for m in counts]
        if home.returns(s) and shard.activations == "spill":
            rows = description.rows
            found += [home.saved_segment(s, m, -(-shard.saved_bytes * description.micro_batches[m] // rows))
                      for m in counts]  # fmt: skip
        if home.returns(s) and shard.activations == "recompute" and home.changed[s]:
            found += [home.before_segment(s, m) for m in counts]
    elif unit.phase in ("backward", "turn"):
        names = [p.name for p in home.reads[s] if p.differentiable]
        names += [PARAMETER + name for name in home.tied_in(s) if home.tied[name][0] != s]
        names += [CAST + name for name in cast_before(home, head, s)]
        found += [home.value_segment("gradient", name, m) for name in names for m in counts]
        if description.clips and home.at_home[s]:
            found.append(home.gradient_segment(s))
    elif unit.phase == "evaluate" and s + 1 < home.count:
        part = evaluation_parts(description, plan)[unit.part]
        found += [home.evaluation_segment(p.name, rows.start, len(rows))
                  for p in home.writes[s] for rows in part]  # fmt: skip
    return tuple(segment for segment in found if segment.key not in head.scratch)


def drops(description: Description, plan: Plan, unit: Unit, before: Head, after: Head) -> tuple[str, ...]:
    """The scratch segments to drop after a unit."""
    had = {*before.scratch, *(segment.key for segment in scratch_for(description, plan, unit, before))}
    return tuple(sorted(had - set(after.scratch)))


def spent(description: Description, plan: Plan, unit: Unit) -> list[str]:
    """The scratch segments that nothing needs after a unit."""
    home, s, job = homes(description, plan), unit.shard, unit.job
    counts = range(len(description.micro_batches))
    if unit.phase == "update":
        return [f"{job}/grads/{s}"]
    if unit.phase == "evaluate":
        part = evaluation_parts(description, plan)[unit.part]
        return [f"{job}/value/{p.name}/e{rows.start}" for p in home.passing.values()
                for rows in part if p.readers[-1] == s]  # fmt: skip
    spent = [f"{job}/value/{p.name}/{m}" for p in home.passing.values() for m in counts
             if _last_need(home, p.writer, p.readers) == (unit.phase, s)]  # fmt: skip
    if unit.phase in ("backward", "turn"):
        tied = [name for name, users in home.tied.items() if users[0] == s]
        names = [p.name for p in home.writes[s]] + [
            kind + name for name in tied for kind in (PARAMETER, CAST)
        ]
        spent += [f"{job}/gradient/{name}/{m}" for name in names for m in counts]
        spent += [f"{job}/{kind}/{s}/{m}" for kind in ("saved", "before") for m in counts]
    return spent


def _last_need(home: Homes, writer: int, readers: Sequence[int]) -> tuple[Phase, int]:
    """The unit after which nobody needs a value of a step any more."""
    last = home.count - 1
    back = [s for s in (writer, *readers) if home.returns(s)]
    if not back:
        return ("turn" if readers[-1] == last else "forward"), readers[-1]
    return ("turn" if min(back) == last else "backward"), min(back)


def requests(description: Description, plan: Plan, unit: Unit, head: Head) -> tuple[Request, ...]:
    """The segments that a unit needs in memory, each once."""
    home, s, job = homes(description, plan), unit.shard, unit.job
    wanted: dict[str, Request] = {}

    def want(key: str, mode: Literal["read", "write", "change"]) -> None:
        wanted[key] = Request(key, mode)

    if unit.phase == "create":
        for key in home.created[s]:
            if not (head.frozen and is_constant(key)):
                want(key, "write")
    elif unit.phase == "update":
        for key, moments in home.update_keys(s):
            want(key, "change")
            if moments is not None:
                want(moments, "change" if "1" in head.present.get(moments, "") else "write")
        if description.clips:
            want(f"{job}/grads/{s}", "change")
    elif unit.phase == "evaluate":
        for key in [*home.parameter_keys(s), *home.buffer_keys(s)]:
            want(key, "read")
        for rows in evaluation_parts(description, plan)[unit.part]:
            for p in home.reads[s]:
                want(f"{job}/value/{p.name}/e{rows.start}", "read")
            for p in home.writes[s]:
                want(f"{job}/value/{p.name}/e{rows.start}", "write")
    else:
        _want_training(home, plan, unit, head, want)
    return tuple(wanted.values())


def _want_training(home: Homes, plan: Plan, unit: Unit, head: Head, want: Any) -> None:
    """What forward, backward and the turn between them need."""
    s, job, description = unit.shard, unit.job, home.description
    counts, shard = range(len(description.micro_batches)), plan.shards[unit.shard]
    again = unit.phase == "backward" and shard.activations == "recompute"
    if unit.phase != "backward" or again:
        for key in home.parameter_keys(s):
            want(key, "read")
        for key, changes in home.buffer_keys(s).items():
            want(key, "change" if changes and not again else "read")
        for p in home.reads[s]:
            for m in counts:
                want(f"{job}/value/{p.name}/{m}", "read")
    for key in head.references.get(s, ()) if unit.phase == "backward" else ():
        want(key, "change" if "/saved/" in key else "read")  # some backwards work in what was saved
    if unit.phase == "forward":
        for segment in scratch_for(description, plan, unit, head):
            want(segment.key, "write")
        return
    if again and home.changed[s]:
        for m in counts:
            want(f"{job}/before/{s}/{m}", "read")
    outgoing = [p.name for p in home.reads[s] if p.differentiable]
    incoming = [p.name for p in home.writes[s] if p.differentiable]
    for name in home.tied_in(s):
        (incoming if home.tied[name][0] == s else outgoing).append(PARAMETER + name)
        (outgoing if name in cast_before(home, head, s) else incoming).append(CAST + name)
    for m in counts:
        for name in incoming:
            if f"{job}/gradient/{name}/{m}" in head.layouts:
                want(f"{job}/gradient/{name}/{m}", "read")
        for name in outgoing:
            key = f"{job}/gradient/{name}/{m}"
            want(key, "change" if key in head.layouts else "write")
    if description.clips and home.at_home[s]:
        want(f"{job}/grads/{s}", "write")


def cast_before(home: Homes, head: Head, s: int) -> list[str]:
    """The tied parameters of a shard that autocast made copies of for shards before it, too."""
    return [n for n in home.tied_in(s) if any(n in names for t, names in head.casts.items() if t < s)]


def upcoming(description: Description, plan: Plan, head: Head, count: int) -> list[tuple[Request, ...]]:
    """The requests of the next units, as far as they can be told now, for the store to look ahead.

    Scratch that is not written yet is there with its size where it is made, for it will need room.
    """
    found: list[tuple[Request, ...]] = []
    written, home = set(head.scratch), homes(description, plan)
    position, step = head.position, head.step
    order = step_order(description, plan)
    while len(found) < count:
        if head.stage == "done" or (head.stage != "create" and step >= description.steps):
            break
        if head.stage in ("create", "evaluate"):
            unit = next_unit(description, plan, replace(head, position=position))
            assert unit is not None, "only a job that is done has no next unit"
            end = len(plan.shards) if head.stage == "create" else len(evaluation_order(description, plan))
        else:
            phase, shard = order[position]
            unit, end = Unit(head.job, step, phase, shard), len(order)
        known = head
        if unit.phase == "backward" and unit.shard not in head.references:  # its forward is still to come
            likely = tuple(home.parameter_keys(unit.shard))
            known = replace(head, references={**head.references, unit.shard: likely})
        new = {segment.key: segment.nbytes for segment in scratch_for(description, plan, unit, known)}
        wanted = requests(description, plan, unit, known)
        there = (r for r in wanted if _is_persistent(r.key) or r.key in written or r.key in new)
        found.append(tuple(Request(r.key, r.mode, new.get(r.key, 0)) for r in there))
        position += 1
        if position == end:
            position, step, written = 0, step + (head.stage == "step"), set()
            head = replace(head, stage="step", references={}, layouts={}, scratch=())
    return found


def _is_persistent(key: str) -> bool:
    return not any(f"/{kind}/" in key for kind in ("value", "gradient", "saved", "grads", "before"))
