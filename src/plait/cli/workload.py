"""What ``plait plan`` and ``plait sim`` show of several jobs: who runs where and when."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from plait.cli.source import jobs_in
from plait.strategy.figure import figure

if TYPE_CHECKING:
    from plait.cluster import Cluster
    from plait.page import Section
    from plait.strategy import WorkloadPlan
    from plait.strategy.option import StrategyName

_COLUMNS = ("job", "how", "option", "devices", "step ms", "from s", "to s", "done")


def planned(
    file: Path,
    cluster: Cluster,
    *,
    batch: int | None,
    objective: str,
    strategies: tuple[StrategyName, ...],
    cache: Path | None,
) -> WorkloadPlan:
    """The plan of all jobs of a file; what was not measured on this machine is now."""
    from plait.cli.console import status
    from plait.engine.diagnosis import explaining
    from plait.strategy import plan

    jobs = jobs_in(file, None, batch)
    with explaining(jobs), status(f"looking for the profiles of {len(jobs)} jobs") as say:
        return plan(
            jobs,
            cluster,
            objective=objective,  # type: ignore[arg-type]  # which plan checks
            strategies=strategies,
            directory=cache,
            progress=say,
        )


def show(made: WorkloadPlan) -> None:
    """Who runs where and when, the ways that were looked at, and why."""
    from plait.cli.console import print_table

    if made.chosen is not None:
        print_table(f"{made.chosen.name}, by {made.objective}", _COLUMNS, _rows(made))
        ways = [
            [
                "→" if way is made.chosen else "",
                way.name,
                figure(way.makespan_ms / 1e3),
                figure(way.samples_per_s),
            ]
            for way in made.ways
        ]
        bound = ["", "no way beats", figure(made.bound_ms / 1e3), figure(made.bound_samples_per_s)]
        print_table("ways", ["", "way", "makespan s", "samples/s"], [*ways, bound])
    notes = [*made.remarks]
    for comparison in made.comparisons.values():
        notes += comparison.remarks
    lines = [made.why, *(f"note: {note}" for note in dict.fromkeys(notes))]
    if any(placement.how == "background" for placement in made.placements):
        lines.append(
            "done: of a background job, its steps that are over when the last foreground job ends; all is "
            "counted from when workers have started, which takes a background job longer"
        )
    for name in made.unplaced:
        lines += [f"{name}: or {change.text}" for change in made.comparisons[name].changes[1:]]
    sys.stdout.write("\n".join(["", *lines]) + "\n")


def sections(made: WorkloadPlan) -> list[Section]:
    """For a page: the same, the devices over time, and the options of every job."""
    from plait.cli.comparing import sections as compared
    from plait.cli.scenario import Scenario
    from plait.page import Heading, Paragraph, Table
    from plait.timeline.picture import Gantt

    parts: list[Section] = [
        Paragraph(f"{made.why}."),
        *(Paragraph(f"Note: {note}.") for note in made.remarks),
    ]
    if made.chosen is not None:
        parts.append(
            Table(title=f"{made.chosen.name}, by {made.objective}", columns=_COLUMNS, rows=_rows(made))
        )
        parts.append(Gantt(timelines={"planned": made.timeline}))
        rows = [(way.name, way.makespan_ms / 1e3, way.samples_per_s) for way in made.ways]
        rows.append(("no way beats", made.bound_ms / 1e3, made.bound_samples_per_s))
        parts.append(Table(title="Ways", columns=("way", "makespan s", "samples/s"), rows=rows, chosen=0))
    for name, comparison in made.comparisons.items():
        parts.append(Heading(name))
        parts += compared([(Scenario(cluster=made.cluster, batch=None), comparison)])
    return parts


def _rows(made: WorkloadPlan) -> list[list[str]]:
    rows = []
    for placement in made.placements:
        devices = ", ".join(placement.devices[:4]) + (
            f" and {len(placement.devices) - 4} more" if len(placement.devices) > 4 else ""
        )
        step_ms = placement.option.step_ms
        rows.append(
            [
                placement.job,
                placement.how,
                placement.option.name,
                devices,
                "—" if step_ms is None else figure(step_ms),
                figure(placement.start_ms / 1e3),
                figure(placement.end_ms / 1e3),
                f"{placement.done:.0%}",
            ]
        )
    return rows
