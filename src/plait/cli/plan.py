"""``plait plan``: which strategy fits a job, or many, and what it would take, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli import EXIT_FAILED
from plait.cli.scenario import (
    LATENCY,
    RATE,
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
    from plait.page import Section
    from plait.strategy import Comparison, Demand
    from plait.strategy.kept_plan import KeptPlan
    from plait.strategy.option import StrategyName

STRATEGIES = ("auto", "data", "pipeline", "burst", "spill")


def plan(
    file: Annotated[Path, typer.Argument(help="A jobs file (.py or .json), or a profile (.json).")],
    strategy: Annotated[
        str | None,
        typer.Option(help="auto (compare all), data, pipeline, burst or spill. (default: auto)"),
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
    job: Annotated[str | None, typer.Option(help="One job of the file; default: all.")] = None,
    objective: Annotated[str, typer.Option(help="Of several jobs: makespan or throughput.")] = "makespan",
    optimizer: Annotated[
        str | None,
        typer.Option(help="sgd, momentum, adam or adamw: whose state to count, not the profile's."),
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option(help="burst: the fastest plan within so many times the device time of one device."),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(help="burst: the cheapest plan whose step takes so long at most, such as 80ms."),
    ] = None,
    background_value: Annotated[
        float | None,
        typer.Option(help="burst: the best total, where idle devices do other work of this value."),
    ] = None,
    widths: Annotated[str | None, typer.Option(help="burst: widths to choose from, as in 1,2,4,8.")] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Where profiles of jobs are kept (default: in the user's cache).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Draw a step of the plan: .svg, .html, or .json for Perfetto.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with tables, plots and a step.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Compare the strategies for a job on a cluster that is there or not, and say what to run and why."""
    from plait.cli.playing import check_drawing
    from plait.cli.source import demand_of, kind_of, profile_in, several
    from plait.destination import check_file
    from plait.strategy.figure import readable

    for path, setting in ((out, "--out"), (html, "--html")):
        if path is not None:
            check_file(path, setting=setting)
    if timeline is not None:
        check_drawing(timeline)
    burst = {
        "limit": limit,
        "deadline": deadline,
        "background_value": background_value,
        "widths": widths,
    }
    chosen = _strategy(strategy, burst)
    here = machine_for(file, job, (cluster, devices, rate, latency, memory, hosts, disk, kind))
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
    results = _Results(out=out, timeline=timeline, html=html, as_json=as_json)
    results.check(found)
    if job is None and several(file):
        _plan_many(file, only(found), chosen, objective, cache, results)
        return
    uniform = all(given is None for given in (cluster, hosts, disk, optimizer, kind))
    if uniform and len(found) == 1 and chosen in ("burst", "pipeline") and profile_in(file) is not None:
        demand = demand_of(file, job=job, batch=found[0].batch, optimizer=None, devices=1)
        figures = {
            "devices": len(found[0].cluster.devices),
            "bandwidth": rate[0] if rate else RATE,
            "latency": latency[0] if latency else LATENCY,
            "memory": memory[0] if memory else None,
        }
        view = _plan_burst if chosen == "burst" else _plan_pipeline
        try:
            view(demand, found[0], figures, burst, results)
        except UsageError as error:
            raise type(error)(error.what, setting=error.setting, works=readable(error.works)) from None
        return
    _refuse(burst, "one cluster given by --devices, --rate, --latency and --memory alone")
    _show_compared([_compared(file, one, chosen, job, optimizer, cache) for one in found], results)


def _strategy(given: str | None, burst: dict[str, Any]) -> str:
    """The strategy asked for; options that only burst has ask for it."""
    chosen = given or ("burst" if any(value is not None for value in burst.values()) else "auto")
    check_strategy(chosen)
    if chosen != "burst":
        _refuse(burst, "--strategy burst")
    return chosen


def check_strategy(name: str) -> None:
    """Refuse one that does not exist."""
    if name not in STRATEGIES:
        raise UsageError(f"there is no strategy {name!r}", setting="--strategy", works=", ".join(STRATEGIES))


def _refuse(burst: dict[str, Any], works: str) -> None:
    for name, value in burst.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is for burst", setting=option, works=works)


class _Results:
    """Where results go."""

    def __init__(self, *, out: Path | None, timeline: Path | None, html: Path | None, as_json: bool) -> None:
        self.out, self.timeline, self.html, self.as_json = out, timeline, html, as_json

    def check(self, found: list[Scenario]) -> None:
        """Refuse files for one plan where there are several."""
        for path, setting in ((self.out, "--out"), (self.timeline, "--timeline")):
            if path is not None and len(found) > 1:
                raise UsageError(
                    f"{len(found)} scenarios have no one plan",
                    setting=setting,
                    works="one value of each option",
                )

    def write(
        self,
        title: str,
        sections: list[Section],
        kept: KeptPlan | None,
        demand: Demand,
        scenario: Scenario,
        collective: Any = None,
    ) -> None:
        """The plan, a step of it, and the page."""
        if self.out is not None and kept is not None:
            kept.save(self.out)
        if self.timeline is None and self.html is None:
            return
        from plait.cli.playing import device_tracks, play

        drawn: list[Section] = []
        if kept is not None:
            from plait.page import Heading
            from plait.timeline.picture import Gantt

            played = play(kept.plan, demand, scenario.cluster, steps=2, collective=collective)
            if self.timeline is not None:
                played.timeline.export(self.timeline)
            gantt = Gantt(timelines={"simulated": played.timeline}, counted=device_tracks(played))
            drawn = [Heading("Two steps of the plan, simulated"), gantt]
        if self.html is not None:
            from plait.page import save

            save(self.html, title, [*sections, *drawn])


def _plan_burst(
    demand: Demand, scenario: Scenario, figures: dict[str, Any], asked: dict[str, Any], results: _Results
) -> None:
    from plait.cli import plan_burst as view
    from plait.strategy.kept_plan import KeptPlan

    frontier = view.planned(
        demand.profile,
        batch=demand.batch,
        **figures,
        widths=None if asked["widths"] is None else view.widths_of(asked["widths"]),
        limit=asked["limit"],
        deadline_ms=None if asked["deadline"] is None else view.milliseconds(asked["deadline"]),
        background_value=asked["background_value"],
    )
    if results.as_json:
        view.print_frontier(frontier)
    else:
        view.show(frontier, demand.profile)
    title = f"{demand.name}: how wide each block pays"
    results.write(title, view.sections(frontier), KeptPlan(plan=frontier.chosen), demand, scenario)


def _plan_pipeline(
    demand: Demand, scenario: Scenario, figures: dict[str, Any], asked: dict[str, Any], results: _Results
) -> None:
    from plait.cli import plan_pipeline as view
    from plait.strategy.kept_plan import KeptPlan

    made = view.planned(demand.profile, batch=demand.batch, **figures)
    view.show(made, demand.profile, results.as_json)
    title = f"{demand.name}: {len(made.stages)} stages"
    results.write(title, view.sections(made, demand.profile), KeptPlan(plan=made), demand, scenario)


def _compared(
    file: Path,
    scenario: Scenario,
    strategy: str,
    job: str | None,
    optimizer: str | None,
    cache: Path | None,
) -> tuple[Scenario, Comparison]:
    from plait.cli.console import status
    from plait.cli.source import demand_of
    from plait.strategy.comparison import compare_demand

    demand = demand_of(
        file,
        job=job,
        batch=scenario.batch,
        optimizer=optimizer,
        devices=len(scenario.cluster.devices),
        cache=cache,
    )
    with status(f"comparing ways to train {demand.name}"):
        made = compare_demand(demand, scenario.cluster, strategies=strategies_of(strategy), directory=cache)
        return scenario, made


def strategies_of(strategy: str) -> tuple[StrategyName, ...]:
    """Those to look at."""
    from plait.strategy.comparison import STRATEGIES as EVERY

    return EVERY if strategy == "auto" else tuple(name for name in EVERY if name == strategy)


def _show_compared(found: list[tuple[Scenario, Comparison]], results: _Results) -> None:
    from plait.cli import comparing
    from plait.cli.console import print_json
    from plait.strategy.kept_plan import KeptPlan

    if results.as_json:
        print_json(comparing.as_json(found))
    elif len(found) == 1:
        comparing.show(*found[0])
    else:
        comparing.show_what_if(found)
    scenario, comparison = found[0]
    option = comparison.chosen if len(found) == 1 else None
    results.write(
        f"{comparison.demand.name}: what to run",
        comparing.sections(found),
        None if option is None else KeptPlan.of(option),
        comparison.demand,
        scenario,
        None if option is None else option.collective,
    )
    if all(comparison.chosen is None for _, comparison in found):
        raise typer.Exit(EXIT_FAILED)


def _plan_many(
    file: Path, scenario: Scenario, strategy: str, objective: str, cache: Path | None, results: _Results
) -> None:
    import json

    from plait.cli import workload
    from plait.cli.console import print_json
    from plait.destination import write_text
    from plait.page import save

    made = workload.planned(
        file,
        scenario.cluster,
        batch=scenario.batch,
        objective=objective,
        strategies=strategies_of(strategy),
        cache=cache,
    )
    if results.as_json:
        print_json(made.to_json())
    else:
        workload.show(made)
    if results.out is not None:
        write_text(results.out, json.dumps(made.to_json(), indent=1) + "\n", setting="--out")
    if results.timeline is not None:
        made.timeline.export(results.timeline)
    if results.html is not None:
        save(results.html, f"{len(made.comparisons)} jobs: who runs where and when", workload.sections(made))
    if made.chosen is None:
        raise typer.Exit(EXIT_FAILED)
