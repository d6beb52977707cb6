"""A run over time: what was planned, from its plan, and what happened, from its rows and events."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.engine.figures import Placed, number, placements
from plait.timeline import Span, Timeline

MOST_STEPS = 2_000
"""With more steps than that, a span is a stretch of them."""
_PAUSE_S = 1.0
"""A stretch ends where nothing was done for so long, and for five steps' time."""
EVENTS = "events"
"""The track of what happened."""

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A step of a job, or a stretch of them."""

    job: str
    start_s: float
    end_s: float
    first: int
    last: int
    attempt: object
    device: object


def planned(plan: Row) -> Timeline:
    """Devices as tracks, jobs as spans, as :attr:`plait.strategy.WorkloadPlan.timeline` draws them."""
    return Timeline.of(
        Span(placed.track(device), placed.job, placed.start_ms, placed.end_ms, {"option": placed.option})
        for placed in placements(plan)
        for device in placed.devices
    )


def measured(
    history: Sequence[Row], events: Sequence[Row], plan: Row, *, most: int = MOST_STEPS
) -> list[Timeline]:
    """What happened, one timeline for each time that the run was at work: a resumed run has several."""
    by_job = [list(_steps(rows)) for rows in _by_job(history).values()]
    if sum(len(steps) for steps in by_job) > most:
        by_job = [_stretches(steps, events) for steps in by_job if steps]
    parts = [part for steps in by_job for part in steps]
    placed = {one.job: one for one in placements(plan)}
    found = []
    for begin_s, end_s in _sittings(parts, events):
        spans = [
            Span(track, part.job, 1e3 * (part.start_s - begin_s), 1e3 * (part.end_s - begin_s), _info(part))
            for part in parts
            if begin_s <= part.start_s < end_s
            for track in _tracks(part, placed.get(part.job))
        ]
        for event in events:
            at_s = number(event.get("time"))
            if at_s is not None and begin_s <= at_s < end_s:
                at_ms = 1e3 * (at_s - begin_s)
                job = {"job": str(event["job"])} if "job" in event else {}
                told = {**job, "text": str(event.get("text", ""))[:200]}
                spans.append(Span(EVENTS, str(event.get("kind")), at_ms, at_ms, told))
        found.append(Timeline.of(spans))
    return found


def _by_job(history: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in history:
        if "evaluation" not in row or "loss" in row:
            found.setdefault(row["job"], []).append(row)
    return found


def _steps(rows: Sequence[Row]) -> Iterator[_Part]:
    """Each step from its begin to its end; one that does not tell its time began where the last ended."""
    last_s, attempt = None, None
    for row in rows:
        end_s, seconds = number(row.get("time")), number(row.get("seconds"))
        if end_s is None:
            continue
        if row.get("attempt") != attempt:
            last_s, attempt = None, row.get("attempt")
        start_s = end_s if last_s is None else min(last_s, end_s)
        if seconds is not None:
            start_s = end_s - max(0.0, seconds)
        step = row["step"]
        yield _Part(
            job=row["job"],
            start_s=start_s,
            end_s=end_s,
            first=step,
            last=step,
            attempt=attempt,
            device=row.get("device"),
        )
        last_s = end_s


def _stretches(parts: Sequence[_Part], events: Sequence[Row]) -> list[_Part]:
    """Steps of one job as stretches: cut by attempts, by what happened to the job, and by pauses."""
    usual_s = statistics.median(part.end_s - part.start_s for part in parts)
    cuts = [
        event["time"] for event in events if event.get("job") == parts[0].job and number(event.get("time"))
    ]
    found = [parts[0]]
    for part in parts[1:]:
        last = found[-1]
        goes_on = (
            (part.attempt, part.device) == (last.attempt, last.device)
            and part.start_s - last.end_s <= max(_PAUSE_S, 5 * usual_s)
            and not any(last.end_s <= cut < part.end_s for cut in cuts)
        )
        if goes_on:
            found[-1] = _Part(
                job=part.job,
                start_s=last.start_s,
                end_s=max(last.end_s, part.end_s),
                first=last.first,
                last=part.last,
                attempt=part.attempt,
                device=part.device,
            )
        else:
            found.append(part)
    return found


def _sittings(parts: Sequence[_Part], events: Sequence[Row]) -> list[tuple[float, float]]:
    """From when to when the run was at work: it begins, and begins again where it was resumed."""
    times = [number(event.get("time")) for event in events]
    begins = sorted([part.start_s for part in parts] + [time for time in times if time is not None])
    if not begins:
        return []
    resumed = [number(event.get("time")) for event in events if event.get("kind") == "resumed"]
    edges = [begins[0]]
    for edge_s in sorted(time for time in resumed if time is not None):
        # Several events tell of one resumption; only after work can there be another.
        if any(edges[-1] <= part.start_s < edge_s for part in parts):
            edges.append(edge_s)
    return list(zip(edges, [*edges[1:], float("inf")], strict=True))


def _tracks(part: _Part, placed: Placed | None) -> list[str]:
    if isinstance(part.device, str):
        return [part.device if placed is None else placed.track(part.device)]
    if placed is None or not placed.devices:
        return [part.job]
    return [placed.track(device) for device in placed.devices]


def _info(part: _Part) -> dict[str, str | int]:
    steps: dict[str, str | int] = {"step": part.first}
    if part.last != part.first:
        steps = {"steps": f"{part.first} to {part.last}"}
    return steps | ({"attempt": part.attempt} if isinstance(part.attempt, int) else {})
