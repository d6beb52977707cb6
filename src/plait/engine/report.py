"""A run as a page: what ran where and why, losses, speed, the plan beside what came of it, and what happened.

    from plait.engine.report import report
    report("runs/first")    # writes runs/first/report.html and timeline.json, and returns the page's path

The page is one file that loads nothing from anywhere. It can be made at any moment, also while the run goes
on and after it was killed: it shows what is there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from plait.engine import figures, timelines
from plait.engine.figures import Points
from plait.engine.reading import Reading
from plait.engine.record import REPORT, TIMELINE, Record, latest, write_whole
from plait.engine.repeating import repeat
from plait.engine.result import End
from plait.page import Heading, Paragraph, Section, Table, page
from plait.plot import Plot, Series
from plait.timeline import Timeline
from plait.timeline.picture import HOW_TO, Gantt
from plait.units import format_bytes, format_seconds

_EVALUATIONS = 40
"""Of more, a table has the last ones."""
_CURVES = 8
"""A plot has no more jobs, or their colours could not be told apart."""
_TROUBLE = ("failed", "broken", "waiting", "restarted")
_ASKED = ("stopping", "stopped", "resumed")
"""What whoever runs it has asked for: no failure."""
_DECISIONS = ("planned", "decision")
_NONE = "—"
_NOTHING = "Nothing to draw was recorded."

Row = Mapping[str, Any]


def report(directory: str | Path) -> Path:
    """Write a run's page; the path of it."""
    record = Record.read(directory)
    made = _Page(run=Reading.of(record))
    path = record.directory / REPORT
    write_whole(path, page(f"Run of {_few(made.run.jobs) or 'no jobs'}", made.sections()))
    if made.measured.spans:
        write_whole(record.directory / TIMELINE, json.dumps(made.measured.to_json()) + "\n")
    return path


@dataclass(frozen=True)
class _Curve:
    """Something of a job, by step."""

    job: str
    points: Points
    dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class _Page:
    """The parts of the page, from top to bottom."""

    run: Reading

    @cached_property
    def measured(self) -> Timeline:
        """What happened over time."""
        run = self.run
        return timelines.measured(run.history, run.events, run.plan, run.recorded)

    def sections(self) -> list[Section]:
        return [
            *self._summary(),
            *self._what_ran(),
            *self._losses(),
            *self._evaluations(),
            *self._throughput(),
            *self._predicted(),
            *self._over_time(),
            *self._bytes(),
            *self._happened("Decisions, and why", _DECISIONS, none="None was recorded."),
            *self._happened("Failures and restarts", _TROUBLE, none="None."),
            *self._asked(),
            *self._others(),
            *self._environment(),
            *repeat(self.run),
        ]

    # --- what ran ------------------------------------------------------------------------------------

    def _summary(self) -> list[Section]:
        states = Counter(self.run.state(job) for job in self.run.jobs)
        told = ", ".join(f"{count} {state}" for state, count in states.items()) or "none"
        begun = datetime.fromtimestamp(self.run.begin_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        count, where = len(self.run.jobs), self.run.record.directory
        said = f"{count} job{'s' * (count != 1)} ({told}) in {where}, begun {begun}{self._took(states)}."
        problems = (Paragraph(f"Not all could be read: {problem}.") for problem in self.run.problems)
        return [Paragraph(said), *problems]

    def _took(self, states: Iterable[str]) -> str:
        """How long the run was at it; of one that has not ended, how long it is known to have been."""
        end_s = max(figures.values([*self.run.events, *self.run.history], "time"), default=self.run.begin_s)
        if end_s <= self.run.begin_s:
            return ""
        took = format_seconds(end_s - self.run.begin_s)
        if not set(states) <= set(get_args(End)):
            return f"; last heard of after {took}"
        paused = any(event["kind"] == "resumed" for event in self.run.events)
        return f"; it took {took}{', pauses before it was resumed included' * paused}"

    def _what_ran(self) -> list[Section]:
        rows = self.run.rows
        columns = ["job", "how", "strategy", "devices", "steps", "last loss", "restarts", "state"]
        tried = any(self.run.tried(job) for job in self.run.jobs)
        shown = []
        for job in self.run.jobs:
            its = rows.get(job, [])
            wanted = self.run.wanted(job).get("steps")
            done = its[-1]["step"] + 1 if its else 0
            loss = next((row["loss"] for row in reversed(its) if "loss" in row), None)
            restarts = sum(event["kind"] == "restarted" for event in self.run.told(job))
            cells = [
                job,
                *self._where(job),
                f"{done} of {wanted}" if wanted is not None else str(done),
                _NONE if not its else "not finite" if loss is None else f"{loss:.6g}",
                str(restarts),
                self.run.state(job),
            ]
            settings = ", ".join(f"{name} {value}" for name, value in self.run.tried(job).items())
            shown.append([*cells, settings] if tried else cells)
        parts: list[Section] = [
            Heading("What ran"),
            Table(columns=[*columns, "settings"] if tried else columns, rows=shown),
            Heading("Why so", level=3),
        ]
        told = [Paragraph(f"{said.rstrip('.')}.") for said in dict.fromkeys(self._why()) if said]
        return [*parts, *(told or [Paragraph("The plan does not say.")])]

    def _where(self, job: str) -> tuple[str, str, str]:
        """How a job ran, by which option, on which devices: as planned, or as its task has it."""
        where, task = self.run.placed.get(job), self.run.task_of(job)
        if where is not None:
            return where.how, where.option, _few(where.devices)
        if task is not None and self.run.tried(job):
            return "trial", task.strategy, _few(task.devices)
        return _NONE, str(self.run.wanted(job).get("strategy", _NONE)), _NONE

    def _why(self) -> Iterator[str]:
        plan = self.run.plan
        whole = str(plan.get("why") or "")
        yield whole
        yield from map(str, plan.get("remarks") or ())
        for job, compared in plan.get("jobs", {}).items():
            reason = figures.reason(compared, self.run.placed.get(job))
            if reason != whole:  # a plan of one job has the job's own
                yield f"{job}: {reason}"
            yield from (f"{job}: note: {remark}" for remark in compared.get("remarks", ()))
        if plan.get("ways"):
            for task in (task for task in self.run.tasks.values() if task.kind == "search"):
                behind = ", in the background" * (task.priority == "background")
                where = f"its trials take turns on {_few(task.devices)}{behind}"
                yield f"{task.name}: a sweep is no part of the plan's times and comparisons; {where}"
        if unplaced := plan.get("unplaced"):
            yield f"fits nowhere: {', '.join(map(str, unplaced))}"

    # --- curves --------------------------------------------------------------------------------------

    def _losses(self) -> list[Section]:
        curves: dict[str, _Curve] = {}
        evaluations = latest(self.run.history, evaluations=True)
        for job in self.run.jobs:
            curves[job] = _Curve(job, figures.points(self.run.rows.get(job, ()), "loss"))
            judged = [{"step": row["step"], **row["evaluation"]} for row in evaluations.get(job, ())]
            curves[f"{job}, evaluated"] = _Curve(job, figures.points(judged, "loss"), dashed=True)
        values = [y for curve in curves.values() for _, y in curve.points]
        lost = sum(y is None or abs(y) > figures.LARGEST for y in values)
        parts: list[Section] = [Heading("Losses"), *self._plots("Loss", "loss", curves, from_zero=False)]
        if lost:
            count = f"{lost} losses were" if lost > 1 else "1 loss was"
            parts.append(Paragraph(f"{count} not finite, or beyond {figures.LARGEST:g}: gaps in the curves."))
        return parts

    def _evaluations(self) -> list[Section]:
        found = latest(self.run.history, evaluations=True)
        kept = [(job, row) for job in self.run.jobs for row in found.get(job, ())]
        if not kept:
            return []
        names = list(dict.fromkeys(name for _, row in kept for name in row["evaluation"]))
        rows = []
        for job, row in kept[-_EVALUATIONS:]:
            values = [figures.number(row["evaluation"].get(name)) for name in names]
            rows.append((job, row["step"] + 1, *(_NONE if value is None else value for value in values)))
        title = (
            "Evaluations" if len(rows) == len(kept) else f"The last {len(rows)} of {len(kept)} evaluations"
        )
        return [Table(title=title, columns=("job", "after steps", *names), rows=rows)]

    def _throughput(self) -> list[Section]:
        rows_of = {job: self.run.rows[job] for job in self.run.jobs if job in self.run.rows}
        curves = {job: _Curve(job, figures.points(rows, "samples_per_s")) for job, rows in rows_of.items()}
        rates = {job: figures.median(rows, "samples_per_s") for job, rows in rows_of.items()}
        shown = []
        for job, rate in rates.items():
            if rate is not None:
                timed = sum("seconds" in row for row in rows_of[job])
                shown.append((job, rate, f"{timed} of {len(rows_of[job])}"))
        parts: list[Section] = [Heading("Throughput")]
        if shown:
            parts.append(Table(columns=("job", "samples/s", "steps that were timed"), rows=shown))
        if untimed := [job for job, rate in rates.items() if rate is None]:
            parts.append(Paragraph(f"No step was timed by itself: {_few(untimed)}."))
        none = None if shown or untimed else _NOTHING
        return [*parts, *self._plots("Throughput", "samples/s", curves, none=none)]

    # --- the plan beside what came of it ---------------------------------------------------------------

    def _predicted(self) -> list[Section]:
        shown = []
        for job, where in self.run.placed.items():
            seconds = figures.median(self.run.rows.get(job, ()), "seconds")
            planned_ms, measured_ms = where.step_ms, None if seconds is None else 1e3 * seconds
            ratio = measured_ms / planned_ms if measured_ms is not None and planned_ms else None
            figured = [
                _NONE if value is None else f"{value:.4g}" for value in (planned_ms, measured_ms, ratio)
            ]
            shown.append((job, where.option, *figured, len(self.run.rows.get(job, ()))))
        if not shown:
            return []
        columns = ("job", "strategy", "planned ms", "measured ms", "measured / planned", "steps")
        parts: list[Section] = [
            Heading("Predicted and measured"),
            Table(columns=columns, rows=shown, title="Time of a step (of the measured, the median)"),
        ]
        if any(where.how == "alternated" for where in self.run.placed.values()):
            parts.append(Paragraph("Of jobs that take turns, a step also waits for the turns of others."))
        return parts

    def _over_time(self) -> list[Section]:
        shown: dict[str, Timeline] = {}
        planned = timelines.planned(self.run.plan)
        if planned.spans:
            shown["planned"] = planned
        found = timelines.sittings(self.measured)
        for place, timeline in enumerate(found):
            title = "measured" if len(found) == 1 else f"measured, part {place + 1}"
            shown[title] = Timeline.of(timeline.spans)  # what is not drawn is told of above it, and why
        parts: list[Section] = [Heading("Over time")]
        if not shown:
            return [*parts, Paragraph("Nothing was planned, and nothing has happened.")]
        tracks = {track for timeline in shown.values() for track in timelines.devices(timeline)}
        if planned.spans:
            front = [job for job, where in self.run.placed.items() if where.how != "background"]
            done = all(self.run.state(job) == "finished" for job in front)  # else it has not all of the steps
            parts.append(Paragraph(timelines.against_plan(self.run.plan, found if done else ())))
        if said := timelines.left_out(self.measured, self.run.recorded):
            parts.append(Paragraph(said))
        return [
            *parts,
            Paragraph(HOW_TO),
            Gantt(timelines=shown, counted=tracks, first=self.run.jobs, compared=False),
        ]

    def _bytes(self) -> list[Section]:
        shown, curves = [], {}
        for job, rows in self.run.rows.items():
            sent = figures.wire_bytes(rows)
            sizes = [y for _, y in sent if y is not None]
            peak = max(figures.values(rows, "memory_bytes"), default=None)
            where = self.run.placed.get(job)
            planned = where.wire_bytes if where is not None else None
            if not sizes and peak is None:
                continue
            curves[job] = _Curve(job, sent)
            mean = sum(sizes) / len(sizes) if sizes else None
            cells = (mean, planned, sum(sizes) if sizes else None, peak)
            shown.append((job, *(_NONE if size is None else format_bytes(size) for size in cells)))
        parts: list[Section] = []
        if shown:
            columns = ("job", "sent a step", "planned", "sent in all", "most memory")
            parts.append(Table(columns=columns, rows=shown))
            told = "What was sent, and memory, are the first worker's; what was planned is of all together."
            parts += [Paragraph(told), *self._plots("Sent a step", "bytes", curves, none=None)]
        parts += self._spilled()
        return [Heading("Bytes"), *parts] if parts else []

    def _spilled(self) -> list[Section]:
        """What jobs that spill read, wrote and held: jobs that take turns have it in common."""
        found: dict[str, Row] = {}
        for job in self.run.jobs:
            task = self.run.task_of(job)
            if job in self.run.results and self.run.results[job].facts:
                found[job if task is None else task.name] = self.run.results[job].facts
        rows = [(name, *row) for name, facts in found.items() for row in figures.foretold(facts)]
        if not rows:
            return []
        return [
            Table(columns=("spilled", "what", "foretold", "measured"), rows=rows),
            Paragraph("Of jobs that take turns it is that of all together, since the last start or restart."),
        ]

    # --- what happened -------------------------------------------------------------------------------

    def _happened(self, title: str, kinds: Iterable[str], *, none: str) -> list[Section]:
        return [Heading(title), *self._table([e for e in self.run.events if e["kind"] in kinds], none)]

    def _asked(self) -> list[Section]:
        if not any(event["kind"] in _ASKED for event in self.run.events):
            return []
        return self._happened("Stopped by the user (Ctrl-C or SIGTERM), and resumed", _ASKED, none="")

    def _others(self) -> list[Section]:
        known = (*_DECISIONS, *_TROUBLE, *_ASKED)
        rest = [event for event in self.run.events if event["kind"] not in known]
        return [Heading("What else happened"), *self._table(rest, "Nothing.")] if rest else []

    def _table(self, events: Sequence[Row], none: str) -> list[Section]:
        if not events:
            return [Paragraph(none)]
        rows: list[tuple[str, ...]] = []
        for event in events:
            at_s = figures.number(event.get("time"))
            facts = {k: v for k, v in event.items() if k not in ("time", "kind", "job", "text")}
            rows.append(
                (
                    _NONE if at_s is None else f"{at_s - self.run.begin_s:.1f}",
                    str(event["kind"]),
                    str(event.get("job", "")),
                    str(event.get("text", "")),
                    ", ".join(f"{name}={str(value)[:200]}" for name, value in facts.items()),
                )
            )
        columns: tuple[str, ...] = ("after s", "what", "job", "why", "facts")
        if not any(facts for *_, facts in rows):
            columns, rows = columns[:-1], [row[:-1] for row in rows]
        return [Table(columns=columns, rows=rows)]

    def _plots(
        self,
        title: str,
        y: str,
        curves: Mapping[str, _Curve],
        *,
        from_zero: bool = True,
        none: str | None = _NOTHING,
    ) -> list[Section]:
        """Curves over steps, those of a few jobs a plot, where a job has the same colour in all of them.

        Each point is the mean of some steps where there are many.
        """
        groups: dict[int, list[tuple[Series, int]]] = {}
        for name, curve in curves.items():
            points, width = figures.thinned(curve.points)
            if any(y is not None for _, y in points):
                place = self.run.jobs.index(curve.job)
                series = Series(name=name, points=points, dashed=curve.dashed, place=place % _CURVES)
                groups.setdefault(place // _CURVES, []).append((series, width))
        parts: list[Section] = []
        for part in groups.values():
            width = max(width for _, width in part)
            means = "" if width == 1 else f", means of up to {width} steps"
            series_of = [series for series, _ in part]
            parts.append(Plot(title=f"{title}{means}", x="step", y=y, series=series_of, from_zero=from_zero))
        return parts or ([] if none is None else [Paragraph(none)])

    # --- the rest ------------------------------------------------------------------------------------

    def _environment(self) -> list[Section]:
        rows = []
        for name, value in self.run.environment.items():
            if isinstance(value, Mapping):
                rows += [(key, str(part)) for key, part in value.items()]
            elif value is not None:
                size = figures.number(value) if name.endswith("_bytes") else None
                said = str(value) if size is None else format_bytes(size)
                rows.append((name.removesuffix("_bytes").replace("_", " "), said))
        if not rows:
            return []
        return [Heading("Environment"), Table(columns=("", ""), rows=rows)]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
