"""Whether the lab's links carry what is asked of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from plait.bench import Bench
from plait.lab import Lab, Trace, measure_bandwidth
from plait.lab.bandwidth import TOLERANCE
from plait.lab.network import missing
from plait.units import format_bytes, parse_rate

HEADERS_PERCENT = 100 * (1 - 1448 / 1514)
JUDGED = ("100mbit", "1gbit")
WINDOW_SECONDS = 0.5
SETTLE_SECONDS = 0.1


def worst_percent(lab: Lab, rate: str, size_bytes: int) -> float:
    """How far the worst pair of hosts is off the rate."""
    lab.set_rate(rate)
    asked = parse_rate(rate)
    transfers = measure_bandwidth(lab, size_bytes, seconds=1.0)
    return max(100 * abs(transfer.bytes_per_second / asked - 1) for transfer in transfers)


def arriving(lab: Lab) -> float:
    """Bytes per second that reach host 1."""
    begin, before = time.perf_counter(), lab.hosts[1].received_bytes
    time.sleep(WINDOW_SECONDS)
    return (lab.hosts[1].received_bytes - before) / (time.perf_counter() - begin)


def halving_percent(lab: Lab, rate: str) -> float:
    """How far from a half the traffic is after a trace has halved the rate."""
    lab.set_rate(rate)
    half = parse_rate(rate) / 2
    with lab.compete(0, 1):
        time.sleep(SETTLE_SECONDS)
        before = arriving(lab)
        lab.follow(Trace.parse(f"0.1 {half * 8}bit"))
        while lab.hosts[1].rate_bytes_per_second != half:
            time.sleep(0.01)
        time.sleep(SETTLE_SECONDS)
        return 100 * abs(2 * arriving(lab) / before - 1)


def cut_bytes(lab: Lab, rate: str) -> float:
    """What passes a cut link."""
    lab.set_rate(rate)
    with lab.compete(0, 1):
        lab.cut(1)
        time.sleep(SETTLE_SECONDS)
        passed = arriving(lab)
        lab.restore(1)
    return passed


def run(bench: Bench) -> None:
    lacking = missing()
    if lacking is not None:
        bench.skip("all", f"{lacking} is missing: there are no links to shape")
        return
    counts = bench.pick(quick=(2,), full=(2, 4))
    sizes = bench.pick(quick=(8 << 20,), full=(8 << 20, 64 << 20))
    bench.configure(hosts=counts, sizes_bytes=sizes)
    with ExitStack() as stack:
        labs = {count: stack.enter_context(Lab(hosts=count)) for count in counts}
        sides: dict[str, Callable[[], float]] = {}
        judged: set[str] = set()
        for count, lab in labs.items():
            for rate in (*JUDGED, "10gbit"):
                for size in sizes:
                    name = f"{count} hosts, {rate}, {format_bytes(size)}"
                    sides[name] = partial(worst_percent, lab, rate, size)
                    judged |= {name} if rate in JUDGED else set()
        sides["1gbit, halved by a trace"] = partial(halving_percent, labs[2], "1gbit")
        sides["1gbit, cut"] = partial(cut_bytes, labs[2], "1gbit")
        figures = bench.interleave(sides, repetitions=bench.pick(quick=2, full=3), warmup=0, better="lower")
    *matrices, halved, cut = figures
    for figure in matrices:
        bound = 100 * TOLERANCE if figure.name in judged else None
        headers = ("headers", HEADERS_PERCENT)
        bench.case(figure.name, figure, unit="% off", limit=headers, at_most=bound)
    bench.case(halved.name, halved, unit="% off", at_most=100 * TOLERANCE)
    bench.case(cut.name, cut, unit="bytes/s", at_most=0.0)
