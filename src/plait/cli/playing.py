"""Plays whatever plan there is with the player of its strand, and what disturbs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.errors import UsageError

if TYPE_CHECKING:
    from plait.cluster import Cluster
    from plait.sim import Background, Played, Trace
    from plait.sim.reduction import Estimate
    from plait.spill.plan import SpillPlan
    from plait.strategy import Demand
    from plait.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """What a run would meet that a plan does not know of."""

    seed: int = 0
    jitter: float = 0.0
    """Relative spread of what devices compute."""
    traces: Mapping[str, Trace] = field(default_factory=dict)
    """By host, the share of its network that others leave."""
    speeds: Mapping[str, float] = field(default_factory=dict)
    """By device."""
    background: tuple[Background, ...] = ()
    adaptive: bool = False
    """Whether the tuner chooses the order of a pipeline, step by step."""


def play(
    plan: Any,
    demand: Demand,
    cluster: Cluster,
    *,
    steps: int,
    collective: Estimate | None = None,
    disturbed: Disturbance | None = None,
) -> Played:
    """Play so many steps of a plan of any strand."""
    from plait.burst.burst_plan import BurstPlan
    from plait.pipeline.plan import PipelinePlan
    from plait.sim import DataPlan, play_burst, play_data, play_pipeline
    from plait.sim.adapting import play_adaptive
    from plait.spill.plan import SpillPlan

    by = Disturbance() if disturbed is None else disturbed
    common: dict[str, Any] = {
        "steps": steps,
        "seed": by.seed,
        "jitter": by.jitter,
        "speeds": by.speeds,
        "background": by.background,
        "name": demand.name,
    }
    if by.adaptive and not isinstance(plan, PipelinePlan):
        raise UsageError(
            "only a pipeline has a tuner that adapts it", setting="--adaptive", works="--strategy pipeline"
        )
    if isinstance(plan, SpillPlan):
        return play_together([(demand, plan)], cluster, steps=steps, disturbed=by)
    common["traces"] = by.traces
    if isinstance(plan, PipelinePlan):
        player = play_adaptive if by.adaptive else play_pipeline
        return player(plan, demand.profile, cluster, **common)
    if isinstance(plan, BurstPlan):
        return play_burst(plan, demand.profile, cluster, collective=collective, **common)
    assert isinstance(plan, DataPlan), "there are four strands"
    return play_data(plan, demand.profile, cluster, collective=collective, **common)


def play_together(
    plans: Sequence[tuple[Demand, SpillPlan]], cluster: Cluster, *, steps: int, disturbed: Disturbance
) -> Played:
    """Play spilled jobs that take turns on the devices of a cluster, with the disk of the first."""
    from plait.sim import play_spill
    from plait.sim.spilled_job import SpilledJob
    from plait.spill.makespan import Disk
    from plait.spill.policies import Sticky
    from plait.strategy.spilled import Tiers

    first = cluster.devices[0]
    disk = Tiers.of(cluster, first.name, first.memory_bytes).disk
    assert disk.read_bytes_per_s is not None, "checked when it was looked up"
    assert disk.write_bytes_per_s is not None, "checked when it was looked up"
    jobs = [
        SpilledJob(
            name=demand.name,
            plan=plan,
            profile=demand.profile,
            batch=demand.batch,
            steps=steps,
            micro_batches=demand.accumulate,
        )
        for demand, plan in plans
    ]
    at_once = min(len(cluster.devices), len(jobs))
    below = Disk(
        memory_bytes=at_once * max(plan.arena_bytes for _, plan in plans),
        read_bytes_per_s=disk.read_bytes_per_s,
        write_bytes_per_s=disk.write_bytes_per_s,
    )
    speeds = {
        place: disturbed.speeds[device.name]
        for place, device in enumerate(cluster.devices)
        if device.name in disturbed.speeds
    }
    return play_spill(
        jobs,
        at_once,
        Sticky(),
        below,
        speeds=speeds,
        jitter=disturbed.jitter,
        background=disturbed.background,
        seed=disturbed.seed,
    )


def check_drawing(path: Path) -> None:
    """Refuse a file that no timeline can be written to."""
    from plait.destination import check_file

    if path.suffix not in (".svg", ".html", ".json"):
        raise UsageError(
            f"no picture or trace has names that end in {path.suffix!r}",
            setting="--timeline",
            works="a name that ends in .svg, .html or .json (Perfetto)",
        )
    check_file(path, setting="--timeline")


def stragglers(words: Iterable[str], cluster: Cluster) -> dict[str, float]:
    """Devices and their speeds, from ``node1/0=0.5`` or ``1=0.5`` (the second device at half its speed)."""
    names = [device.name for device in cluster.devices]
    found = {}
    for word in words:
        name, sign, speed = word.rpartition("=")
        try:
            figure = float(speed)
        except ValueError:
            figure = 0.0
        if not sign or not 0 < figure < float("inf"):
            raise UsageError(
                f"{word!r} is no device with a speed",
                setting="--straggler",
                works=f"{len(names) - 1}=0.5 or {names[-1]}=0.5",
            )
        place = int(name) if name.isdecimal() else None
        if place is not None and place < len(names):
            name = names[place]
        if name not in names:
            known = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise UsageError(f"there is no device {name!r}", setting="--straggler", works=f"0, or {known}")
        found[name] = figure
    return found


def device_tracks(played: Played) -> list[str]:
    """The tracks of a timeline that are devices, not wires or disks."""
    import re

    tracks = played.timeline.tracks
    return [track for track in tracks if track in played.busy_ms or re.fullmatch(r"(stage|device)\d+", track)]


_KINDS = {"F": "forward", "B": "backward", "T": "turn"}


def last_steps(played: Played, begin_ms: float, tracks: Sequence[str]) -> Timeline:
    """What a terminal shows: some tracks from a moment on, with kinds in the place of names."""
    from plait.timeline import Span, Timeline
    from plait.timeline.picture import kind_of

    spans = []
    for span in played.timeline.spans:
        if span.track in tracks and span.end_ms > begin_ms:
            name = span.name
            for job in played.steps_ms:
                name = name.removeprefix(f"{job} ")
            kind = kind_of(name)
            spans.append(Span(span.track, _KINDS.get(kind, kind), max(span.start_ms, begin_ms), span.end_ms))
    return Timeline.of(spans)
