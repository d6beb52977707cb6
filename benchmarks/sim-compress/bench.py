"""Compressed gradients against interconnect speed and nodes, 1 to 100 Gbit/s: simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.bench import Bench
from plait.cluster import Cluster
from plait.compress.codec import Cast, Codec, Exact, Quantizer
from plait.compress.price import Speed
from plait.page import Paragraph, Section, Table, save
from plait.plot import Level, Plot, Series
from plait.profile import BlockProfile, Profile, Times
from plait.sim.data import play_data
from plait.sim.data_plan import DataPlan
from plait.sim.reduction import Coded, Reduction, Ring

RUNS = Path(__file__).parents[2] / "runs" / "sim-compress"
CLAIM = (
    "up to 3x on one node of commodity GPUs, an order of magnitude over several nodes (CGX, arXiv 2111.08617)"
)
FLOPS_PER_S, FORWARD_FLOPS_PER_S = 62e12, 56e12
MEMORY_BYTES_PER_S = 0.5 * 936e9
LATENCY = "30us"
ASSUMPTIONS = (
    "a BERT-large of 24 layers, 1024 wide, 384 tokens a row; layers compute at 56 TFLOP/s forward and 62 in "
    "all, as measured on a 3090 Ti (github.com/qhduan/transformers-benchmarks); operations as in arXiv "
    "2104.04473",
    "a codec reads and writes memory once, at half of the 936 GB/s that an RTX 3090 is sold with, and takes "
    "the GPU from computing meanwhile",
    "gradients are kept in fp32, in buckets of 25 MiB as DDP makes them; the update takes no time",
    f"one GPU a node; {LATENCY} one way; fp32 goes around a ring, as NCCL and gloo send it; what plait sends "
    "goes from each to each",
    "both reach the rate of the link: no protocol, no host in the way",
)
RATES = (1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
"""Gbit/s."""
NODES = (2, 4, 8, 16, 32, 64)
LAYERS, HIDDEN, TOKENS, VOCABULARY = 24, 1024, 384, 30_522


def bert() -> Profile:
    operations = 24 * TOKENS * HIDDEN**2 + 4 * TOKENS**2 * HIDDEN
    forward_ms = 1e3 * operations / FORWARD_FLOPS_PER_S
    backward_ms = 3e3 * operations / FLOPS_PER_S - forward_ms

    def block(name: str, parameters: int, share: float = 1.0) -> BlockProfile:
        times = {
            rows: Times(forward=rows * share * forward_ms, backward=rows * share * backward_ms)
            for rows in (1, 64)
        }
        return BlockProfile(
            name=name,
            parameter_bytes=4 * parameters,
            output_bytes_per_sample=2 * TOKENS * HIDDEN,
            milliseconds=times,
        )

    layers = [block(f"layer{i}", 12 * HIDDEN**2) for i in range(LAYERS)]
    embedding = block("embedding", (VOCABULARY + 512) * HIDDEN, share=0.0)
    return Profile(blocks=(embedding, *layers), model="BERT-large", device="RTX 3090")


BERT = bert()


@dataclass(frozen=True, kw_only=True)
class Side:
    """A way to average gradients."""

    name: str
    reduction: Reduction


def coded(codec: Codec, bits: float) -> Coded:
    """A codec of a GPU, in seconds for a byte of fp32: what it reads and writes over the memory's rate."""
    packed = bits / 32
    return Coded(
        codec=codec,
        speed=Speed(
            pack_s_per_byte=(1 + packed) / MEMORY_BYTES_PER_S,
            add_s_per_byte=(2 + packed) / MEMORY_BYTES_PER_S,
            decode_s_per_byte=(1 + packed) / MEMORY_BYTES_PER_S,
        ),
    )


FP32 = Side(name="fp32, ring", reduction=Ring())
SIDES = (
    Side(name="fp32, each to each", reduction=coded(Exact(), 32)),
    Side(name="fp16", reduction=coded(Cast("fp16"), 16)),
    Side(name="8 bits", reduction=coded(Quantizer(bits=8), 8)),
    Side(name="4 bits", reduction=coded(Quantizer(bits=4), 4)),
    Side(name="3 bits", reduction=coded(Quantizer(bits=3), 3)),
    Side(name="2 bits", reduction=coded(Quantizer(bits=2), 2)),
)
FOUR = SIDES[3]


def step_ms(side: Side, nodes: int, gbit: float, rows: int) -> float:
    cluster = Cluster.uniform(hosts=nodes, memory="24GiB", bandwidth=f"{gbit}gbit", latency=LATENCY)
    plan = DataPlan(devices=nodes, batch=rows * nodes)
    return play_data(plan, BERT, cluster, steps=1, collective=side.reduction).step_ms()


def over_rates(bench: Bench, nodes: Sequence[int], rates: Sequence[float], rows: int) -> list[Section]:
    """4 bits over fp32: the main curve."""
    table, curves = [], []
    for count in nodes:
        points = []
        for gbit in rates:
            base_ms, ours_ms = (step_ms(side, count, gbit, rows) for side in (FP32, FOUR))
            points.append((gbit, base_ms / ours_ms))
            table.append((count, gbit, base_ms, ours_ms, base_ms / ours_ms))
            if count in (nodes[0], 8, nodes[-1]) and gbit in (rates[0], 10.0, rates[-1]):
                bench.case(
                    f"{count} nodes, {gbit:g} Gbit/s: 4 bits",
                    ours_ms,
                    unit="ms a step",
                    against=("fp32, ring", base_ms),
                    limit=("computing alone", BERT.step_ms(rows)),
                    better="lower",
                    published=CLAIM,
                )
        curves.append(Series(name=f"{count} nodes", points=points))
    heads = ("nodes", "Gbit/s", "fp32 ms", "4 bits ms", "times faster")
    report(f"4 bits over fp32, {rows} rows a GPU", heads, table)
    say(f"The most is {max(row[4] for row in table):.2f}x: 4 bits and the scale of each 1024 are 7.9x fewer.")
    plot = Plot(
        title=f"4 bits against fp32, BERT-large, {rows} rows a GPU",
        x="Gbit/s",
        y="times faster",
        series=tuple(curves),
        levels=(Level(name="published: 3x", y=3.0), Level(name="published: 10x", y=10.0)),
        log_x=True,
    )
    return [plot, Table(columns=heads, rows=table, title="4 bits against fp32")]


def over_bits(bench: Bench, nodes: int, rates: Sequence[float], rows: int) -> list[Section]:
    """Where the gain comes from: the bits, and messages from each to each in place of a ring."""
    table, curves = [], dict[str, list[tuple[float, float]]]()
    for gbit in rates:
        base_ms = step_ms(FP32, nodes, gbit, rows)
        found = [base_ms / step_ms(side, nodes, gbit, rows) for side in SIDES]
        table.append((gbit, *found))
        for side, ratio in zip(SIDES, found, strict=True):
            curves.setdefault(side.name, []).append((gbit, ratio))
    for wanted in (3.0, 10.0):
        reached = {name: [gbit for gbit, ratio in its if ratio >= wanted] for name, its in curves.items()}
        where = [f"{name} up to {max(its):g} Gbit/s" for name, its in reached.items() if its]
        say(f"\n{wanted:g}x, {nodes} nodes, {rows} rows a GPU: {', '.join(where) or 'nowhere here'}.")
    heads = ("Gbit/s", *(side.name for side in SIDES))
    report(f"{nodes} nodes, times faster than a ring of fp32", heads, table)
    for side in SIDES:
        gbit, most = max(curves[side.name], key=lambda point: point[1])
        bench.case(
            f"{nodes} nodes, {side.name}: most over a ring of fp32, at {gbit:g} Gbit/s",
            most,
            unit="x",
            better="higher",
            published=CLAIM,
        )
    plot = Plot(
        title=f"{nodes} nodes: what the gain is made of",
        x="Gbit/s",
        y="times faster than a ring of fp32",
        series=tuple(Series(name=name, points=points) for name, points in curves.items()),
        levels=(Level(name="published: 3x", y=3.0), Level(name="published: 10x", y=10.0)),
        log_x=True,
    )
    return [plot, Table(columns=heads, rows=table, title=f"{nodes} nodes, by bits")]


def over_rows(bench: Bench, nodes: int, gbit: float, sizes: Sequence[int]) -> list[Section]:
    """The more a GPU computes for a step, the less the wire matters."""
    table = []
    for rows in sizes:
        base_ms, ours_ms = (step_ms(side, nodes, gbit, rows) for side in (FP32, FOUR))
        table.append((rows, base_ms / ours_ms, BERT.step_ms(rows) / base_ms, BERT.step_ms(rows) / ours_ms))
        bench.case(
            f"{nodes} nodes, {gbit:g} Gbit/s, {rows} rows a GPU: 4 bits over fp32",
            base_ms / ours_ms,
            unit="x",
            better="higher",
            published=CLAIM,
        )
    heads = ("rows a GPU", "times faster", "scaling of fp32", "scaling of 4 bits")
    report(f"{nodes} nodes, {gbit:g} Gbit/s", heads, table)
    plot = Plot(
        title=f"{nodes} nodes at {gbit:g} Gbit/s, by the rows of a GPU",
        x="rows a GPU",
        y="times faster",
        series=(Series(name="4 bits over fp32", points=[row[:2] for row in table]),),
        levels=(Level(name="published: 3x", y=3.0),),
        log_x=True,
    )
    return [plot, Table(columns=heads, rows=table, title="By rows")]


def say(line: str) -> None:
    print(line, flush=True)


def report(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    say(f"\n{title}")
    say("  ".join(heads))
    for row in rows:
        say("  ".join(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row))


def run(bench: Bench) -> None:
    rates, nodes = bench.pick(quick=(1.0, 10.0, 100.0), full=RATES), bench.pick(quick=(2, 8), full=NODES)
    bench.configure(assumptions=ASSUMPTIONS, published=CLAIM, rates=rates, nodes=nodes)
    say("Assumed:")
    for line in ASSUMPTIONS:
        say(f"- {line}")
    say(f"Published: {CLAIM}")
    sections: list[Section] = [Paragraph(f"Assumed: {line}.") for line in ASSUMPTIONS]
    sections += [
        Paragraph(f"Published: {CLAIM}."),
        *over_rates(bench, nodes, rates, 8),
        *over_bits(bench, 8, rates, 8),
        *over_rows(bench, 8, 10.0, bench.pick(quick=(4, 32), full=(1, 2, 4, 8, 16, 32, 64))),
    ]
    RUNS.mkdir(parents=True, exist_ok=True)
    save(RUNS / "report.html", "Compressed gradients against interconnect speed and nodes", sections)
    for place, plot in enumerate(each for each in sections if isinstance(each, Plot)):
        plot.save(RUNS / f"plot{place}.svg")
    say(f"\nPlots: {RUNS / 'report.html'}")
