"""Why a workload runs as it does, in one sentence for whoever has not read how it is planned."""

from __future__ import annotations

from collections.abc import Sequence

from plait.strategy.figure import figure
from plait.strategy.workload import Objective, Placement, Way

_WAYS = {
    "alone": ("run alone", "running it alone"),
    "side by side": ("run side by side", "running them side by side"),
    "one after another": ("run one after another", "running them one after another"),
    "alternated": ("take turns on the devices of one host", "letting them take turns on one host's devices"),
}
_MANNERS = {
    "by rate": "as wide as gets through most samples at the start",
    "with room for background work": "leaving room for background work",
}


def describe(ways: Sequence[Way], objective: Objective, bound: float) -> str:
    """How the way that is taken goes, what nothing could beat, and what the others would come to."""
    best = ways[0]
    if objective == "makespan":
        said = f"{_who(best)} after {figure(best.makespan_ms / 1e3)} s, {_earliest(best.makespan_ms, bound)}"
        worse = [way for way in ways[1:] if way.makespan_ms > 1.005 * best.makespan_ms]
        others = [f"{_instead(way, best)} would make that {figure(way.makespan_ms / 1e3)} s" for way in worse]
    else:
        share = 100 * best.samples_per_s / bound if bound else 100
        said = (
            f"{_who(best, ends=False)} {figure(best.samples_per_s)} samples/s at the start, background work "
            f"included, {share:.3g}% of what no assignment of devices exceeds"
        )
        worse = [way for way in ways[1:] if 1.005 * way.samples_per_s < best.samples_per_s]
        others = [
            f"{_instead(way, best)} would make that {figure(way.samples_per_s)} samples/s" for way in worse
        ]
    return "; ".join([said, *others])


def _who(way: Way, *, ends: bool = True) -> str:
    """Whom it is about and how they run, up to where the figure follows."""
    jobs = [placement for placement in way.placements if placement.how != "background"]
    base, _, manner = way.name.partition(", ")
    suffix = f", {_MANNERS[manner]}" if manner in _MANNERS else ""
    which = "foreground job" if len(jobs) < len(way.placements) else "job"
    if len(jobs) == 1:
        head = f"the {which} {jobs[0].job} runs alone on {_devices(jobs[0])}{suffix}:"
        return f"{head} it ends" if ends else f"{head} it gets through"
    how = _WAYS[base][0] if base in _WAYS else f"run {_in_parts(way)}"
    head = f"the {len(jobs)} {which}s {how}{suffix}:"
    return f"{head} the last ends" if ends else f"{head} they get through"


def _earliest(makespan_ms: float, bound_ms: float) -> str:
    factor = makespan_ms / bound_ms if bound_ms else 1.0
    if factor < 1.005:
        return "and no schedule ends earlier"
    return f"and no schedule could end before {figure(bound_ms / 1e3)} s"


def _instead(way: Way, best: Way) -> str:
    """Another way, by what it does that the best does not."""
    base, _, manner = way.name.partition(", ")
    if base not in _WAYS:
        return f"running them {_in_parts(way)}"
    if manner not in _MANNERS:
        return _WAYS[base][1]
    if base == best.name.partition(", ")[0]:
        return _MANNERS[manner] if manner.startswith("with") else f"making each {_MANNERS[manner]}"
    return f"{_WAYS[base][1]}, {_MANNERS[manner]}"


def _in_parts(way: Way) -> str:
    """Of a way that does one thing on some devices and another on the rest."""
    return f"{way.name.replace('alternated', 'by turns')} devices"


def _devices(job: Placement) -> str:
    return job.devices[0] if len(job.devices) == 1 else f"{len(job.devices)} devices"
