"""Burst and background against data parallelism with the batch held fixed, to 256 devices: simulated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plait.burst
from plait.bench import Bench
from plait.burst.burst_plan import BurstPlan
from plait.burst.controller import Control
from plait.cluster import Cluster
from plait.collective import Link, ring_ms
from plait.errors import UsageError
from plait.page import Paragraph, Section, Table, save
from plait.plot import Level, Plot, Series
from plait.profile import BlockProfile, Profile, Times
from plait.sim.background import Background
from plait.sim.burst import play_burst
from plait.sim.data import play_data
from plait.sim.data_plan import DataPlan

RUNS = Path(__file__).parents[2] / "runs" / "sim-burst"
CLAIM = (
    "2.2x to 2.4x of data parallelism's total cluster throughput when the cluster scale is large (DeepPool, "
    "arXiv 2112.10065, first version; 1.2x to 2.3x in the last, of MLSys 2022)"
)
BAND = (2.2, 2.4)
FLOPS_PER_S, MEMORY_BYTES_PER_S, PROCESSORS, TILE = 0.5 * 156e12, 0.8 * 1555e9, 108, 128
FORWARD_MS, BACKWARD_MS = 0.010, 0.020
SWITCH_MS, UNIT_MS, LATENCY_S = 0.05, 20.0, 10e-6
NETWORKS = {"100gbit": 12.5e9, "400gbit": 50e9, "NVSwitch": 300e9}
STEPS, SLACK = 4, 1.1
ASSUMPTIONS = (
    "an A100: half of its 156 TFLOP/s (TF32) and 80% of its 1,555 GB/s (NVIDIA's data sheet); a product is "
    "cut into tiles of 128 x 128 over 108 processors, whole rounds of tiles at a time (wave quantization in "
    "NVIDIA's Matrix Multiplication Background guide); 10 us more for a layer forward and 20 us backward",
    "VGG-16 and Wide ResNet-101-2 at 224 x 224, as torchvision has them; fp32 weights, SGD with momentum",
    "each device has its own card; 10 us one way; all-reduce as a ring or as trees (2 log2 W latencies), "
    "whichever is faster, on both sides; data parallelism in buckets of 25 MiB that overlap with backward",
    "one endless training per device in the background, which gets only what the foreground leaves idle; the "
    "foreground loses 50 us whenever it takes a device back",
    "throughput is in devices' worth: the step on one device over the step played, plus the background's "
    "device time over time",
    "the burst plan is the cheapest whose step takes at most 1.1 times that of data parallelism on all "
    "devices; 'shared out' is data parallelism on the fewest devices with such a step (of four numbers for "
    "each doubling), and background on the rest",
)


class Fastest:
    """The faster of a ring and of trees (Jeaugey, "Massively scale your deep learning training with NCCL
    2.4", 2019); whatever the number of devices, it is the same for all that is compared."""

    def estimate_ms(self, bytes: int, world: int, link: Link) -> float:
        trees_ms = (
            2e3 * bytes / link.bandwidth_bytes_per_s + 2 * math.ceil(math.log2(world)) * link.latency_ms
        )
        return min(ring_ms(bytes, world, link), trees_ms)

    def all_reduce(self, tensor: Any, group: Any = None) -> Any:
        raise NotImplementedError("this one is for planning")


# --- models -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A convolution or (side 1) a matrix, with what it writes for a row."""

    channels: tuple[int, int]
    kernel: int
    side: int
    """Of what it writes."""

    @property
    def parameters(self) -> int:
        return self.kernel**2 * self.channels[0] * self.channels[1]

    @property
    def written_bytes(self) -> int:
        return 4 * self.side**2 * self.channels[1]

    def ms(self, rows: int) -> float:
        """One product: forward, or one of the two of backward."""
        tiles = math.ceil(rows * self.side**2 / TILE) * math.ceil(self.channels[1] / TILE)
        rounds = math.ceil(tiles / PROCESSORS)
        operations = rounds * PROCESSORS * 2 * TILE**2 * self.kernel**2 * self.channels[0]
        moved = 4 * self.parameters + rows * self.written_bytes
        return 1e3 * max(operations / FLOPS_PER_S, moved / MEMORY_BYTES_PER_S)


def block(name: str, layers: Sequence[Layer], sizes: Sequence[int], written_bytes: int) -> BlockProfile:
    count = sum(layer.parameters for layer in layers)
    times = {}
    for rows in sizes:
        product_ms = sum(layer.ms(rows) for layer in layers)
        times[rows] = Times(
            forward=len(layers) * FORWARD_MS + product_ms, backward=len(layers) * BACKWARD_MS + 2 * product_ms
        )
    return BlockProfile(
        name=name,
        parameter_bytes=4 * count,
        optimizer_bytes=4 * count,
        output_bytes_per_sample=written_bytes,
        milliseconds=times,
        # Weights, gradients and momentum are read, two of them written.
        optimizer_milliseconds=1e3 * 5 * 4 * count / MEMORY_BYTES_PER_S,
    )


def vgg16(sizes: Sequence[int]) -> Profile:
    blocks, side, before = [], 224, 3
    for stage, (repeats, channels) in enumerate([(2, 64), (2, 128), (3, 256), (3, 512), (3, 512)]):
        for place in range(repeats):
            layer = Layer(channels=(before, channels), kernel=3, side=side)
            pooled = 4 if place == repeats - 1 else 1
            blocks.append(block(f"conv{stage}.{place}", [layer], sizes, layer.written_bytes // pooled))
            before = channels
        side //= 2
    for place, (read, made) in enumerate([(25088, 4096), (4096, 4096), (4096, 1000)]):
        layer = Layer(channels=(read, made), kernel=1, side=1)
        blocks.append(block(f"dense{place}", [layer], sizes, layer.written_bytes))
    return Profile(blocks=tuple(blocks), model="VGG-16", device="A100, modelled")


def wide_resnet(sizes: Sequence[int]) -> Profile:
    stem = Layer(channels=(3, 64), kernel=7, side=112)
    blocks, side, before = [block("stem", [stem], sizes, stem.written_bytes // 4)], 56, 64
    for stage, (repeats, inner, outer) in enumerate(
        [(3, 128, 256), (4, 256, 512), (23, 512, 1024), (3, 1024, 2048)]
    ):
        side = 56 >> stage
        for place in range(repeats):
            layers = [
                Layer(channels=(before, inner), kernel=1, side=side),
                Layer(channels=(inner, inner), kernel=3, side=side),
                Layer(channels=(inner, outer), kernel=1, side=side),
            ]
            if place == 0:
                layers.append(Layer(channels=(before, outer), kernel=1, side=side))
            blocks.append(block(f"stage{stage}.{place}", layers, sizes, layers[2].written_bytes))
            before = outer
    dense = Layer(channels=(2048, 1000), kernel=1, side=1)
    blocks.append(block("dense", [dense], sizes, dense.written_bytes))
    return Profile(blocks=tuple(blocks), model="Wide ResNet-101-2", device="A100, modelled")


def profile_of(model: str, batch: int) -> Profile:
    sizes = [2**power for power in range(int(math.log2(batch)) + 1)]
    return vgg16(sizes) if model == "VGG-16" else wide_resnet(sizes)


# --- one comparison -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Found:
    """Throughputs in devices' worth."""

    devices: int
    data: float
    data_beside: float
    """With background in its gaps."""
    shared_out: float
    """On as few devices as will do, with background in the gaps and on the rest."""
    burst: float
    """The foreground's part."""
    beside: float
    """The background's part."""
    plan: BurstPlan

    @property
    def gain(self) -> float:
        return (self.burst + self.beside) / self.data

    @property
    def row(self) -> tuple[object, ...]:
        widths = self.plan.widths
        runs = [width for place, width in enumerate(widths) if place == 0 or widths[place - 1] != width]
        figures = self.data, self.data_beside, self.shared_out, self.burst, self.beside
        return (*figures, self.gain, self.burst / self.data, " ".join(map(str, runs)))


HEADS = (
    "data", "data + background", "shared out", "burst", "background", "burst + background / data",
    "burst's step speed / data's", "widths",
)  # fmt: skip


def work(drag: float = 0.0) -> tuple[Background, ...]:
    return (Background(name="background", unit_ms=UNIT_MS, drag=drag),)


def cluster_of(devices: int, rate: float) -> Cluster:
    return Cluster.uniform(hosts=devices, memory="80GiB", bandwidth=rate, latency=LATENCY_S)


def settings(steps: int = STEPS) -> dict[str, Any]:
    return {"steps": steps, "collective": Fastest(), "switch_ms": SWITCH_MS, "spans": 1}


def choose(profile: Profile, devices: int, batch: int, rate: float, deadline_ms: float) -> BurstPlan:
    frontier = plait.burst.plan(
        profile, devices=devices, batch=batch, bandwidth=rate, latency=LATENCY_S, collective=Fastest()
    )
    try:
        return frontier.before(deadline_ms)
    except UsageError:
        return frontier.fastest


def data_ms(profile: Profile, devices: int, batch: int, rate: float) -> float:
    cluster = cluster_of(devices, rate)
    return play_data(DataPlan(devices=devices, batch=batch), profile, cluster, **settings(2)).step_ms()


def beside_data(profile: Profile, devices: int, batch: int, rate: float) -> float:
    """Data parallelism with background in its gaps."""
    plan, cluster = DataPlan(devices=devices, batch=batch), cluster_of(devices, rate)
    played = play_data(plan, profile, cluster, background=work(), **settings())
    return profile.step_ms(batch) / played.step_ms() + played.work_ms["background"] / played.makespan_ms


def fewer(devices: int) -> list[int]:
    """Four numbers for each doubling, and the number itself."""
    found = {2**power * quarter // 4 for power in range(devices.bit_length()) for quarter in (4, 5, 6, 7)}
    return sorted({count for count in found if count < devices} | {devices})


def compare(model: str, devices: int, batch: int, rate: float) -> Found:
    profile = profile_of(model, batch)
    alone_ms, all_ms = profile.step_ms(batch), data_ms(profile, devices, batch, rate)
    fewest = next(count for count in fewer(devices) if data_ms(profile, count, batch, rate) <= SLACK * all_ms)
    plan = choose(profile, devices, batch, rate, SLACK * all_ms)
    played = play_burst(plan, profile, cluster_of(devices, rate), background=work(), **settings())
    return Found(
        devices=devices,
        data=alone_ms / all_ms,
        data_beside=beside_data(profile, devices, batch, rate),
        shared_out=beside_data(profile, fewest, batch, rate) + devices - fewest,
        burst=alone_ms / played.step_ms(),
        beside=played.work_ms["background"] / played.makespan_ms,
        plan=plan,
    )


def report(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """Print a table, and give it as a section."""
    cells = [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in each] for each in (heads, *rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(heads))]
    print(f"\n{title}")
    for line in cells:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    return Table(columns=tuple(heads), rows=[tuple(each) for each in rows], title=title)


# --- the studies --------------------------------------------------------------------------------------


def scaling(bench: Bench, model: str, batch: int, counts: Sequence[int]) -> list[Section]:
    """Strong scaling: the same batch on more and more devices."""
    sections: list[Section] = []
    curves: dict[str, list[tuple[float, float | None]]] = {}
    for network, rate in NETWORKS.items():
        found = [compare(model, devices, batch, rate) for devices in counts]
        title = f"{model}, batch {batch}, {network}: throughput in devices' worth"
        sections.append(report(title, ("devices", *HEADS), [(each.devices, *each.row) for each in found]))
        curves[network] = [(each.devices, each.gain) for each in found]
        reached = [each.devices for each in found if each.gain >= BAND[0]]
        print(f"  {BAND[0]}x is reached " + (f"from {reached[0]} devices on" if reached else "nowhere here"))
        last = found[-1]
        bench.case(
            f"{model}, {last.devices} devices, {network}: total throughput",
            last.burst + last.beside,
            against=("data parallelism", last.data),
            limit=("every device at full use", float(last.devices)),
            unit="devices' worth",
            better="higher",
            published=CLAIM,
        )
        bench.case(
            f"{model}, {last.devices} devices, {network}: against devices shared out",
            last.burst + last.beside,
            against=("data on the fewest devices, background on the rest", last.shared_out),
            unit="devices' worth",
            better="higher",
        )
    return [plotted(f"{model}, batch {batch}: gain in total throughput", "devices", curves), *sections]


def sensitivity(
    model: str, devices: int, name: str, values: Mapping[float, tuple[int, float]]
) -> list[Section]:
    """By batch or by bandwidth, on a fixed number of devices."""
    found = {value: compare(model, devices, batch, rate) for value, (batch, rate) in values.items()}
    title = f"{model}, {devices} devices, by {name}"
    table = report(title, (name, *HEADS), [(value, *each.row) for value, each in found.items()])
    curve: list[tuple[float, float | None]] = [(value, each.gain) for value, each in found.items()]
    return [plotted(title, name, {model: curve}), table]


def plotted(title: str, x: str, curves: Mapping[str, Sequence[tuple[float, float | None]]]) -> Plot:
    return Plot(
        title=title,
        x=x,
        y="total throughput over data parallelism's",
        series=tuple(Series(name=name, points=points) for name, points in curves.items()),
        levels=(Level(name="published: 2.2x to 2.4x", y=BAND),),
        log_x=True,
    )


def bounded(bench: Bench, devices: int, batch: int, steps: int) -> Table:
    """What a background that disturbs leaves when the controller of a run holds the bound."""
    rate, rows = NETWORKS["NVSwitch"], []
    profile, cluster = profile_of("VGG-16", batch), cluster_of(devices, rate)
    plan = choose(profile, devices, batch, rate, SLACK * data_ms(profile, devices, batch, rate))
    given = settings(steps)
    alone = play_burst(plan, profile, cluster, **given)
    for drag in (0.0, 0.1, 0.3):
        for name, control in (("none", None), ("1.05", Control(max_slowdown=1.05))):
            played = play_burst(plan, profile, cluster, background=work(drag), control=control, **given)
            slowdown = played.makespan_ms / alone.makespan_ms
            beside = played.work_ms["background"] / played.makespan_ms
            rows.append((f"{100 * drag:.0f}%", name, slowdown, beside, len(played.decisions)))
            if control is not None:
                bench.case(
                    f"bound of 1.05, computing {100 * drag:.0f}% longer beside background: slowdown",
                    slowdown,
                    unit="x",
                    at_most=1.05,
                    better="lower",
                )
    heads = ("disturbs by", "bound", "foreground's slowdown", "background, devices' worth", "decisions")
    return report(f"VGG-16, {devices} devices, NVSwitch: the controller in the loop", heads, rows)


def run(bench: Bench) -> None:
    counts = bench.pick(quick=[1, 8, 64], full=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    batch, last = bench.pick(quick=(64, 64), full=(256, 256))
    bench.configure(batch=batch, devices=counts, steps=STEPS, assumptions=list(ASSUMPTIONS), published=CLAIM)
    print("Assumptions:", *ASSUMPTIONS, sep="\n  - ")
    print(f"Published: {CLAIM}")
    sections: list[Section] = [Paragraph(f"Published: {CLAIM}."), *map(Paragraph, ASSUMPTIONS)]
    for model in ("VGG-16", "Wide ResNet-101-2"):
        sections += scaling(bench, model, batch, counts)
    batches = [last * factor for factor in bench.pick(quick=(1, 4), full=(1, 2, 4, 8, 16))]
    sections += sensitivity("VGG-16", last, "batch", {rows: (rows, NETWORKS["NVSwitch"]) for rows in batches})
    rates = bench.pick(quick=(10, 1000), full=(1, 3, 10, 30, 100, 300, 1000, 2400))
    sections += sensitivity(
        "VGG-16", bench.pick(quick=8, full=64), "gbit/s", {rate: (batch, rate * 1.25e8) for rate in rates}
    )
    sections.append(bounded(bench, bench.pick(quick=8, full=16), batch, bench.pick(quick=40, full=200)))
    RUNS.mkdir(parents=True, exist_ok=True)
    save(RUNS / "report.html", "Burst and background against data parallelism", sections)
    for place, plot in enumerate(each for each in sections if isinstance(each, Plot)):
        plot.save(RUNS / f"plot{place}.svg")
    print(f"\nPlots: {RUNS / 'report.html'}")
