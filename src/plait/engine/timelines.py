"""A run over time: what was planned, from its plan, and what happened, as workers recorded it.

Steps of which there is no recording, as of a worker that was killed, are taken from the run's metrics. Times
are milliseconds from the first thing that is known of the run.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plait.engine.figures import Placed, number, placements
from plait.engine.recording import KEPT, START, Recorded, is_of_steps, tracks_of
from plait.timeline import Span, Timeline
from plait.units import format_seconds

MOST_STEPS = 2_000
"""With more steps than that, a span is a stretch of them."""
MOST_DETAILS = 2_500
"""Of what strategies recorded within steps, the latest are kept, so that a page of them stays small."""
_PAUSE_S = 1.0
"""A stretch ends where nothing was done for so long, and for five steps' time."""
EVENTS = "events"
"""The track of what happened."""

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A step of a job on a device, or a stretch of them; times in Unix seconds."""

    job: str
    tracks: tuple[str, ...]
    start_s: float
    end_s: float
    first: int
    last: int
    attempt: int | None


def planned(plan: Row) -> Timeline:
    """Devices as tracks, jobs as spans, as :attr:`plait.strategy.WorkloadPlan.timeline` draws them."""
    return Timeline.of(
        Span(placed.track(device), placed.job, placed.start_ms, placed.end_ms, {"option": placed.option})
        for placed in placements(plan)
        for device in placed.devices
    )


def measured(
    history: Sequence[Row],
    events: Sequence[Row],
    plan: Row,
    recorded: Sequence[Recorded] = (),
    *,
    most: int = MOST_STEPS,
    most_details: int = MOST_DETAILS,
) -> Timeline:
    """What happened, from the first thing on; what lies between two sittings of a resumed run, too."""
    spans = [span for one in recorded for span in one.timeline.spans]
    parts = _parts(history, events, plan, [span for span in spans if is_of_steps(span)], most)
    others = [span for span in spans if is_of_steps(span) and "step" not in span.info]
    details = [span for span in spans if not is_of_steps(span)]
    if len(details) > most_details:
        begins = sorted(span.start_ms for span in details)
        cut_ms = begins[-most_details]
        details = [span for span in details if span.start_ms >= cut_ms]
    lost = len(spans) - sum(map(is_of_steps, spans)) - len(details)
    found = [
        Span(track, part.job, 1e3 * part.start_s, 1e3 * part.end_s, _info(part))
        for part in parts
        for track in part.tracks
    ]
    marks = list(_marks(events))
    begin_ms = min((span.start_ms for span in [*found, *others, *details, *marks]), default=0.0)
    return Timeline.of(
        (span.moved(-begin_ms) for span in [*found, *others, *details, *marks]),
        dropped=lost + sum(one.timeline.dropped for one in recorded),
    )


def sittings(timeline: Timeline) -> list[Timeline]:
    """The same in parts, one for each time that the run was at work: a resumed run has several."""
    spans = timeline.spans
    work = [span.start_ms for span in spans if span.track != EVENTS]
    edges = [timeline.start_ms]
    for span in spans:
        # Several events tell of one resumption; only after work can there be another.
        resumed = span.track == EVENTS and span.name == "resumed"
        if resumed and any(edges[-1] <= at_ms < span.start_ms for at_ms in work):
            edges.append(span.start_ms)
    if len(edges) == 1:
        return [timeline] if spans else []
    found = []
    for begin_ms, end_ms in zip(edges, [*edges[1:], float("inf")], strict=True):
        its = [span.moved(-begin_ms) for span in spans if begin_ms <= span.start_ms < end_ms]
        found.append(Timeline.of(its, dropped=timeline.dropped if end_ms == float("inf") else 0))
    return found


def between_steps(timeline: Timeline, jobs: Collection[str]) -> float | None:
    """The milliseconds from the first step of some jobs to the end of the last; None where there is none."""
    steps = [span for span in timeline.spans if span.name in jobs and {"step", "steps"} & span.info.keys()]
    steps = [span for span in steps if "attempt" in span.info]  # a strategy's details may be called alike
    if not steps:
        return None
    return max(span.end_ms for span in steps) - min(span.start_ms for span in steps)


def against_plan(plan: Row, parts: Sequence[Timeline]) -> str:
    """What is to be known to compare what was planned with what was measured, in one sentence or two."""
    said = "The plan has the steps alone: no starting of workers, no checkpoints, no evaluations, no sweeps."
    front = [one for one in placements(plan) if one.how != "background"]
    if len(parts) != 1:  # a step that was taken again is in both
        return said
    took_ms = between_steps(parts[0], {one.job for one in front})
    planned_ms = max((one.end_ms for one in front), default=0.0) - min(
        (one.start_ms for one in front), default=0.0
    )
    if took_ms is None or not planned_ms:
        return said
    behind = len(front) < len(placements(plan))
    whose = f"the {'foreground ' * behind}job{'s' * (len(front) != 1)}"
    return (
        f"{said} From the first step of {whose} to the last, {format_seconds(planned_ms / 1e3)} were planned "
        f"and {format_seconds(took_ms / 1e3)} measured, {took_ms / planned_ms:.3g} times as long."
    )


def left_out(timeline: Timeline, recorded: Sequence[Recorded]) -> str | None:
    """Why some of what happened is not drawn, and where it is; None where all is."""
    never = sum(one.timeline.dropped for one in recorded)
    said = []
    if unseen := timeline.dropped - never:
        said.append(
            f"Of what happened within steps the latest {MOST_DETAILS:,} spans are drawn, or the page would "
            f"be too large; the {unseen:,} before them are in tasks/*/timeline-*.json."
        )
    if never:
        said.append(
            f"{never:,} older spans were not kept: each worker holds its latest {KEPT:,}, so that recording "
            "takes no more memory the longer it trains."
        )
    return " ".join(said) or None


def devices(timeline: Timeline) -> list[str]:
    """The tracks that are devices, planned or measured, and neither events nor a strategy's details."""
    kept = [span for span in timeline.spans if {"option", "attempt"} & span.info.keys()]
    return list(dict.fromkeys(span.track for span in kept if span.name != START))


def of_steps(recorded: Iterable[Recorded], count: int) -> Timeline:
    """What strategies recorded within the last so many steps that all workers have, on their own tracks.

    A track is called as the strategy calls it, ``stage1`` for ``node0/1: stage1``, so that it can be compared
    with one of the simulator.
    """
    kept = [one for one in recorded if any(is_of_steps(span) for span in one.timeline.spans)]
    latest = max((one.attempt for one in kept), default=0)
    kept = [one for one in kept if one.attempt == latest]
    steps = [_details_by_step(one.timeline) for one in kept]
    common = sorted(set.intersection(*(set(by_step) for by_step in steps))) if steps else []
    return Timeline.of(
        span.moved(0.0, to_track=span.track.partition(": ")[2])
        for by_step in steps
        for step in common[-count:]
        for span in by_step[step]
    )


def _details_by_step(timeline: Timeline) -> dict[int, list[Span]]:
    """What lies within each step of a worker; a step of which the beginning was not kept is left out."""
    details = [span for span in timeline.spans if not is_of_steps(span)]
    found: dict[int, list[Span]] = {}
    place = 0
    for whole in timeline.spans:
        if not is_of_steps(whole) or "step" not in whole.info:
            continue
        while place < len(details) and details[place].start_ms < whole.start_ms:
            place += 1
        begin = place
        while place < len(details) and details[place].start_ms < whole.end_ms:
            place += 1
        within = details[begin:place]
        first = begin == 0 and timeline.dropped > 0  # its own first ones may have been overwritten
        if within and not first:
            found[int(str(whole.info["step"]))] = within
    return found


# --- steps ---------------------------------------------------------------------------------------------


def _parts(
    history: Sequence[Row], events: Sequence[Row], plan: Row, recorded: Sequence[Span], most: int
) -> list[_Part]:
    """Steps as workers recorded them, and as rows tell them where they did not; stretches, if many."""
    placed, where = {one.job: one for one in placements(plan)}, tracks_of(recorded)
    parts = [_recorded(span) for span in recorded if "step" in span.info]
    known = {(part.job, part.attempt, part.first, *part.tracks) for part in parts}
    for job, rows in _by_job(history).items():
        for part in _steps(rows, placed.get(job)):
            tracks = where.get((job, part.attempt), part.tracks)
            left = tuple(each for each in tracks if (job, part.attempt, part.first, each) not in known)
            parts += [replace(part, tracks=left)] * bool(left)
    if len(parts) <= most:
        return parts
    lines: defaultdict[tuple[str, tuple[str, ...]], list[_Part]] = defaultdict(list)
    for part in sorted(parts, key=lambda part: part.start_s):
        lines[part.job, part.tracks].append(part)
    return [stretch for line in lines.values() for stretch in _stretches(line, events)]


def _recorded(span: Span) -> _Part:
    step = int(str(span.info["step"]))
    return _Part(
        job=span.name,
        tracks=(span.track,),
        start_s=span.start_ms / 1e3,
        end_s=span.end_ms / 1e3,
        first=step,
        last=step,
        attempt=int(str(span.info["attempt"])),
    )


def _by_job(history: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in history:
        if "evaluation" not in row or "loss" in row:
            found.setdefault(row["job"], []).append(row)
    return found


def _steps(rows: Sequence[Row], placed: Placed | None) -> Iterator[_Part]:
    """Each step from its begin to its end; one that does not tell its time began where the last ended."""
    last_s, attempt = None, None
    for row in rows:
        end_s, seconds = number(row.get("time")), number(row.get("seconds"))
        if end_s is None:
            continue
        its = row.get("attempt")
        if its != attempt:
            last_s, attempt = None, its if isinstance(its, int) else None
        start_s = end_s if last_s is None else min(last_s, end_s)
        if seconds is not None:
            start_s = end_s - max(0.0, seconds)
        yield _Part(
            job=row["job"],
            tracks=_tracks(row, placed),
            start_s=start_s,
            end_s=end_s,
            first=row["step"],
            last=row["step"],
            attempt=attempt,
        )
        last_s = end_s


def _tracks(row: Row, placed: Placed | None) -> tuple[str, ...]:
    device = row.get("device")
    if isinstance(device, str):
        return (device if placed is None else placed.track(device),)
    if placed is None or not placed.devices:
        return (str(row["job"]),)
    return tuple(placed.track(each) for each in placed.devices)


def _stretches(parts: Sequence[_Part], events: Sequence[Row]) -> list[_Part]:
    """Steps of one job on one device as stretches: cut by attempts, by what happened to it, and by pauses."""
    usual_s = statistics.median(part.end_s - part.start_s for part in parts)
    cuts = [
        event["time"] for event in events if event.get("job") == parts[0].job and number(event.get("time"))
    ]
    found = [parts[0]]
    for part in parts[1:]:
        last = found[-1]
        goes_on = (
            part.attempt == last.attempt
            and part.start_s - last.end_s <= max(_PAUSE_S, 5 * usual_s)
            and not any(last.end_s <= cut < part.end_s for cut in cuts)
        )
        if goes_on:
            found[-1] = replace(last, end_s=max(last.end_s, part.end_s), last=part.last)
        else:
            found.append(part)
    return found


def _info(part: _Part) -> dict[str, str | int]:
    steps: dict[str, str | int] = {"step": part.first}
    if part.last != part.first:
        steps = {"steps": f"{part.first} to {part.last}"}
    return steps | ({} if part.attempt is None else {"attempt": part.attempt})


def _marks(events: Sequence[Row]) -> Iterator[Span]:
    for event in events:
        at_s = number(event.get("time"))
        if at_s is not None:
            job = {"job": str(event["job"])} if "job" in event else {}
            told = {**job, "text": str(event.get("text", ""))[:200]}
            yield Span(EVENTS, str(event.get("kind")), 1e3 * at_s, 1e3 * at_s, told)
