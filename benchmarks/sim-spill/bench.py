"""Spilled jobs that take turns against pipelines and against one job after another, to 64 jobs: simulated."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.bench import Bench
from plait.cluster import Cluster
from plait.errors import UsageError
from plait.page import Paragraph, Section, Table, save
from plait.pipeline.orders import one_f_one_b
from plait.pipeline.plan import Forecast as StageForecast
from plait.pipeline.plan import PipelinePlan, Stage
from plait.plot import Level, Plot, Series
from plait.profile import BlockProfile, Profile, Times
from plait.sim.pipeline import play_pipeline
from plait.sim.spill import play_spill
from plait.sim.spilled_job import SpilledJob
from plait.spill.makespan import Disk, Load, lower_bound_ms
from plait.spill.plan import Forecast, Shard, SpillPlan
from plait.spill.policies import Policy, ShardedLRTF, Sticky, View

RUNS = Path(__file__).parents[2] / "runs" / "sim-spill"
CLAIM = "50% to 100% more throughput than pipelines for many large models (Hydra, arXiv 2110.08633)"
BAND = (50.0, 100.0)
LAYERS, SHARDS, HEADS, TOKENS, WIDTHS = 32, 8, 16, 1024, (2048, 2304, 2560)
FORWARD_FLOPS_PER_S, BOTH_FLOPS_PER_S = 32e12, 36e12
MEMORY, LINK_BYTES_PER_S, ROWS = "24GiB", 12e9, 16
ASSUMPTIONS = (
    f"jobs are GPTs of {LAYERS} layers, {', '.join(map(str, WIDTHS))} wide, {TOKENS} tokens a row, {ROWS} "
    "rows a step unless said, of 4 to 12 steps; drawn by seed. 1.6 to 2.5 billion parameters with 16 bytes "
    f"each do not fit into a device of {MEMORY}",
    "a layer computes at 32 TFLOP/s forward and 36 in all, as measured on a V100 "
    "(github.com/qhduan/transformers-benchmarks); operations as in arXiv 2104.04473",
    f"spilled: {SHARDS} shards a job; backward runs forward again; each device has a link of 12 GB/s to the "
    "memory below (PCIe 3.0 x16), all taken together as one of their sum; memory for two units a device, "
    "so that everything crosses the link each time, unless said",
    "pipeline: one job after another over all devices, a stage each, 1F1B, a row a micro-batch, the same "
    "link between neighbours; it keeps its activations. GPipe: as published, its backward runs forward again",
    "one after another: each job spilled by itself, on one device; whole jobs: each device takes a job to "
    "its end",
    "the bound is all computing, shared evenly, or that of the longest job, forward again included",
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be trained, by whatever means."""

    name: str
    width: int
    steps: int
    rows: int


def draw(count: int, rows: int, seed: int) -> list[Job]:
    source = random.Random(f"{count} {seed}")
    return [
        Job(name=f"job{place:02}", width=source.choice(WIDTHS), steps=source.randint(4, 12), rows=rows)
        for place in range(count)
    ]


@functools.cache
def profile_of(width: int, again: bool) -> Profile:
    """``again``: backward begins with another forward, and keeps only what comes in."""
    operations = 24 * TOKENS * width**2 + 4 * TOKENS**2 * width
    forward_ms = 1e3 * operations / FORWARD_FLOPS_PER_S
    backward_ms = 3e3 * operations / BOTH_FLOPS_PER_S - forward_ms + (forward_ms if again else 0.0)
    kept = 2 * TOKENS * width if again else TOKENS * width * (34 + 5 * HEADS * TOKENS // width)
    return Profile(
        blocks=tuple(
            BlockProfile(
                name=f"layer{place}",
                parameter_bytes=2 * 12 * width**2,
                optimizer_bytes=12 * 12 * width**2,
                output_bytes_per_sample=2 * TOKENS * width,
                saved_bytes_per_sample=kept,
                milliseconds={
                    rows: Times(forward=rows * forward_ms, backward=rows * backward_ms) for rows in (1, 1024)
                },
            )
            for place in range(LAYERS)
        ),
        model="GPT",
        device="V100",
    )


# --- the ways to train them ---------------------------------------------------------------------------


def load_of(job: Job) -> Load:
    each = LAYERS // SHARDS
    nothing = Forecast(
        arena_peak_bytes=0, private_peak_bytes=0, kept_bytes=0, disk_bytes=0, read_bytes=0, written_bytes=0,
        compute_ms=0.0, read_ms=0.0, write_ms=0.0, step_ms=0.0,
    )  # fmt: skip
    plan = SpillPlan(
        shards=tuple(
            Shard(first=each * place, end=each * (place + 1), activations="recompute")
            for place in range(SHARDS)
        ),
        arena_bytes=0,
        private_bytes=0,
        window_bytes=0,
        forecast=nothing,
    )
    profile = profile_of(job.width, again=False)
    return SpilledJob(name=job.name, plan=plan, profile=profile, batch=job.rows, steps=job.steps).load


class Whole:
    """Each device takes a job to its end, and then another."""

    def choose(self, view: View) -> str | None:
        free = [job for job in view.jobs if job.free]
        own = [job for job in view.jobs if job.name == view.now and job.remaining_ms > job.unit_ms]
        own += [job for job in free if view.now is None and job.last_device == view.device]
        if own:
            return None if view.now is not None else own[0].name
        fresh = [job.name for job in free if job.last_device is None]
        return min(fresh, default=None)


def spilled_ms(jobs: Sequence[Job], devices: int, policy: Policy, rate: float, buffers: float) -> float:
    """``buffers``: how many of the largest units fit into memory for each device."""
    loads = [load_of(job) for job in jobs]
    unit = max(shard.weight_bytes + shard.moment_bytes for load in loads for shard in load.shards)
    links = rate * min(devices, len(jobs))
    below = Disk(memory_bytes=buffers * unit * devices, read_bytes_per_s=links, write_bytes_per_s=links)
    return play_spill(loads, devices, policy, below, spans=1).makespan_ms


@functools.cache
def alone_ms(width: int, steps: int, rows: int, rate: float, buffers: float) -> float:
    return spilled_ms([Job(name="job", width=width, steps=steps, rows=rows)], 1, Sticky(), rate, buffers)


def piped_ms(jobs: Sequence[Job], devices: int, *, again: bool) -> float | None:
    """All jobs in turn, each as a pipeline; None where one does not fit."""
    try:
        return sum(job.steps * step_ms(job.width, job.rows, devices, again) for job in jobs)
    except UsageError as error:
        if error.setting != "devices.memory":
            raise
        return None


@functools.cache
def step_ms(width: int, rows: int, devices: int, again: bool) -> float:
    each = LAYERS // devices
    order = one_f_one_b(devices, rows)
    plan = PipelinePlan(
        stages=tuple(Stage(first=each * place, end=each * (place + 1)) for place in range(devices)),
        order=order,
        global_batch=rows,
        forecast=StageForecast(step_ms=0.0, busy_ms=(0.0,) * devices, peak_bytes=(0,) * devices),
    )
    cluster = Cluster.uniform(hosts=devices, memory=MEMORY, bandwidth=LINK_BYTES_PER_S, latency="10us")
    return play_pipeline(plan, profile_of(width, again), cluster, steps=1, spans=1).step_ms()


@dataclass(frozen=True, kw_only=True)
class Found:
    """Times in milliseconds until all jobs are done."""

    jobs: int
    devices: int
    bound: float
    ours: float
    lrtf: float
    whole: float
    in_turn: float
    piped: float | None
    piped_again: float | None

    @property
    def gains(self) -> tuple[float | None, ...]:
        """More throughput than each of the others, in percent."""
        others = self.piped, self.piped_again, self.in_turn, self.whole, self.lrtf
        return tuple(None if ms is None else 100 * (ms / self.ours - 1) for ms in others)

    @property
    def row(self) -> tuple[object, ...]:
        shown = ["does not fit" if gain is None else gain for gain in self.gains]
        return (self.ours / 6e4, 100 * (self.ours / self.bound - 1), *shown)


COLUMNS = (
    "minutes", "over the bound %", "than pipeline %", "than GPipe %", "than one after another %",
    "than whole jobs %", "than Sharded-LRTF %",
)  # fmt: skip


def compare(
    count: int,
    devices: int,
    seed: int,
    *,
    rows: int = ROWS,
    rate: float = LINK_BYTES_PER_S,
    buffers: float = 2.0,
) -> Found:
    jobs = draw(count, rows, seed)
    return Found(
        jobs=count,
        devices=devices,
        bound=lower_bound_ms([load_of(job) for job in jobs], devices),
        ours=spilled_ms(jobs, devices, Sticky(), rate, buffers),
        lrtf=spilled_ms(jobs, devices, ShardedLRTF(), rate, buffers),
        whole=spilled_ms(jobs, devices, Whole(), rate, buffers),
        in_turn=sum(alone_ms(job.width, job.steps, rows, rate, buffers) for job in jobs),
        piped=piped_ms(jobs, devices, again=False),
        piped_again=piped_ms(jobs, devices, again=True),
    )


# --- the studies --------------------------------------------------------------------------------------


def say(line: str) -> None:
    print(line, flush=True)


def report(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """Print a table, and give it as a section."""
    cells = [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in each] for each in (heads, *rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(heads))]
    say(f"\n{title}")
    for line in cells:
        say("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    return Table(columns=tuple(heads), rows=[tuple(each) for each in rows], title=title)


def plotted(title: str, x: str, series: Sequence[Series]) -> Plot:
    return Plot(
        title=title,
        x=x,
        y="more throughput, %",
        series=tuple(series),
        levels=(Level(name="published: 50% to 100%", y=BAND),),
        log_x=True,
    )


def over_jobs(bench: Bench, counts: Sequence[int], devices: Sequence[int]) -> list[Section]:
    found = [compare(count, each, bench.seed) for count in counts for each in devices]
    heads = ("jobs", "devices", *COLUMNS)
    table = report("Jobs and devices", heads, [(each.jobs, each.devices, *each.row) for each in found])
    for each in found:
        if each.jobs == max(counts) and each.piped is not None and each.piped_again is not None:
            for name, other in (
                ("pipeline", each.piped),
                ("GPipe", each.piped_again),
            ):
                bench.case(
                    f"{each.jobs} jobs, {each.devices} devices: makespan against {name}",
                    each.ours / 6e4,
                    against=(name, other / 6e4),
                    limit=("no schedule is shorter", each.bound / 6e4),
                    unit="min",
                    better="lower",
                    published=CLAIM,
                )
    fitting = [each for each in found if each.gains[1] is not None]
    reached = [each for each in fitting if (each.gains[1] or 0.0) >= BAND[0]]
    say(f"  50% over GPipe is reached in {len(reached)} of {len(fitting)} cases in which that fits")
    plots = [
        plotted(
            f"Over {name}, by devices",
            "devices",
            [
                Series(
                    name=f"{count} jobs",
                    points=[(e.devices, e.gains[place]) for e in found if e.jobs == count],
                )
                for count in counts
            ],
        )
        for place, name in enumerate(("a pipeline", "GPipe", "one after another"))
    ]
    return [*plots, table]


def sensitivity(title: str, x: str, found: dict[float, Found]) -> list[Section]:
    table = report(title, (x, *COLUMNS), [(value, *each.row) for value, each in found.items()])
    names = (
        "pipeline",
        "GPipe",
        "one after another",
        "whole jobs",
        "Sharded-LRTF",
    )
    series = [
        Series(name=name, points=[(value, each.gains[place]) for value, each in found.items()])
        for place, name in enumerate(names)
    ]
    return [plotted(title, x, series), table]


def run(bench: Bench) -> None:
    bench.configure(assumptions=list(ASSUMPTIONS), published=CLAIM, rows=ROWS, memory=MEMORY)
    say("Assumed:")
    for line in ASSUMPTIONS:
        say(f"- {line}")
    say(f"Published: {CLAIM}")
    sections: list[Section] = [Paragraph(f"Assumed: {line}.") for line in ASSUMPTIONS]
    sections.append(Paragraph(f"Published: {CLAIM}."))
    counts = bench.pick(quick=[4, 16], full=[4, 8, 16, 32, 64])
    sections += over_jobs(bench, counts, bench.pick(quick=[1, 4], full=[1, 2, 4, 8, 16]))
    jobs, devices = bench.pick(quick=(8, 4), full=(16, 8))
    where = f"{jobs} jobs on {devices} devices"
    rates = bench.pick(quick=(3, 12), full=(1, 2, 3, 6, 12, 25, 50))
    sections += sensitivity(
        f"{where}, by link",
        "GB/s a device",
        {r: compare(jobs, devices, bench.seed, rate=r * 1e9) for r in rates},
    )
    sizes = bench.pick(quick=(4, 32), full=(4, 8, 16, 32, 64, 128))
    sections += sensitivity(
        f"{where}, by batch", "rows a step", {r: compare(jobs, devices, bench.seed, rows=r) for r in sizes}
    )
    buffers = bench.pick(quick=(2, 8), full=(2, 3, 4, 6, 8, 12, 16))
    sections += sensitivity(
        f"{where}, by memory, 4 rows a step",
        "units that fit, a device",
        {b: compare(jobs, devices, bench.seed, rows=4, buffers=b) for b in buffers},
    )
    RUNS.mkdir(parents=True, exist_ok=True)
    save(RUNS / "report.html", "Many large models: taking turns, pipelines, one after another", sections)
    for place, plot in enumerate(each for each in sections if isinstance(each, Plot)):
        plot.save(RUNS / f"plot{place}.svg")
    say(f"\nPlots: {RUNS / 'report.html'}")
