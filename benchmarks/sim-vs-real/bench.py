"""How far simulated steps are from real ones, strand by strand."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from plait.bench import Bench, Measured
from plait.bench.machine import Activity, Moment
from plait.burst import BurstPlan
from plait.cluster import Cluster
from plait.compress.codec import Exact
from plait.compress.price import Speed
from plait.lab import Lab
from plait.lab.network import missing
from plait.pipeline.plan import PipelinePlan
from plait.profile import Profile
from plait.sim import DataPlan, play_burst, play_data, play_pipeline
from plait.sim.reduction import Coded, codec_of
from plait.units import parse_rate

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import spilling  # noqa: E402

MEAN, WORST = 10.0, 20.0
"""Percent that predictions may be off."""
PROBE_S = 0.3
"""How long the wire is probed: a shorter message has not come to its full speed."""
NO_TIME = Speed(pack_s_per_byte=0.0, add_s_per_byte=0.0, decode_s_per_byte=0.0)
_numbers = count(1)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is trained on some hosts."""

    label: str
    kind: str
    hosts: int
    rate: str
    batch: int
    micro_batches: int
    ways: tuple[str, ...]

    @property
    def emulated(self) -> bool:
        return self.kind in ("emulated", "even")


ROWS = (
    Row(
        label="2 hosts, 1 Gbit/s, convolutions and dense layers",
        kind="vgg",
        hosts=2,
        rate="1gbit",
        batch=32,
        micro_batches=8,
        ways=("data, fp32", "data, 4 bits", "burst, fp32", "burst, 4 bits"),
    ),
    Row(
        label="2 hosts, 100 Mbit/s, transformer",
        kind="gpt",
        hosts=2,
        rate="100mbit",
        batch=32,
        micro_batches=8,
        ways=("data, 4 bits", "pipeline, k=1", "pipeline, k=4"),
    ),
    Row(
        label="4 hosts, 1 Gbit/s, emulated",
        kind="emulated",
        hosts=4,
        rate="1gbit",
        batch=32,
        micro_batches=8,
        ways=("data, fp32", "burst, fp32"),
    ),
    Row(
        label="4 hosts, 100 Mbit/s, emulated",
        kind="even",
        hosts=4,
        rate="100mbit",
        batch=32,
        micro_batches=16,
        ways=("pipeline, k=1", "pipeline, k=2"),
    ),
)


def attempt(row: Row, config: dict[str, Any], cores: str | None) -> tuple[Activity, dict[str, Any]]:
    """One run from start to end, and what else the machine did meanwhile."""
    lines: list[str] = []
    before = Moment.now()
    with Lab(hosts=row.hosts, rate=row.rate, cores=cores) as lab:
        command = [sys.executable, str(HERE / "worker.py"), json.dumps(config)]
        outcome = lab.run(command, show=lines.append, timeout_seconds=900)
    if outcome.exit_code:
        raise RuntimeError("the workers failed:\n" + "\n".join(lines))
    found = next(line.split(" | RESULT ", 1)[1] for line in lines if " | RESULT " in line)
    after = Moment.now()
    return after.since(before), {**json.loads(found), "left": after.left(before)}


def predicted_ms(row: Row, way: str, result: dict[str, Any]) -> float:
    """A step of a way, played."""
    profile = Profile.from_json(result["profile"])
    cluster = Cluster.uniform(
        hosts=row.hosts, memory="4GiB", bandwidth=result["bandwidth"], latency=result["latency_s"]
    )
    # A profile's medians are of moments in which the hypervisor took nothing; a step has many of the others.
    speed = 1.0 if row.emulated else result["left"]
    speeds = {device.name: speed for device in cluster.devices}
    strategy, _, more = way.partition(", ")
    made = result["plans"][way]
    if strategy == "pipeline":
        plan = PipelinePlan.from_json(made)
        return play_pipeline(plan, profile, cluster, speeds=speeds).step_ms()
    bits = 4 if more == "4 bits" else None
    # torch's own, measured with numbers as they are: the processor's part has the adding in it already.
    plain = Coded(codec=Exact(), speed=NO_TIME, busy_s_per_byte=result["busy_s_per_byte"])
    packed = Coded(
        codec=codec_of(4), speed=Speed(**result["speed"]), busy_s_per_byte=result["own_busy_s_per_byte"]
    )
    collective = (plain if bits is None else packed) if not row.emulated else None
    if strategy == "burst":
        widths = BurstPlan.from_json(made)
        return play_burst(widths, profile, cluster, collective=collective, speeds=speeds).step_ms()
    plan_of_data = DataPlan(devices=row.hosts, batch=row.batch, bits=bits)
    return play_data(plan_of_data, profile, cluster, collective=collective, speeds=speeds).step_ms()


def train(bench: Bench, row: Row) -> list[float]:
    """By way, how far the prediction is off, in percent of what was measured."""
    usable = sorted(os.sched_getaffinity(0))
    real = not row.emulated and len(usable) >= row.hosts
    cores = ":".join(map(str, usable[: row.hosts])) if real else None
    shares = {row.batch // row.micro_batches, *(row.batch // width for width in range(1, row.hosts + 1))}
    config = {
        "kind": row.kind,
        "batch": row.batch,
        "micro_batches": row.micro_batches,
        "ways": row.ways,
        "sizes": sorted(shares),
        "seed": bench.seed,
        "probe_bytes": round(PROBE_S * parse_rate(row.rate)) // 4 * 4,
        "repetitions": 1 if row.emulated else 3,  # what is emulated takes the same every time
        "rounds": bench.pick(quick=4, full=12),
        "measure_every": 0 if row.emulated else bench.pick(quick=2, full=3),
    }
    retries = bench.pick(quick=0, full=2)
    tried: list[tuple[Activity, dict[str, Any]]] = []
    while not tried or (tried[-1][0].disturbed and len(tried) <= retries):
        tried.append(attempt(row, config, cores))
    activity, result = min(tried, key=lambda one: one[0].steal + one[0].others)
    together = next(_numbers)
    found = []
    for way in row.ways:
        values = tuple(1e3 * seconds for seconds in result["seconds"][way])
        measured = Measured(
            name=way,
            values=values,
            better="lower",
            activity=activity,
            attempts=len(tried),
            together=together,
        )
        found.append(report(bench, f"{way}, {row.label}", measured, predicted_ms(row, way, result)))
    return found


def report(bench: Bench, label: str, measured: Measured | float, predicted: float) -> float:
    """Both, and by how many percent the prediction is off; below zero, it is too short."""
    value = measured if isinstance(measured, float) else statistics.median(measured.values)
    off = 100 * (predicted / value - 1)
    bench.case(f"{label}: measured", measured, unit="ms", better="lower")
    bench.case(f"{label}: simulated", predicted, unit=f"ms, {off:+.1f}%", better="lower")
    return off


def run(bench: Bench) -> None:
    lacking = missing()
    if lacking is not None:
        bench.skip("hosts", f"{lacking} is missing: there are no links to shape")
    rows = ROWS if lacking is None else ()
    bench.configure(rows=[replace(row).__dict__ for row in rows])
    off: list[float] = []
    for row in rows:
        off += train(bench, row)
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as directory:
        measured_ms, simulated_ms, told = spilling.ask(Path(directory), steps=bench.pick(quick=4, full=12))
    bench.configure(spill=told)
    off.append(report(bench, "spill, six transformers, 2 devices", measured_ms, simulated_ms))
    errors = [abs(one) for one in off]
    bench.case("mean of all", statistics.mean(errors), unit="% off", better="lower", at_most=MEAN)
    bench.case("the worst", max(errors), unit="% off", better="lower", at_most=WORST)
