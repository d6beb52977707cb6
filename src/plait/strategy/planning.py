"""What to run where, and why: the entrance for one job or many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from plait.cluster import Cluster
from plait.errors import UsageError
from plait.job import Job
from plait.profile import Profile
from plait.strategy.account import describe
from plait.strategy.codecs import Codecs
from plait.strategy.comparison import STRATEGIES, Comparison, check_cluster, compare_demand
from plait.strategy.demand import Demand
from plait.strategy.option import StrategyName
from plait.strategy.table import Table
from plait.strategy.ways import Ways, only_spills, room
from plait.strategy.workload import Objective, Placement, Way, WorkloadPlan
from plait.units import format_bytes


def plan(
    jobs: Job | Demand | Iterable[Job | Demand],
    cluster: Cluster,
    *,
    profiles: Mapping[str, Profile] | None = None,
    objective: Objective = "makespan",
    strategies: Sequence[StrategyName] = STRATEGIES,
    codecs: Codecs | None = None,
    process_bytes: int = 0,
    directory: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> WorkloadPlan:
    """Compare the strategies for every job, and say who runs where and when.

    Args:
        jobs: One job or several; or what planning needs of them (:class:`plait.strategy.Demand`), for models
            of which there is only a profile.
        cluster: What there is to train on, or might be.
        profiles: By name of the job; what is not there is measured on this machine, once for jobs that are
            alike, and kept in ``directory``.
        objective: ``"makespan"``: the last foreground job is to end as early as can be. ``"throughput"``: as
            many samples a second as can be, all jobs together, background work included.
        strategies: Those to look at, for jobs that leave it open.
        codecs: How fast the devices pack gradients; None measures this machine's processor, once.
        process_bytes: What a worker's process holds by itself, which comes off every device's memory.
        directory: Where what was measured is kept; None is a folder in the user's cache.
        progress: Is told what is being measured.
    """
    if objective not in get_args(Objective):
        raise UsageError(
            f"there is no objective {objective!r}", setting="objective", works=", ".join(get_args(Objective))
        )
    check_cluster(cluster)
    demands = _demands(jobs, cluster, profiles or {}, directory, progress)
    asked: dict[str, Any] = {
        "strategies": strategies,
        "codecs": codecs,
        "directory": directory,
        "process_bytes": process_bytes,
    }
    if len(demands) == 1:
        return _alone(compare_demand(demands[0], cluster, **asked), cluster, objective)
    foreground = [demand for demand in demands if demand.priority == "foreground"]
    background = [demand for demand in demands if demand.priority == "background"]
    if not foreground:  # nobody is to be preferred
        foreground, background = background, []

    known = Table(cluster, background=background, **asked)
    placeable = [demand for demand in foreground if known.options(demand)]
    spilling = [demand for demand in placeable if only_spills(known, demand)]
    if len(spilling) > 1:
        known.crowd(spilling, min(len(spilling), _largest_host(cluster)))
    makes = Ways(known, placeable, background)
    ways = sorted(makes.every(), key=lambda way: _rank(way, objective))
    bound_ms, bound_rate = makes.bound_ms(), makes.bound_rate()
    comparisons = {demand.name: known.comparison(demand) for demand in demands}
    placed = {placement.job for placement in (ways[0].placements if ways else ())}
    unplaced = tuple(demand.name for demand in demands if demand.name not in placed)
    why = describe(ways, objective, bound_ms if objective == "makespan" else bound_rate) if ways else ""
    behind = {demand.name: _left_out(demand, known) for demand in background}
    reasons = [behind[name] if name in behind else comparisons[name].why for name in unplaced]
    why = "; ".join([*([why] if why else []), *reasons])
    return WorkloadPlan(
        cluster=cluster,
        objective=objective,
        ways=tuple(ways),
        comparisons=comparisons,
        bound_ms=bound_ms,
        bound_samples_per_s=bound_rate,
        why=why,
        unplaced=unplaced,
        remarks=(*makes.remarks, *_uneven(cluster)),
    )


def _alone(compared: Comparison, cluster: Cluster, objective: Objective) -> WorkloadPlan:
    """The plan of a single job, by either objective: nothing runs beside it, so its fastest option."""
    demand, option = compared.demand, compared.chosen
    ways: tuple[Way, ...] = ()
    if option is not None:
        end_ms = demand.steps * (option.step_ms or 0.0)
        names = tuple(option.memory_bytes)
        placement = Placement(
            job=demand.name, how="foreground", option=option, devices=names, start_ms=0.0, end_ms=end_ms
        )
        ways = (
            Way(
                name="alone",
                placements=(placement,),
                makespan_ms=end_ms,
                samples_per_s=option.samples_per_s,
            ),
        )
    return WorkloadPlan(
        cluster=cluster,
        objective=objective,
        ways=ways,
        comparisons={demand.name: compared},
        bound_ms=0.0 if option is None else demand.steps * (option.step_ms or 0.0),
        bound_samples_per_s=0.0 if option is None else option.samples_per_s,
        why=compared.why,
        unplaced=() if ways else (demand.name,),
    )


def _left_out(demand: Demand, known: Table) -> str:
    """Why a background job is not placed."""
    head = f"background job {demand.name!r} runs on one device"
    need, may = demand.alone_bytes, room(demand, known)
    if need > may:
        return f"{head}, where it would hold {format_bytes(need)}, and may hold {format_bytes(may)} at most"
    return f"{head} beside others, and no foreground job can be placed"


def _largest_host(cluster: Cluster) -> int:
    """Devices of the host that has most."""
    return max(len(cluster.devices_of(host.name)) for host in cluster.hosts)


def _rank(way: Way, objective: Objective) -> float:
    return way.makespan_ms if objective == "makespan" else -way.samples_per_s


def _uneven(cluster: Cluster) -> list[str]:
    """What to say of devices that are not alike."""
    kinds = {(device.memory_bytes, device.gflops, device.kind) for device in cluster.devices}
    if len(kinds) == 1:
        return []
    return [f"the {len(cluster.devices)} devices are not alike: times on k of them are those of the first k"]


def _demands(
    jobs: Job | Demand | Iterable[Job | Demand],
    cluster: Cluster,
    profiles: Mapping[str, Profile],
    directory: str | Path | None,
    progress: Callable[[str], None] | None,
) -> list[Demand]:
    given = [jobs] if isinstance(jobs, (Job, Demand)) else list(jobs)
    for job in given:
        if not isinstance(job, (Job, Demand)):
            raise UsageError(f"{job!r} is no job", setting="jobs", works="plait.Job(...), or a list of them")
    if not given:
        raise UsageError("there are no jobs to plan", setting="jobs", works="at least one")
    names = [job.name for job in given]
    for name in names:
        if names.count(name) > 1:
            what = f"{names.count(name)} jobs are named {name!r}"
            raise UsageError(what, setting="jobs.name", works=f"{name}-2")
    for name in profiles:
        if name not in names:
            what = f"a profile of {name!r}, which is no job here"
            raise UsageError(what, setting="profiles", works=", ".join(names))
    return [_demand(job, len(cluster.devices), profiles, directory, progress) for job in given]


def _demand(
    job: Job | Demand,
    devices: int,
    profiles: Mapping[str, Profile],
    directory: str | Path | None,
    progress: Callable[[str], None] | None,
) -> Demand:
    if isinstance(job, Demand):
        return replace(job, profile=profiles[job.name]) if job.name in profiles else job
    from plait.strategy.measuring import profile_of, steps_of

    found = profiles.get(job.name)
    if found is None:
        found = profile_of(job, devices=devices, directory=directory, progress=progress)
    return Demand.of(job, found, steps=steps_of(job))
