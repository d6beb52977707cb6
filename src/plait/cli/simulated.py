"""What ``plait sim`` shows of one job: a table, the last steps in characters, JSON, or a page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plait.cli.scenario import Scenario
from plait.strategy.figure import figure

if TYPE_CHECKING:
    from plait.cli.playing import Disturbance
    from plait.page import Section
    from plait.sim import Played
    from plait.sim.reduction import Estimate
    from plait.strategy import Demand
    from plait.timeline import Timeline

FORMAT = "plait.sim/1"
_TRACKS = 12
"""Of more, a terminal shows so many."""
_COLUMNS = ("step ms", "planned ms", "samples/s", "busy", "wire a step", "events")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is played."""

    demand: Demand
    name: str
    plan: Any
    collective: Estimate | None = None
    planned_ms: float | None = None
    """What the planner said."""
    remarks: tuple[str, ...] = ()
    """What its figures rest on."""

    def play(self, scenario: Scenario, steps: int, by: Disturbance) -> Played:
        """So many steps of it."""
        from plait.cli.playing import play

        return play(
            self.plan, self.demand, scenario.cluster, steps=steps, collective=self.collective, disturbed=by
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of it."""

    scenario: Scenario
    case: Case
    played: Played

    @property
    def notes(self) -> tuple[str, ...]:
        """What was planned and played rests on, and what was decided on the way."""
        return tuple(dict.fromkeys((*self.case.remarks, *self.played.decisions)))

    @property
    def step_ms(self) -> float:
        """The mean step."""
        return self.played.step_ms()

    @property
    def busy(self) -> float:
        """The mean over devices of the share of time that they are busy."""
        shares = [self.played.utilisation(device) for device in self.played.busy_ms]
        return sum(shares) / len(shares)

    @property
    def wire_bytes(self) -> float:
        """What hosts send each other in a step."""
        count = len(next(iter(self.played.steps_ms.values())))
        return sum(self.played.wire_bytes.values()) / count

    @property
    def samples_per_s(self) -> float:
        """Rows a second."""
        return 1e3 * self.case.demand.batch / self.step_ms if self.step_ms else 0.0

    @property
    def row(self) -> list[str]:
        """For a table."""
        from plait.units import format_bytes

        planned = self.case.planned_ms
        return [
            figure(self.step_ms),
            "—" if planned is None else figure(planned),
            figure(self.samples_per_s),
            f"{self.busy:.0%}",
            format_bytes(self.wire_bytes),
            str(self.played.events),
        ]


def show(runs: Sequence[Run], real: Timeline | None) -> None:
    """A table, and of a single run its last two steps."""
    from plait.cli.console import console, print_table
    from plait.cli.playing import device_tracks, last_steps

    first = runs[0]
    columns, rows = _table(runs)
    print_table(_title(first), columns, rows)
    lines = []
    if len(runs) == 1:
        tracks = device_tracks(first.played)
        begin_ms = max(0.0, first.played.makespan_ms - 2 * first.step_ms)
        drawn = last_steps(first.played, begin_ms, tracks[:_TRACKS])
        lines += ["", drawn.draw(min(console().width, 120))]
        lines += [f"and {len(tracks) - _TRACKS} devices more"] if len(tracks) > _TRACKS else []
    for run in runs:
        lines += [f"note: {said}" for said in run.notes]
        lines += [
            f"{name}: {figure(work_ms)} ms of work done beside it"
            for name, work_ms in run.played.work_ms.items()
            if name not in run.played.steps_ms
        ]
    if real is not None:
        off = first.played.timeline.compare(real)
        lines.append(
            f"against the measured timeline: makespan {off.relative_error:+.1%}, "
            f"{off.matched} spans in both, starts {off.start_error_ms:.3g} ms apart"
        )
    sys.stdout.write("\n".join(dict.fromkeys(lines)) + "\n" if lines else "")


def _table(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    rows = [[run.case.name, *run.row] for run in runs]
    if len(runs) == 1:
        return ["option", *_COLUMNS], rows
    labels = [run.scenario.label for run in runs]
    return ["scenario", "option", *_COLUMNS], [[label, *row] for label, row in zip(labels, rows, strict=True)]


def _title(run: Run) -> str:
    count, demand = len(run.played.busy_ms), run.case.demand
    return f"{demand.name}: a step of {demand.batch} rows on {count} device{'s' * (count > 1)}, simulated"


def as_json(runs: Sequence[Run], real: Timeline | None) -> dict[str, Any]:
    """All of it as plain data."""
    shown = [
        {
            "scenario": dict(run.scenario.varied),
            "option": run.case.name,
            "batch": run.case.demand.batch,
            "step_ms": run.step_ms,
            "planned_ms": run.case.planned_ms,
            "samples_per_s": run.samples_per_s,
            "busy": run.busy,
            "wire_bytes": run.wire_bytes,
            "plan": run.case.plan.to_json(),
            "played": run.played.to_json(),
            **({} if real is None else {"measured": run.played.timeline.compare(real).to_json()}),
        }
        for run in runs
    ]
    return {"format": FORMAT, "runs": shown}


def sections(runs: Sequence[Run], real: Timeline | None, steps: int) -> list[Section]:
    """For a page."""
    from plait.cli.playing import device_tracks
    from plait.page import Heading, Paragraph, Table
    from plait.plot import Plot, Series
    from plait.timeline.picture import HOW_TO, Gantt

    columns, rows = _table(runs)
    parts: list[Section] = [
        Paragraph(f"{_title(runs[0])}, {steps} steps."),
        Table(columns=columns, rows=rows),
    ]
    if steps > 1:
        series = [
            Series(
                name=run.scenario.label or run.case.name,
                points=list(enumerate(next(iter(run.played.steps_ms.values())), start=1)),
            )
            for run in runs
        ]
        parts.append(Plot(title="Every step", x="step", y="ms", series=series))
    parts.append(Paragraph(HOW_TO))
    for run in runs:
        if run.scenario.label:
            parts.append(Heading(run.scenario.label))
        parts += [Paragraph(f"Note: {said}.") for said in run.notes]
        shown = {"simulated": run.played.timeline} | ({} if real is None else {"measured": real})
        parts.append(Gantt(timelines=shown, counted=device_tracks(run.played)))
    return parts
