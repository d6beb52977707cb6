"""What background work costs a foreground that waits for the wire, and what both get done together."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from plait.bench import Bench, Measured
from plait.bench.machine import Activity, Moment
from plait.lab import Lab
from plait.lab.network import missing

HERE = Path(__file__).parent
HOSTS = 2
RATE = "1gbit"
ROWS = 8
"""Of the global batch; few, so that the wire is what limits."""
CLAIM = (
    "2.2x to 2.4x of data parallelism's total cluster throughput when the cluster scale is large (DeepPool, "
    "arXiv 2112.10065, first version; 1.2x to 2.3x in the last, of MLSys 2022)"
)
_numbers = count(1)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A foreground and its background, from start to end."""

    activity: Activity
    rounds: list[dict[str, Any]]
    """Of rank 0."""
    logs: list[list[tuple[float, float]]]
    """By host: when a step of the background ended, and its loss."""
    alone: list[tuple[float, float]]
    """When the background had the cores for itself: before the foreground and after it."""
    reports: list[dict[str, Any]]

    def rate(self, begin: float, end: float) -> float:
        """Steps of the background a second, all hosts together."""
        return sum(sum(begin < at <= end for at, _ in log) for log in self.logs) / (end - begin)

    def figures(self, background: bool) -> list[float]:
        return [each["ms"] for each in self.rounds if each["background"] is background]

    @property
    def share(self) -> list[float]:
        """Round by round, the background's rate over its rate alone."""
        alone = statistics.fmean(self.rate(*window) for window in self.alone)
        beside = [each for each in self.rounds if each["background"]]
        return [self.rate(each["begun"], each["ended"]) / alone for each in beside]


def read_log(path: Path) -> list[tuple[float, float]]:
    lines = path.read_text().splitlines()
    return [(float(at), float(loss)) for at, loss in (line.split() for line in lines if " " in line)]


def attempt(bench: Bench, foreground: str) -> Run:
    """Hosts, a background on each, and the foreground in their midst."""
    usable = sorted(os.sched_getaffinity(0))
    cores = ":".join(map(str, usable[:HOSTS])) if len(usable) >= HOSTS else None
    alone_s = bench.pick(quick=4.0, full=6.0)
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {
            "foreground": foreground, "folder": name, "rows": ROWS, "seed": bench.seed, "warmup": 18,
            "rounds": bench.pick(quick=4, full=6), "steps": bench.pick(quick=8, full=12),
        }  # fmt: skip
        environment = {"PLAIT_BURST_DIRECTORY": str(folder / "published"), "PLAIT_PUBLISH": "foreground"}
        before = Moment.now()
        with Lab(hosts=HOSTS, rate=RATE, cores=cores) as lab:
            agents = []
            for host in range(HOSTS):
                words = [sys.executable, str(HERE / "agent.py"), name, str(host)]
                with (folder / f"report{host}").open("wb") as out:
                    agents.append(lab.start(host, words, env=environment, stdout=out))
            windows = [watch_alone(folder, alone_s, agents)]
            words = [sys.executable, str(HERE / "worker.py"), json.dumps(config)]
            outcome = lab.run(words, show=lines.append, timeout_seconds=900, env=environment)
            if outcome.exit_code:
                raise RuntimeError("the workers failed:\n" + "\n".join(lines[-20:]))
            time.sleep(1.0)
            windows.append(watch_alone(folder, alone_s, agents))
            (folder / "end").write_text("")
            for agent in agents:
                agent.wait(30)
        activity = Moment.now().since(before)
        told = [line.split("RESULT ", 1)[1] for line in lines if "host0 | RESULT" in line]
        reports = [(folder / f"report{host}").read_text() for host in range(HOSTS)]
        return Run(
            activity=activity,
            rounds=json.loads(told[0])["rounds"],
            logs=[read_log(folder / f"losses{host}") for host in range(HOSTS)],
            alone=windows,
            reports=[json.loads(text.split("REPORT ", 1)[1]) for text in reports],
        )


def watch_alone(folder: Path, seconds: float, agents: list[Any]) -> tuple[float, float]:
    """A window in which the background has the cores for itself."""
    for host in range(HOSTS):
        (folder / f"switch{host}").write_text("on")
    deadline = time.monotonic() + 120
    while not all((folder / f"losses{host}").exists() for host in range(HOSTS)):
        if time.monotonic() > deadline or any(agent.poll() is not None for agent in agents):
            raise RuntimeError("the background did not start")
        time.sleep(0.1)
    time.sleep(0.5)
    begin = time.monotonic()
    time.sleep(seconds)
    return begin, time.monotonic()


def measured(run: Run, name: str, values: list[float], better: Any, together: int) -> Measured:
    return Measured(name=name, values=tuple(values), better=better, activity=run.activity, together=together)


def show(bench: Bench, foreground: str, ddp_ms: float | None, **bounds: float) -> float:
    """The cases of one foreground; what its step takes alone."""
    run = attempt(bench, foreground)
    for host, log in enumerate(run.logs):
        tenth = max(1, len(log) // 10)
        first, last = (statistics.fmean(loss for _, loss in part) for part in (log[:tenth], log[-tenth:]))
        bench.case(f"background's loss on host {host}, {foreground}", last, unit="nats", better="lower")
        if last >= first:
            raise RuntimeError(
                f"the background on host {host} does not learn: loss {first:.3f}, then {last:.3f}"
            )
    alone, beside, share = run.figures(False), run.figures(True), run.share
    together = next(_numbers)
    bench.case(
        f"step beside background, {foreground}",
        measured(run, "beside", beside, "lower", together),
        unit="ms a step",
        against=("alone", measured(run, "alone", alone, "lower", together)),
    )
    ratios = [a / b for a, b in zip(beside, alone, strict=True)]
    bench.case(
        f"slowdown, {foreground}",
        measured(run, "slowdown", ratios, "lower", together),
        unit="times alone",
        at_most=1.05,
    )
    bench.case(
        f"background's share, {foreground}",
        measured(run, "share", share, "higher", together),
        unit="of its rate alone",
    )
    reference_ms = statistics.median(alone) if ddp_ms is None else ddp_ms
    totals = [reference_ms / ms + part for ms, part in zip(beside, share, strict=True)]
    busy = statistics.fmean(each["processor"] for each in run.rounds if not each["background"])
    bench.case(
        f"total throughput, {foreground}",
        measured(run, "total", totals, "higher", together),
        unit="times DDP alone",
        limit=("the processor time that it leaves", reference_ms / statistics.median(alone) + 1 - busy),
        published=CLAIM,
        **bounds,
    )
    bench.configure(**{f"{foreground}, what the hosts said": [each["said"] for each in run.reports]})
    bench.configure(protection=run.reports[0]["protection"])
    for each in run.reports:
        print(foreground, each["said"], each["decisions"], file=sys.stderr)
    return statistics.median(alone)


def run(bench: Bench) -> None:
    lacking = missing()
    if lacking is not None:
        bench.skip("all", f"{lacking} is missing: there are no links to shape")
        return
    bench.configure(hosts=HOSTS, rate=RATE, rows=ROWS, max_slowdown=1.05, threads=1)
    ddp_ms = show(bench, "DDP", None)
    show(bench, "burst", ddp_ms, at_least=1.8)
