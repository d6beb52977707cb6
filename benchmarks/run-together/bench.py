"""A compressed burst foreground and a spilled sweep behind it, against plain PyTorch doing the same."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import DEVNULL

import plait
from plait.bench import Bench
from plait.cluster import Cluster
from plait.engine.lab_launcher import LabLauncher
from plait.job import Job
from plait.lab import Lab
from plait.lab.network import missing

sys.path.insert(0, str(Path(__file__).parent))

from work import RATES, TRIALS, foreground, sweep, trial

HERE = Path(__file__).parent
HOSTS, RATE = 2, "1gbit"
CLUSTER = Cluster.uniform(hosts=HOSTS, memory="4GiB", bandwidth=RATE, latency="50us")
NAMES = [device.name for device in CLUSTER.devices]


def lab() -> Lab:
    usable = sorted(os.sched_getaffinity(0))
    cores = ":".join(map(str, usable[:HOSTS])) if len(usable) >= HOSTS else None
    return Lab(hosts=HOSTS, rate=RATE, cores=cores)


def together(jobs: list[object], folder: Path) -> tuple[float, float]:
    """Seconds of the whole, and milliseconds of a foreground step."""
    with lab() as hosts:
        begun = time.perf_counter()
        done = plait.run(
            jobs,
            CLUSTER,
            LabLauncher(hosts, NAMES),
            directory=folder,
            strategy="burst",
            compress=4,
            show=lambda line: print(line, file=sys.stderr),
        )
        taken_s = time.perf_counter() - begun
    if not done.finished:
        raise RuntimeError("; ".join(str(result) for result in done.values()))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [1e3 * row["seconds"] for row in rows if row["job"] == "front" and "seconds" in row]
    return taken_s, statistics.median(steps)


def plainly(steps: int, trial_steps: int, folder: Path) -> tuple[float, float]:
    """Seconds of plain PyTorch for the same, and of the foreground alone."""
    folder.mkdir()
    with lab() as hosts:
        front = saved(foreground(steps), folder)
        begun = time.perf_counter()
        where = {"PYTHONPATH": str(HERE)}
        said: list[str] = []
        outcome = hosts.run([sys.executable, "-m", "plait.reference", front], show=said.append, env=where)
        front_s = time.perf_counter() - begun
        if outcome.exit_code:
            raise RuntimeError("the foreground failed:\n" + "\n".join(said[-5:]))
        files = [
            saved(trial(rate, number, trial_steps), folder) for number, rate in enumerate(RATES[:TRIALS])
        ]

        def train(host: int) -> None:
            for file in files[host::HOSTS]:
                words = [sys.executable, "-m", "plait.reference", file]
                if hosts.start(host, words, env=where, stdout=DEVNULL, stderr=DEVNULL).wait():
                    raise RuntimeError("a trial failed")

        with ThreadPoolExecutor(HOSTS) as pool:
            list(pool.map(train, range(HOSTS)))
        return time.perf_counter() - begun, front_s


def saved(job: Job, folder: Path) -> str:
    file = folder / f"{job.name}.json"
    file.write_text(job.to_json())
    return str(file)


def run(bench: Bench) -> None:
    if missing() is not None:
        bench.skip("all", str(missing()))
        return
    steps, trial_steps = bench.pick(quick=12, full=80), bench.pick(quick=6, full=40)
    bench.configure(hosts=HOSTS, rate=RATE, steps=steps, trials=TRIALS, trial_steps=trial_steps)
    alone_ms: list[float] = []
    beside_ms: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plait.plan([foreground(steps)], CLUSTER)  # measures the profile, which is then kept
        number = 0

        def ours() -> float:
            nonlocal number
            number += 1
            taken_s, step_ms = together([foreground(steps), sweep(trial_steps)], folder / f"both{number}")
            beside_ms.append(step_ms)
            alone_ms.append(together([foreground(steps)], folder / f"alone{number}")[1])
            return taken_s

        def theirs() -> float:
            return plainly(steps, trial_steps, folder / f"plain{time.monotonic_ns()}")[0]

        both, plain = bench.interleave(
            {"together": ours, "plain": theirs},
            repetitions=bench.pick(quick=1, full=2),
            warmup=0,
            better="lower",
        )
    bench.case(
        "compressed burst with a spilled sweep behind it", both, unit="s",
        against=("plain PyTorch, one after another", plain), at_least=2.0,
    )  # fmt: skip
    slower = statistics.median(a / b for a, b in zip(beside_ms, alone_ms, strict=True))
    bench.case("the foreground's slowdown", slower, unit="times its step alone", better="lower", at_most=1.05)
