"""kFkB and its relatives against 1F1B on networks that others use, to 64 stages: simulated."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from plait.bench import Bench
from plait.cluster import Cluster
from plait.page import Paragraph, Section, Table, save
from plait.pipeline.candidate import Candidate
from plait.pipeline.memory import peak_bytes
from plait.pipeline.orders import Order, depth, kfkb, one_f_one_b, work_conserving
from plait.pipeline.plan import Forecast, PipelinePlan, Stage
from plait.pipeline.tuner import Tuning
from plait.plot import Level, Plot, Series
from plait.profile import BlockProfile, Profile, Times
from plait.sim.adapting import play_adaptive
from plait.sim.pipeline import play_pipeline
from plait.sim.played import Played
from plait.sim.staging import Staging
from plait.sim.trace import Trace
from plait.units import parse_rate

RUNS = Path(__file__).parents[2] / "runs" / "sim-pipeline"
CLAIM = "4% to 30% over 1F1B in preempted networks (Ada-Grouper, arXiv 2303.01675)"
LAYERS, HIDDEN, HEADS, TOKENS = 64, 2048, 16, 1024
FORWARD_FLOPS_PER_S, BOTH_FLOPS_PER_S = 32e12, 36e12
RATE, LATENCY, MEMORY = "10gbit", "50us", "32GiB"
ASSUMPTIONS = (
    f"a GPT of {LAYERS} layers, {HIDDEN} wide, {TOKENS} tokens a row, one row a micro-batch, cut evenly",
    "a layer computes at 32 TFLOP/s forward and 36 in all, as measured on a V100 "
    "(github.com/qhduan/transformers-benchmarks); operations as in arXiv 2104.04473",
    "activations of a layer: tokens x width x (34 + 5 x heads x tokens / width) bytes (arXiv 2205.05198)",
    "weights, gradients and optimizer state: 16 bytes a parameter; activations cross in fp16",
    f"a stage is a host of its own with a card of {RATE}, as p3.2xlarge of AWS has at most; "
    f"{LATENCY} one way; {MEMORY} of memory unless said",
    "four micro-batches a stage; others take a share of every card, both ways",
)
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9)
"""Of every card, what others take."""


def gpt() -> Profile:
    operations = 24 * TOKENS * HIDDEN**2 + 4 * TOKENS**2 * HIDDEN
    forward_ms = 1e3 * operations / FORWARD_FLOPS_PER_S
    times = Times(forward=forward_ms, backward=3e3 * operations / BOTH_FLOPS_PER_S - forward_ms)
    parameters = 12 * HIDDEN**2
    return Profile(
        blocks=tuple(
            BlockProfile(
                name=f"layer{i}",
                parameter_bytes=2 * parameters,
                optimizer_bytes=12 * parameters,
                output_bytes_per_sample=2 * TOKENS * HIDDEN,
                saved_bytes_per_sample=TOKENS * HIDDEN * (34 + 5 * HEADS * TOKENS // HIDDEN),
                milliseconds={1: times},
            )
            for i in range(LAYERS)
        ),
        model="GPT",
        device="V100",
    )


GPT = gpt()


def hosts(stages: int, memory: str = MEMORY, rate: str = RATE) -> Cluster:
    return Cluster.uniform(hosts=stages, memory=memory, bandwidth=rate, latency=LATENCY)


def plan_of(order: Order, layers: int = LAYERS) -> PipelinePlan:
    each = layers // order.stages
    nothing = Forecast(step_ms=0.0, busy_ms=(0.0,) * order.stages, peak_bytes=(0,) * order.stages)
    stages = tuple(Stage(first=i * each, end=(i + 1) * each) for i in range(order.stages))
    return PipelinePlan(stages=stages, order=order, global_batch=order.micro_batches, forecast=nothing)


def family(stages: int, count: int) -> dict[str, list[Order]]:
    """What is compared: 1F1B, groups as published, and plait's relatives that take less memory."""
    return {
        "kFkB": [kfkb(stages, count, k) for k in (1, 2, 3, 4, 6, 8)],
        "depth": [depth(stages, count, delta) for delta in (2, 3, 4)],
        "capped": [work_conserving(stages, count, cap) for cap in (stages + 2, 2 * stages, 3 * stages)],
    }


def fits(order: Order, cluster: Cluster) -> bool:
    plan = plan_of(order)
    candidate = Candidate(order=order, global_batch=order.micro_batches)
    held = peak_bytes(candidate, Staging.of(plan, GPT).memories(1))
    return all(h <= d.memory_bytes for h, d in zip(held, cluster.devices, strict=True))


def constant(cluster: Cluster, share: float) -> Mapping[str, Trace] | None:
    return {host.name: Trace.constant(1 - share) for host in cluster.hosts} if share else None


def step_ms(order: Order, cluster: Cluster, share: float) -> float:
    return play_pipeline(plan_of(order), GPT, cluster, steps=1, traces=constant(cluster, share)).step_ms()


def gains(stages: int, share: float, cluster: Cluster) -> dict[str, tuple[float, str]]:
    """By family, the percent that its best order that fits gains over 1F1B, and its name."""
    count = 4 * stages
    base_ms = step_ms(one_f_one_b(stages, count), cluster, share)
    found = {}
    for name, orders in family(stages, count).items():
        tried = [
            (base_ms if order.k == 1 else step_ms(order, cluster, share), order.label)
            for order in orders
            if fits(order, cluster)
        ]
        tried.insert(0, (base_ms, "1F1B"))
        best_ms = min(tried)[0]
        label = next(name for each_ms, name in tried if each_ms <= 1.001 * best_ms)  # the least memory
        found[name] = (100 * (base_ms / best_ms - 1), label)
    return found


def over_levels(bench: Bench, depths: Sequence[int], shares: Sequence[float]) -> list[Section]:
    rows, curves = [], dict[int, list[tuple[float, float]]]()
    load = Staging.of(plan_of(one_f_one_b(1, 1)), GPT).loads(1)[0]
    whole_ms = load.forward_ms + load.backward_ms
    message_ms = 1e3 * GPT.blocks[0].output_bytes_per_sample / parse_rate(RATE)
    for stages in depths:
        cluster = hosts(stages)
        for share in shares:
            found = gains(stages, share, cluster)
            best = max(found, key=lambda name: found[name][0])
            ratio = message_ms / (1 - share) / (whole_ms / stages)
            rows.append((stages, f"{100 * share:.0f}%", ratio, *(x for f in found.values() for x in f)))
            curves.setdefault(stages, []).append((100 * share, found["kFkB"][0]))
            bench.case(
                f"{stages} stages, {100 * share:.0f}% taken: kFkB over 1F1B",
                found["kFkB"][0],
                unit="%",
                better="higher",
                limit=None if found[best][0] == 0 else (f"{best}, {found[best][1]}", found[best][0]),
                published=CLAIM,
            )
    heads = ("stages", "taken", "transfer / compute", *(h for f in found for h in (f"{f} %", "order")))
    report("gain over 1F1B by the best order that fits", heads, rows)
    level = Level(name="published: 4% to 30%", y=(4.0, 30.0))
    plots = [
        Plot(
            title="Best kFkB against 1F1B",
            x="share of every card that others take, %",
            y="gain, %",
            series=tuple(Series(name=f"{s} stages", points=points) for s, points in curves.items()),
            levels=(level,),
        ),
        Plot(
            title="The same gains by what a transfer takes",
            x="transfer of a micro-batch / its computing on a stage",
            y="gain, %",
            series=tuple(
                Series(name=name, points=sorted((row[2], row[column]) for row in rows))
                for name, column in (("kFkB", 3), ("depth", 5), ("capped", 7))
            ),
            levels=(level,),
            log_x=True,
        ),
    ]
    reached = [row for row in rows if 4 <= row[3] <= 30]
    if reached:
        low, high = min(row[2] for row in reached), max(row[2] for row in reached)
        bench.case("transfer / compute from which kFkB gains 4%", low, unit="of computing", better="lower")
        say(f"kFkB gains 4% to 30% where a transfer takes {low:.2f} to {high:.2f} of a stage's computing.")
    return [*plots, Table(columns=heads, rows=rows, title="Gain over 1F1B")]


def over_memory(bench: Bench, stages: int, share: float, sizes: Sequence[str]) -> list[Section]:
    """What grouping costs is memory: how the gain grows with it."""
    rows = []
    for size in sizes:
        cluster = hosts(stages, memory=size)
        if not fits(one_f_one_b(stages, 4 * stages), cluster):
            rows.append((size, None, "1F1B does not fit", None, "", None, ""))
            continue
        found = gains(stages, share, cluster)
        rows.append((size, *(x for pair in found.values() for x in pair)))
        bench.case(
            f"{stages} stages, {100 * share:.0f}% taken, {size}: kFkB over 1F1B",
            found["kFkB"][0],
            unit="%",
            better="higher",
            published=CLAIM,
        )
    rows = [row[:7] for row in rows]
    heads = ("memory", "kFkB %", "order", "depth %", "order", "capped %", "order")
    report(f"{stages} stages, {100 * share:.0f}% taken, by memory", heads, rows)
    points = [(int(row[0].removesuffix("GiB")), row) for row in rows]
    plot = Plot(
        title=f"{stages} stages, {100 * share:.0f}% of the network taken",
        x="memory of a device, GiB",
        y="gain over 1F1B, %",
        series=tuple(
            Series(name=name, points=[(size, row[column]) for size, row in points])
            for name, column in (("kFkB", 1), ("depth", 3), ("capped", 5))
        ),
    )
    return [plot, Table(columns=heads, rows=rows, title="By memory")]


def comes_and_goes(
    cluster: Cluster, share: float, phase_ms: float, phases: int, seed: int
) -> dict[str, Trace]:
    """Others come and go on all cards together, in phases of random length and half of them idle."""
    source = random.Random(f"{seed} {share}")
    at_ms, points = 0.0, []
    for place in range(phases):
        points.append((at_ms, 1.0 - share * (place % 2)))
        at_ms += source.uniform(0.5, 1.5) * phase_ms
    trace = Trace.of(points, repeat_ms=at_ms)
    return {host.name: trace for host in cluster.hosts}


def over_time(bench: Bench, stages: int, shares: Sequence[float], steps: int) -> list[Section]:
    """The tuner's own code in the loop, against 1F1B and against the one k that is best in hindsight."""
    cluster, count = hosts(stages), 4 * stages
    plain, rows = one_f_one_b(stages, count), []
    phase_ms = 5 * step_ms(plain, cluster, 0.0)
    for share in shares:
        traces = comes_and_goes(cluster, share, phase_ms, 8, bench.seed)

        def fixed(order: Order, traces: Mapping[str, Trace] = traces) -> Played:
            return play_pipeline(plan_of(order), GPT, cluster, steps=steps, traces=traces)

        def tuned(*families: str, traces: Mapping[str, Trace] = traces) -> Played:
            tuning = Tuning(micro_batches=(count,), families=families)  # type: ignore[arg-type]
            return play_adaptive(plan_of(plain), GPT, cluster, steps=steps, tuning=tuning, traces=traces)

        base = mean_ms(fixed(plain))
        hindsight_ms, label = min(
            (mean_ms(fixed(order)), order.label)
            for order in family(stages, count)["kFkB"]
            if fits(order, cluster)
        )
        groups, all_ = mean_ms(tuned("kfkb")), mean_ms(tuned("kfkb", "capped"))
        row = [100 * (base / each - 1) for each in (hindsight_ms, groups, all_)]
        rows.append((f"{100 * share:.0f}%", row[0], label, row[1], row[2]))
        bench.case(
            f"{stages} stages, {100 * share:.0f}% taken half of the time: tuner over 1F1B",
            row[2],
            unit="%",
            better="higher",
            against=(f"best k in hindsight, {label}", row[0]),
            published=CLAIM,
        )
    heads = ("taken", "best fixed k %", "order", "tuner, kFkB %", "tuner, all %")
    report(f"{stages} stages, others come and go", heads, rows)
    plot = Plot(
        title=f"{stages} stages, others there half of the time",
        x="share that others take when they are there, %",
        y="gain over 1F1B, %",
        series=tuple(
            Series(name=name, points=[(float(row[0].removesuffix("%")), row[column]) for row in rows])
            for name, column in (("best fixed k", 1), ("tuner, kFkB alone", 3), ("tuner, all families", 4))
        ),
        levels=(Level(name="published: 4% to 30%", y=(4.0, 30.0)),),
    )
    return [plot, Table(columns=heads, rows=rows, title="With the tuner in the loop")]


def mean_ms(played: Played) -> float:
    steps = played.steps_ms["job"]
    return sum(steps) / len(steps)


def say(line: str) -> None:
    print(line, flush=True)


def report(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    say(f"\n{title}")
    say("  ".join(heads))
    for row in rows:
        say("  ".join(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row))


def run(bench: Bench) -> None:
    bench.configure(assumptions=ASSUMPTIONS, published=CLAIM, shares=SHARES)
    say("Assumed:")
    for line in ASSUMPTIONS:
        say(f"- {line}")
    say(f"Published: {CLAIM}")
    parts: list[Callable[[], list[Section]]] = [
        lambda: over_levels(
            bench,
            bench.pick(quick=(4, 16), full=(4, 8, 16, 32, 64)),
            bench.pick(quick=(0.0, 0.5, 0.9), full=SHARES),
        ),
        lambda: over_memory(
            bench,
            16,
            0.75,
            bench.pick(quick=("16GiB", "64GiB"), full=("16GiB", "24GiB", "32GiB", "48GiB", "64GiB")),
        ),
        lambda: over_time(
            bench, 8, bench.pick(quick=(0.75,), full=(0.5, 0.75, 0.9)), bench.pick(quick=20, full=60)
        ),
    ]
    sections: list[Section] = [Paragraph(f"Assumed: {line}.") for line in ASSUMPTIONS]
    sections.append(Paragraph(f"Published: {CLAIM}."))
    for part in parts:
        sections += part()
    RUNS.mkdir(parents=True, exist_ok=True)
    save(RUNS / "report.html", "kFkB against 1F1B on networks that others use", sections)
    for place, plot in enumerate(each for each in sections if isinstance(each, Plot)):
        plot.save(RUNS / f"plot{place}.svg")
    say(f"\nPlots: {RUNS / 'report.html'}")
