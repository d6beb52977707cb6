"""Whether the burst planner finds the frontier that all plans have, and how long large chains take."""

from __future__ import annotations

import itertools
import random
from functools import partial

import numpy as np

import plait.burst
from plait.bench import Bench
from plait.burst.costs import Costs
from plait.burst.frontier import Frontier
from plait.burst.network import Network
from plait.burst.pareto import minimal
from plait.profile import BlockProfile, Profile, Times

BLOCKS, DEVICES = 8, 6
SIZES = (1, 4, 16, 64, 256, 1024)


def draw(source: random.Random, blocks: int, *, graph: bool = False, tied: bool = False) -> Profile:
    made = []
    for place in range(blocks):
        fixed, per_row = source.uniform(0.0, 0.2), source.uniform(0.005, 0.2)
        inputs = None
        if graph and place and source.random() < 0.6:
            inputs = tuple(f"b{k}" for k in source.sample(range(place), source.randint(1, min(3, place))))
        made.append(
            BlockProfile(
                name=f"b{place}",
                parameter_bytes=int(10 ** source.uniform(4, 7.5)),
                output_bytes_per_sample=int(10 ** source.uniform(2, 5)),
                milliseconds={
                    size: Times(forward=fixed + per_row * size, backward=1.5 * fixed + 2 * per_row * size)
                    for size in SIZES
                },
                optimizer_milliseconds=source.uniform(0, 0.02),
                inputs=inputs,
                tied=("shared",) if tied and source.random() < 0.3 else (),
            )
        )
    return Profile(blocks=tuple(made))


def brute_force(profile: Profile, batch: int, network: Network) -> np.ndarray:
    """[2, point]: the frontier of every choice of widths."""
    costs = Costs(profile, range(1, DEVICES + 1), batch=batch, network=network)
    tails = np.array(list(itertools.product(range(DEVICES), repeat=BLOCKS - 2)))
    best = np.empty((2, 0))
    for head in itertools.product(range(DEVICES), repeat=2):
        score = costs.score(np.concatenate([np.tile(head, (len(tails), 1)), tails], axis=1))
        best = np.concatenate([best, np.stack([score.step_ms, score.device_ms])], axis=1)
        best = best[:, minimal(best)]
    return best


def differ(frontier: Frontier, wanted: np.ndarray) -> bool:
    """Whether a point of one has none of the other at or below it, but for rounding."""
    found = np.array(frontier.points).T
    for some, others in ((found, wanted), (wanted, found)):
        below = (others[:, :, None] <= some[:, None, :] * (1 + 1e-9)).all(axis=0)
        if not below.any(axis=0).all():
            return True
    return False


def compare(bench: Bench, kind: str, cases: int, *, graph: bool, tied: bool) -> None:
    different = 0
    for seed in range(bench.seed, bench.seed + cases):
        source = random.Random(f"{kind}/{seed}")
        profile = draw(source, BLOCKS, graph=graph, tied=tied)
        batch, bandwidth = source.choice([6, 16, 32, 50]), 10 ** source.uniform(7, 10)
        frontier = plait.burst.plan(profile, devices=DEVICES, batch=batch, bandwidth=bandwidth, latency=40e-6)
        different += differ(frontier, brute_force(profile, batch, Network.of(bandwidth, 40e-6)))
    bench.case(
        f"{kind}: other frontier than brute force", different, unit=f"of {cases}", at_most=0, better="lower"
    )


def large(bench: Bench, rate: str, *, at_most_percent: float | None) -> None:
    profile = draw(random.Random(bench.seed), 1000)
    asked = partial(
        plait.burst.plan, profile, devices=1024, batch=1024, bandwidth=rate, latency="20us", limit=2.0
    )
    (took,) = bench.interleave(
        {f"1,000 blocks, 1,024 devices, {rate}": asked},
        repetitions=bench.pick(quick=2, full=7),
        retries=bench.pick(quick=0, full=2),
    )
    name = f"1,000 blocks, 1,024 devices, {rate}"
    bench.case(name, took, unit="s", at_most=2.0)
    frontier = asked()
    bench.case(
        f"{name}: certified gap", 100 * frontier.gap, unit="%", at_most=at_most_percent, better="lower"
    )
    bench.case(f"{name}: plans on the frontier", len(frontier), unit="plans", better="higher")


def usual(bench: Bench) -> None:
    profile = draw(random.Random(bench.seed), 40)
    asked = partial(plait.burst.plan, profile, devices=8, batch=256, bandwidth="10gbit", latency="20us")
    (took,) = bench.interleave(
        {"40 blocks, 8 devices": asked}, repetitions=bench.pick(quick=2, full=7), retries=0
    )
    bench.case("40 blocks, 8 devices", took, unit="s")
    bench.case("40 blocks, 8 devices: certified gap", 100 * asked().gap, unit="%", at_most=0, better="lower")


def run(bench: Bench) -> None:
    cases = bench.pick(quick=3, full=20)
    bench.configure(blocks=BLOCKS, devices=DEVICES, cases=cases)
    compare(bench, "chains", cases, graph=False, tied=False)
    compare(bench, "graphs", cases, graph=True, tied=False)
    compare(bench, "graphs with shared weights", cases, graph=True, tied=True)
    large(bench, "100gbit", at_most_percent=1.0)
    large(bench, "10gbit", at_most_percent=1.0)
    large(bench, "1gbit", at_most_percent=None)
    usual(bench)
