"""How near the lower bound policies come on jobs of unequal length, and what they move."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

from plait.bench import Bench
from plait.spill.makespan import Disk, Load, Played, ShardLoad, play
from plait.spill.policies import ShardedLRTF, Sticky

JOBS = 8
MEMORY_SHARE = 0.35
READ_BYTES_PER_S, WRITE_BYTES_PER_S = 1.5e9, 1.2e9


@dataclass(frozen=True, kw_only=True)
class Setting:
    name: str
    ms_per_mb: tuple[float, float]
    """Forward, for each megabyte of weights: the range that jobs are drawn from."""
    devices: int
    mean_percent: float | None = None
    worst_percent: float | None = None
    """Ours stays within this of the bound, in the mean and on the worst seed."""


SETTINGS = (
    Setting(name="computing limits", ms_per_mb=(6.0, 12.0), devices=2, mean_percent=5.0, worst_percent=5.0),
    Setting(name="transfers limit", ms_per_mb=(0.75, 1.5), devices=2),
    Setting(name="long jobs", ms_per_mb=(6.0, 12.0), devices=4, mean_percent=5.0),
)


def draw(seed: int, setting: Setting) -> list[Load]:
    source = random.Random(f"{setting.name}/{seed}")
    jobs = []
    for i in range(JOBS):
        count_bytes, factor = source.uniform(20e6, 80e6), source.uniform(*setting.ms_per_mb)
        forward_ms = count_bytes / 1e6 * factor
        shards = tuple(
            ShardLoad(
                forward_ms=forward_ms * source.uniform(0.8, 1.2),
                backward_ms=2 * forward_ms * source.uniform(0.8, 1.2),
                weight_bytes=int(count_bytes),
                moment_bytes=int(2 * count_bytes),
            )
            for _ in range(source.randint(2, 6))
        )
        jobs.append(Load(name=f"job{i}", steps=source.randint(3, 20), shards=shards))
    return jobs


def moved(played: Played) -> float:
    return (played.read_bytes + played.written_bytes) / 1e9


def compare(bench: Bench, setting: Setting, seeds: int) -> None:
    ours, theirs = [], []
    for seed in range(bench.seed, bench.seed + seeds):
        jobs = draw(seed, setting)
        state = sum(shard.weight_bytes + shard.moment_bytes for job in jobs for shard in job.shards)
        disk = Disk(
            memory_bytes=MEMORY_SHARE * state,
            read_bytes_per_s=READ_BYTES_PER_S,
            write_bytes_per_s=WRITE_BYTES_PER_S,
        )
        ours.append(play(jobs, setting.devices, Sticky(), disk))
        theirs.append(play(jobs, setting.devices, ShardedLRTF(), disk))
    name = setting.name
    bench.case(
        f"{name}: over the bound, mean",
        percent(statistics.mean(p.over for p in ours)),
        against=("Sharded-LRTF", percent(statistics.mean(p.over for p in theirs))),
        at_most=setting.mean_percent,
        unit="%",
        better="lower",
    )
    bench.case(
        f"{name}: over the bound, worst seed",
        percent(max(p.over for p in ours)),
        against=("Sharded-LRTF", percent(max(p.over for p in theirs))),
        at_most=setting.worst_percent,
        unit="%",
        better="lower",
    )
    worst = min(t.makespan_ms / o.makespan_ms for o, t in zip(ours, theirs, strict=True))
    bench.case(
        f"{name}: worst seed against Sharded-LRTF", worst, at_least=0.995, aim=1.0, unit="x", better="higher"
    )
    longer = sum(o.makespan_ms > t.makespan_ms for o, t in zip(ours, theirs, strict=True))
    bench.case(f"{name}: seeds on which ours is longer", longer, unit=f"of {seeds}", better="lower")
    bench.case(
        f"{name}: moved",
        statistics.mean(map(moved, ours)),
        against=("Sharded-LRTF", statistics.mean(map(moved, theirs))),
        at_least=1.0,
        unit="GB",
        better="lower",
    )


def percent(over: float) -> float:
    return 100 * (over - 1)


def run(bench: Bench) -> None:
    seeds = bench.pick(quick=20, full=100)
    bench.configure(
        seeds=seeds,
        jobs=JOBS,
        memory_share=MEMORY_SHARE,
        read_bytes_per_s=READ_BYTES_PER_S,
        write_bytes_per_s=WRITE_BYTES_PER_S,
    )
    for setting in SETTINGS:
        compare(bench, setting, seeds)
