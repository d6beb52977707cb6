"""From a cable that is cut to the next step, and what becomes of the losses."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import plait
from plait import losses
from plait.bench import Bench
from plait.cluster import Cluster
from plait.engine import Limits
from plait.engine.lab_launcher import LabLauncher
from plait.job import Job
from plait.lab import Lab
from plait.lab.network import missing

HOSTS, CUT = 4, 2
SILENCE_S = 5.0
CLUSTER = Cluster.uniform(hosts=HOSTS, memory="2GiB", bandwidth="1gbit", latency="50us")
NAMES = [device.name for device in CLUSTER.devices]


class Rest(torch.nn.Module):
    """Takes its time for every row and keeps no core busy: four hosts share two cores here."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.004 * x.shape[0])
        return x


def net() -> torch.nn.Module:
    layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh()) for _ in range(4)]
    return torch.nn.Sequential(*layers, Rest())


def points(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(seed))
    return [(row, row.argmax()) for row in x]


def job(steps: int) -> Job:
    return Job(
        name="cut",
        model=net,
        data=points,
        loss=losses.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        batch=64,
        steps=steps,
        precision="fp64",
        strategy="data",
    )


@dataclass(kw_only=True)
class Cut:
    """What came of one run."""

    losses: tuple[float, ...]
    noticed_s: float = 0.0
    again_s: float = 0.0


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def attempt(steps: int, folder: Path, *, cut: bool, returns: bool) -> Cut:
    gone: set[str] = set()
    at: list[float] = []
    directory = folder / "run"
    with Lab(hosts=HOSTS, rate="1gbit") as lab:

        def disturb() -> None:
            while len(lines(directory / "metrics.jsonl")) < steps // 3:
                time.sleep(0.02)
            gone.add(NAMES[CUT])
            at.append(time.time())
            lab.cut(CUT)
            while returns and not any(
                event["kind"] == "broken" for event in lines(directory / "events.jsonl")
            ):
                time.sleep(0.05)
            if returns:
                lab.restore(CUT)
                gone.clear()

        if cut:
            threading.Thread(target=disturb, daemon=True).start()
        done = plait.run(
            job(steps),
            CLUSTER,
            LabLauncher(lab, NAMES, gone=lambda: frozenset(gone)),
            directory=directory,
            limits=Limits(silence_s=SILENCE_S, missing_s=1.0),
            save_every=5,
            show=False,
        )
    found = Cut(losses=done["cut"].losses)
    if cut:
        broken = next(event for event in lines(directory / "events.jsonl") if event["kind"] == "broken")
        after = [
            row
            for row in lines(directory / "metrics.jsonl")
            if float(str(row["time"])) > float(str(broken["time"]))
        ]
        found.noticed_s = float(str(broken["time"])) - at[0]
        found.again_s = float(str(after[0]["time"])) - at[0]
    return found


def run(bench: Bench) -> None:
    if missing() is not None:
        bench.skip("all", str(missing()))
        return
    steps = bench.pick(quick=60, full=150)
    bench.configure(hosts=HOSTS, steps=steps, silence_s=SILENCE_S)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        calm = attempt(steps, folder / "calm", cut=False, returns=False)
        back = attempt(steps, folder / "back", cut=True, returns=True)
        away = attempt(steps, folder / "away", cut=True, returns=False)
    for label, found in (("the host returns", back), ("the host stays away", away)):
        bench.case(f"noticed, {label}", found.noticed_s, unit="s", better="lower", at_most=SILENCE_S + 3)
        bench.case(f"steps again, {label}", found.again_s, unit="s", better="lower")
    unequal = sum(a != b for a, b in zip(calm.losses, back.losses, strict=True))
    bench.case(
        "losses that differ in any bit, the host returns",
        float(unequal),
        unit="steps",
        better="lower",
        at_most=0,
    )
    for label, found in (("the host returns", back), ("the host stays away", away)):
        worst = max(abs(a - b) / abs(a) for a, b in zip(calm.losses, found.losses, strict=True))
        bench.case(f"largest difference, {label}", worst, unit="of the loss", better="lower", at_most=1e-10)
