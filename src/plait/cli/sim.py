"""``plait sim``: plays a plan on a modelled cluster, and says what a run would take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli.scenario import (
    Batch,
    ClusterFile,
    Devices,
    DiskRate,
    Hosts,
    Kind,
    Latency,
    Memory,
    Rate,
    Scenario,
    machine_for,
    only,
    scenarios,
)
from plait.errors import UsageError

if TYPE_CHECKING:
    from plait.cli.played_workload import PlayedWorkload
    from plait.cli.playing import Disturbance
    from plait.cli.simulated import Case
    from plait.cluster import Cluster
    from plait.page import Section
    from plait.strategy.kept_plan import KeptPlan
    from plait.strategy.kept_workload import KeptWorkload
    from plait.timeline import Timeline


def sim(
    file: Annotated[Path, typer.Argument(help="A jobs file (.py or .json), or a profile (.json).")],
    strategy: Annotated[
        str, typer.Option(help="auto (the fastest), data, pipeline, burst or spill.")
    ] = "auto",
    option: Annotated[
        str | None, typer.Option(help="One of its options, such as 'data, 4 bits'; default: the fastest.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Play this plan, as `plait plan --out` wrote it, and plan nothing.")
    ] = None,
    devices: Devices = None,
    batch: Batch = None,
    rate: Rate = None,
    latency: Latency = None,
    memory: Memory = None,
    hosts: Hosts = None,
    disk: DiskRate = None,
    kind: Kind = None,
    cluster: ClusterFile = None,
    job: Annotated[
        str | None, typer.Option(help="Which job of the file; needed where there are several.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to play; the first is not counted in the mean.")] = 3,
    seed: Annotated[int, typer.Option(help="Of what is random; the same seed, the same run.")] = 0,
    jitter: Annotated[float, typer.Option(help="Spread of computing times, such as 0.05.")] = 0.0,
    trace: Annotated[
        Path | None, typer.Option(help="How the hosts' rates change over time, as `plait lab` plays it.")
    ] = None,
    straggler: Annotated[
        list[str] | None, typer.Option(help="A device and its speed, such as 1=0.5. May be repeated.")
    ] = None,
    background: Annotated[
        str | None, typer.Option(help="Other work on idle devices, in units of so long, such as 20ms.")
    ] = None,
    adaptive: Annotated[bool, typer.Option(help="pipeline: let the tuner choose the order.")] = False,
    measured: Annotated[
        Path | None,
        typer.Option(help="A run's directory, or a timeline (.json), to compare with and to draw below."),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Where profiles of jobs are kept (default: in the user's cache).")
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write the timeline: .svg, .html, or .json for Perfetto.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with tables, plots and a timeline.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Play a plan step by step on a cluster that is there or not, and see what a run would take."""
    from plait.cli import simulated
    from plait.cli.console import status
    from plait.cli.plan import check_strategy
    from plait.cli.playing import check_drawing
    from plait.cli.simulated import Run
    from plait.cli.source import kind_of, several
    from plait.destination import check_file
    from plait.strategy.kept_workload import KeptWorkload
    from plait.units import parse_whole

    check_strategy(strategy)
    parse_whole(steps, setting="--steps")
    if timeline is not None:
        check_drawing(timeline)
    if html is not None:
        check_file(html, setting="--html")
    real = None if measured is None else _measured(measured, job, steps)
    workload = None if plan is None else KeptWorkload.read(plan)
    given = None if workload is not None else _planned_already(plan, batch)
    here = machine_for(file, job, (cluster, devices, rate, latency, memory, hosts, disk, kind))
    if here is not None and not _made_for(here, workload, given):
        here = None
    if workload is not None:
        devices = devices or [len(workload.devices)]
        if batch is not None:
            raise UsageError(f"{plan} has the batch of each job", setting="--batch", works="no --batch")
    if given is not None:
        devices = devices or [given.devices]
        batch = batch if given.batch is None else [given.batch]
    found = scenarios(
        file=cluster,
        here=here,
        devices=devices,
        batch=batch,
        rate=rate,
        latency=latency,
        memory=memory,
        hosts=hosts,
        disk=disk,
        kind=kind if cluster is not None else kind or kind_of(file),
    )
    if timeline is not None and len(found) > 1:
        raise UsageError(
            f"{len(found)} scenarios have no one timeline", setting="--timeline", works="one value of each"
        )
    disturbed = _Disturbed(
        seed=seed,
        jitter=jitter,
        trace=trace,
        stragglers=tuple(straggler or ()),
        background=background,
        adaptive=adaptive,
    )
    if workload is not None or (given is None and job is None and several(file)):
        if real is not None:
            what = "what was measured is compared with one job's steps, and these are several jobs"
            raise UsageError(what, setting="--measured", works="--job and the name of one")
        made = _play_many(file, only(found), strategy, workload, steps, disturbed, cache)
        if timeline is not None:
            made.timeline.export(timeline)
        _tell(made.as_json(), made.show, "Jobs, simulated", made.sections, html, as_json)
        return
    known = [disturbed.on(scenario.cluster) for scenario in found]  # refused before anything is planned
    runs = []
    for scenario, by in zip(found, known, strict=True):
        case = _chosen(file, scenario, strategy, option, job, cache, given)
        with status(_playing(steps, case.name, scenario)):
            played = case.play(scenario, steps, by)
        runs.append(Run(scenario=scenario, case=case, played=played))
    if timeline is not None and real is None:
        runs[0].played.timeline.export(timeline)
    elif timeline is not None and real is not None:
        real.export(timeline, predicted=runs[0].played.timeline)
    _tell(
        simulated.as_json(runs, real),
        lambda: simulated.show(runs, real),
        f"{runs[0].case.demand.name}, simulated",
        lambda: simulated.sections(runs, real, steps),
        html,
        as_json,
    )


def _playing(steps: int, name: str, scenario: Scenario) -> str:
    """What is being done: many steps on many devices take their time."""
    which = f" ({scenario.label})" if scenario.label else ""
    return f"playing {steps} step{'s' * (steps > 1)} of {name}{which}"


def _tell(
    data: dict[str, Any],
    show: Callable[[], None],
    title: str,
    sections: Callable[[], list[Section]],
    html: Path | None,
    as_json: bool,
) -> None:
    """Print the result, and write the page."""
    if as_json:
        from plait.cli.console import print_json

        print_json(data)
    else:
        show()
    if html is not None:
        from plait.page import save

        save(html, title, sections())


def _measured(path: Path, job: str | None, steps: int) -> Timeline:
    """A timeline that was saved, or the last steps of a run."""
    from plait.timeline import Timeline

    if not path.is_dir():
        return Timeline.load(path)
    from plait.engine.reading import Reading
    from plait.engine.record import Record

    return Reading.of(Record.read(path)).last_steps(job, steps)


def _planned_already(file: Path | None, batch: list[int] | None) -> KeptPlan | None:
    from plait.strategy.kept_plan import KeptPlan

    if file is None:
        return None
    kept = KeptPlan.load(file)
    if kept.batch is not None and batch and batch != [kept.batch]:
        raise UsageError(f"{file} is a plan for {kept.batch} rows", setting="--batch", works=str(kept.batch))
    return kept


def _made_for(here: Cluster, workload: KeptWorkload | None, given: KeptPlan | None) -> bool:
    """Whether a plan that was kept, if there is one, can be for this machine."""
    if workload is not None:
        return set(workload.devices) <= {device.name for device in here.devices}
    return given is None or given.devices <= len(here.devices)


def _chosen(
    file: Path,
    scenario: Scenario,
    strategy: str,
    option: str | None,
    job: str | None,
    cache: Path | None,
    given: KeptPlan | None,
) -> Case:
    """The plan to play: the one given, or the fastest that can be had."""
    from plait.cli.console import status
    from plait.cli.plan import strategies_of
    from plait.cli.simulated import Case
    from plait.cli.source import demand_of
    from plait.strategy.comparison import compare_demand

    demand = demand_of(
        file,
        job=job,
        batch=scenario.batch,
        optimizer=None,
        devices=len(scenario.cluster.devices),
        cache=cache,
    )
    if given is not None:
        return Case(
            demand=demand,
            name="the plan given",
            plan=given.plan,
            collective=given.collective(demand.profile, scenario.cluster, directory=cache),
        )
    with status(f"comparing ways to train {demand.name}"):
        comparison = compare_demand(
            demand, scenario.cluster, strategies=strategies_of(strategy), directory=cache
        )
    if option is None and len(comparison.options) == 1:
        option = comparison.options[0].name
    chosen = comparison.chosen if option is None else comparison.option(option)
    if chosen is None:
        works = comparison.changes[0].text if comparison.changes else "another cluster"
        raise UsageError(comparison.why, setting="--memory, --devices, --batch", works=works)
    if chosen.plan is None:
        raise UsageError(
            f"{chosen.name}: {chosen.why_not}", setting="--strategy, --option", works=chosen.works
        )
    return Case(
        demand=demand,
        name=chosen.name,
        plan=chosen.plan,
        collective=chosen.collective,
        planned_ms=chosen.step_ms,
        remarks=(*comparison.remarks, *chosen.remarks),
    )


@dataclass(frozen=True, kw_only=True)
class _Disturbed:
    """What is to disturb a run, as it was asked for."""

    seed: int
    jitter: float
    trace: Path | None
    stragglers: tuple[str, ...]
    background: str | None
    adaptive: bool

    def on(self, cluster: Cluster) -> Disturbance:
        """On a cluster, whose devices and hosts it may name."""
        from plait.cli.playing import Disturbance, stragglers
        from plait.sim.device import MOST_JITTER

        if not 0 <= self.jitter <= MOST_JITTER:
            works = f"0.05, {MOST_JITTER:g} at most"
            raise UsageError(f"a jitter of {self.jitter}", setting="--jitter", works=works)
        by = Disturbance(
            seed=self.seed,
            jitter=self.jitter,
            speeds=stragglers(self.stragglers, cluster),
            adaptive=self.adaptive,
        )
        if self.trace is not None:
            from plait.lab.trace import Trace
            from plait.sim.trace import host_traces

            by = replace(by, traces=host_traces(Trace.load(self.trace), cluster))
        if self.background is not None:
            from plait.sim import Background
            from plait.units import parse_seconds

            try:
                unit_ms = 1e3 * parse_seconds(self.background)
                by = replace(by, background=(Background(name="background", unit_ms=unit_ms),))
            except UsageError as error:
                raise UsageError(error.what, setting="--background", works="20ms") from None
        return by


def _play_many(
    file: Path,
    scenario: Scenario,
    strategy: str,
    kept: KeptWorkload | None,
    steps: int,
    disturbed: _Disturbed,
    cache: Path | None,
) -> PlayedWorkload:
    from plait.cli import workload
    from plait.cli.console import status
    from plait.cli.plan import strategies_of
    from plait.cli.played_workload import Workload, played

    by = disturbed.on(scenario.cluster)
    if kept is not None:
        whole = Workload.kept(kept, file, scenario.cluster, cache)
    else:
        made = workload.planned(
            file,
            scenario.cluster,
            batch=scenario.batch,
            objective="makespan",
            strategies=strategies_of(strategy),
            cache=cache,
        )
        whole = Workload.of(made)
    with status(_playing(steps, f"{len(whole.demands)} jobs", scenario)):
        return played(whole, steps=steps, disturbed=by)
