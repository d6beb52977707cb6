"""What ``plait sim`` shows of several jobs: every placement of their plan, played on its own devices."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.errors import UsageError
from plait.strategy.figure import figure

if TYPE_CHECKING:
    from plait.cli.playing import Disturbance
    from plait.cluster import Cluster
    from plait.page import Section
    from plait.sim import Background, Played
    from plait.strategy import Demand, Placement, Way, WorkloadPlan
    from plait.strategy.kept_workload import KeptWorkload
    from plait.timeline import Timeline

FORMAT = "plait.sim.workload/1"
_COLUMNS = ("job", "how", "option", "devices", "planned ms", "step ms", "error")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is played: jobs, and who of them runs where and when."""

    way: Way
    demands: Mapping[str, Demand]
    cluster: Cluster
    why: str
    data: Mapping[str, Any]
    """The plan as plain data."""

    @classmethod
    def of(cls, plan: WorkloadPlan) -> Workload:
        """A plan that has just been made."""
        if plan.chosen is None:
            raise UsageError(plan.why, setting="--memory, --devices, --batch", works="what fits a job")
        demands = {name: made.demand for name, made in plan.comparisons.items()}
        return cls(way=plan.chosen, demands=demands, cluster=plan.cluster, why=plan.why, data=plan.to_json())

    @classmethod
    def kept(cls, kept: KeptWorkload, file: Path, cluster: Cluster, cache: Path | None) -> Workload:
        """A plan that was made before for the jobs of a file."""
        from plait.cli.source import demand_of
        from plait.strategy.kept_plan import KeptPlan

        for one in kept.way.placements:
            for name in one.devices:
                cluster.device(name)  # says which there are
        demands = {
            name: demand_of(
                file, job=name, batch=batch, optimizer=None, devices=len(kept.devices), cache=cache
            )
            for name, batch in kept.batches.items()
        }
        placements = []
        for one in kept.way.placements:
            plan, its = KeptPlan.of(one.option), demands[one.job].profile
            assert plan is not None, "every placement in a file has one"
            through = plan.collective(its, cluster, directory=cache)
            placements.append(replace(one, option=replace(one.option, collective=through)))
        way = replace(kept.way, placements=tuple(placements))
        return cls(way=way, demands=demands, cluster=cluster, why=kept.why, data=kept.data)


@dataclass(frozen=True, kw_only=True)
class PlayedWorkload:
    """The plan of several jobs, and what came of playing it."""

    plan: Workload
    runs: tuple[tuple[tuple[Placement, ...], Played], ...]
    """Placements that were played together, and what came of them."""

    @property
    def timeline(self) -> Timeline:
        """All of them, each beginning at zero, on tracks that begin with the jobs' names."""
        from plait.timeline import Timeline

        names = [" and ".join(one.job for one in placements) for placements, _ in self.runs]
        return Timeline.merge([played.timeline for _, played in self.runs], names=names)

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        runs = [
            {"jobs": [one.job for one in placements], "played": played.to_json()}
            for placements, played in self.runs
        ]
        return {"format": FORMAT, "plan": dict(self.plan.data), "runs": runs}

    def show(self) -> None:
        """A table: what was planned, and what came of it."""
        from plait.cli.console import print_table

        print_table("planned and simulated steps", _COLUMNS, self._rows())
        notes = dict.fromkeys(said for _, played in self.runs for said in played.decisions)
        lines = [f"planned: {self.plan.why}", *(f"note: {said}" for said in notes), *self._beside()]
        sys.stdout.write("\n".join(["", *lines]) + "\n")

    def sections(self) -> list[Section]:
        """For a page: the plan, and a timeline of every run."""
        from plait.cli.playing import device_tracks
        from plait.page import Heading, Paragraph, Table
        from plait.timeline.picture import Gantt

        parts: list[Section] = [
            Paragraph(f"Planned: {self.plan.why}."),
            Table(title="Planned and simulated steps", columns=_COLUMNS, rows=self._rows()),
            *(Paragraph(f"{said}.") for said in self._beside()),
            Gantt(timelines={"planned": self.plan.way.timeline}),
        ]
        for placements, played in self.runs:
            parts.append(Heading(" and ".join(one.job for one in placements)))
            parts += [Paragraph(f"Note: {said}.") for said in played.decisions]
            parts.append(Gantt(timelines={"simulated": played.timeline}, counted=device_tracks(played)))
        return parts

    def _rows(self) -> list[list[str]]:
        rows = []
        for placements, played in self.runs:
            for one in placements:
                step_ms, planned_ms = played.step_ms(one.job), one.option.step_ms or 0.0
                # Of jobs that take turns a step also waits for the others' turns.
                error = "—" if one.how == "alternated" else f"{step_ms / planned_ms - 1:+.1%}"
                figures = [figure(planned_ms), figure(step_ms), error]
                rows.append([one.job, one.how, one.option.name, str(len(one.devices)), *figures])
        return rows

    def _beside(self) -> Iterator[str]:
        for placements, played in self.runs:
            for name, work_ms in played.work_ms.items():
                if name not in played.steps_ms:
                    beside = " and ".join(one.job for one in placements)
                    share = work_ms / played.makespan_ms if played.makespan_ms else 0.0
                    got = f"{100 * share:.3g}% of a device's time" if share else "no time at all"
                    yield f"{name}: {got} beside {beside}"


def played(plan: Workload, *, steps: int, disturbed: Disturbance) -> PlayedWorkload:
    """Play some steps of every job on the devices that the plan gives it.

    A background job is played beside the foreground jobs on its device, and by itself where there are none.
    """
    from plait.cli.playing import play, play_together
    from plait.spill.plan import SpillPlan

    runs: list[tuple[tuple[Placement, ...], Played]] = []
    placements = plan.way.placements
    turns = tuple(one for one in placements if one.how == "alternated")
    beside = {work.name for one in placements for work in _beside(plan, one)}
    for one in placements:
        if one.how == "foreground" or (one.how == "background" and one.job not in beside):
            demand, cluster = plan.demands[one.job], _on(plan.cluster, one.devices)
            by = _of(disturbed, one.devices, _beside(plan, one))
            done = play(
                one.option.plan, demand, cluster, steps=steps, collective=one.option.collective, disturbed=by
            )
            runs.append(((one,), done))
    if turns:
        plans = [
            (plan.demands[one.job], one.option.plan)
            for one in turns
            if isinstance(one.option.plan, SpillPlan)
        ]
        by = _of(disturbed, turns[0].devices, ())
        together = play_together(plans, _on(plan.cluster, turns[0].devices), steps=steps, disturbed=by)
        runs.append((turns, together))
    return PlayedWorkload(plan=plan, runs=tuple(runs))


def _on(cluster: Cluster, names: tuple[str, ...]) -> Cluster:
    """The cluster with these devices alone, in this order."""
    return replace(cluster, devices=tuple(cluster.device(name) for name in names))


def _of(disturbed: Disturbance, names: tuple[str, ...], beside: tuple[Background, ...]) -> Disturbance:
    speeds = {name: speed for name, speed in disturbed.speeds.items() if name in names}
    return replace(disturbed, speeds=speeds, background=(*disturbed.background, *beside))


def _beside(plan: Workload, placement: Placement) -> tuple[Background, ...]:
    """The background jobs that are on a foreground job's devices while it is."""
    from plait.sim import Background

    found = []
    for other in plan.way.placements if placement.how == "foreground" else ():
        places = tuple(place for place, name in enumerate(placement.devices) if name in other.devices)
        overlaps = other.start_ms < placement.end_ms and placement.start_ms < other.end_ms
        if other.how == "background" and places and overlaps:
            unit_ms = plan.demands[other.job].alone_ms
            found.append(Background(name=other.job, unit_ms=unit_ms, devices=places))
    return tuple(found)
