"""How fast a compressed all-reduce is, against gloo, over links of several rates."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.bench import Bench, Measured
from plait.bench.machine import Activity, Moment
from plait.lab import Lab
from plait.lab.network import missing
from plait.units import parse_rate

WORKER = Path(__file__).with_name("worker.py")
ELEMENTS = 16 << 20
TCP_SHARE = 1448 / 1514
"""Of a full Ethernet frame."""


@dataclass(frozen=True)
class Network:
    hosts: int
    rate: str | None

    def __str__(self) -> str:
        return f"{self.hosts} hosts, {self.rate or 'unshaped'}"


def attempt(bench: Bench, network: Network, sides: list[str], rounds: int) -> tuple[Activity, dict[str, Any]]:
    """One run of the workers from start to end, and what else the machine did meanwhile."""
    lines: list[str] = []
    two = network.hosts == 2 and len(os.sched_getaffinity(0)) > 1
    cores = ":".join(str(core) for core in sorted(os.sched_getaffinity(0))[:2]) if two else None
    config = {"sides": sides, "elements": ELEMENTS, "rounds": rounds, "seed": bench.seed}
    before = Moment.now()
    with Lab(hosts=network.hosts, rate=network.rate, cores=cores) as lab:
        command = [sys.executable, str(WORKER), json.dumps(config)]
        outcome = lab.run(command, show=lines.append, timeout_seconds=600)
    if outcome.exit_code:
        raise RuntimeError("the workers failed:\n" + "\n".join(lines))
    found = next(line.split(" | ", 1)[1] for line in lines if line.startswith('host0 | {"seconds"'))
    return Moment.now().since(before), json.loads(found)


def measure(
    bench: Bench, network: Network, sides: list[str], together: int
) -> tuple[dict[str, Measured], dict[str, Any]]:
    """Every side's figures; all again where others disturbed them, and the calmest attempt is kept."""
    rounds, retries = bench.pick(quick=5, full=15), bench.pick(quick=0, full=2)
    tried: list[tuple[Activity, dict[str, Any]]] = []
    while not tried or (tried[-1][0].disturbed and len(tried) <= retries):
        tried.append(attempt(bench, network, sides, rounds))
    activity, result = min(tried, key=lambda one: one[0].steal + one[0].others)
    figures = {
        side: Measured(
            name=side,
            values=tuple(result["seconds"][side]),
            better="lower",
            activity=activity,
            attempts=len(tried),
            together=together,
        ).scaled(1e3)
        for side in sides
    }
    return figures, result


def against_gloo(bench: Bench, network: Network, together: int, **bounds: float) -> None:
    figures, result = measure(bench, network, ["gloo fp32", "gloo fp16", "4 bits"], together)
    rate, sent = parse_rate(network.rate or ""), result["sent"]["4 bits"]
    bench.case(
        f"4 bits, {network}",
        figures["4 bits"],
        unit="ms",
        against=("gloo fp32", figures["gloo fp32"]),
        limit=("the wire", 1e3 * sent / (rate * TCP_SHARE)),
        **bounds,
    )
    bench.case(
        f"4 bits over fp16, {network}",
        figures["4 bits"],
        unit="ms",
        against=("gloo fp16", figures["gloo fp16"]),
    )
    share = [1e3 * sent / rate / value for value in figures["4 bits"].values]
    one = figures["4 bits"]
    measured = Measured(
        name="share", values=tuple(share), better="higher", activity=one.activity, attempts=one.attempts
    )
    bench.case(
        f"share of the wire, {network}", measured, unit="of 1", at_least=0.8, limit=("headers", TCP_SHARE)
    )
    bench.case(
        f"message buffers, {network}", result["memory_bytes"] / 2**20, unit="MiB a worker", better="lower"
    )


def against_the_better(bench: Bench, network: Network, together: int) -> None:
    figures, _ = measure(bench, network, ["gloo fp32", "gloo fp16", "auto"], together)
    best = min((figures[side] for side in ("gloo fp32", "gloo fp16")), key=lambda figure: figure.value)
    bench.case(f"auto, {network}", figures["auto"], unit="ms", against=(best.name, best), at_least=0.97)


def run(bench: Bench) -> None:
    lacking = missing()
    if lacking is not None:
        bench.skip("all", f"{lacking} is missing: there are no links to shape")
        return
    bench.configure(size_bytes=4 * ELEMENTS, bits=4, bucket=1024, threads=1)
    against_gloo(bench, Network(2, "1gbit"), 1, at_least=6.0, aim=7.0)
    against_gloo(bench, Network(4, "1gbit"), 2, at_least=5.0)
    against_the_better(bench, Network(2, "10gbit"), 3)
    against_the_better(bench, Network(2, None), 4)
