"""Jobs larger than memory, for real and simulated."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

JOBS, DEVICES, MEMORY = 6, 2, "1.25GiB"
WIDTH, LAYERS, ROWS = 384, 6, 8


def jobs(steps: int) -> list[Any]:
    """Of a kind, each with its own learning rate."""
    import torch

    from plait.demo.chain import CONTEXT, gpt2
    from plait.english import english
    from plait.job import Job

    return [
        Job(
            name=f"spill-{i}",
            model=functools.partial(gpt2, width=WIDTH, layers=LAYERS),
            data=functools.partial(english, context=CONTEXT),
            loss="plait.losses:model_loss",
            weight="plait.losses:next_tokens",
            optimizer=functools.partial(torch.optim.AdamW, lr=1e-3 / 2**i),
            batch=ROWS,
            steps=steps,
        )
        for i in range(JOBS)
    ]


def measure(folder: str, core: int) -> None:
    """Measure a job on one core, and leave its profile there."""
    from plait.strategy.measuring import profile_of

    os.sched_setaffinity(0, {core})
    profile_of(jobs(1)[0], devices=DEVICES, directory=folder).save(Path(folder) / "profile.json")


def ask(directory: Path, *, steps: int) -> tuple[float, float, dict[str, Any]]:
    """Milliseconds from the first unit to the last, measured and simulated; and what they rest on."""
    from plait.bench.machine import Moment
    from plait.cluster import Cluster
    from plait.profile import Profile
    from plait.sim import play_spill
    from plait.sim.spilled_job import SpilledJob
    from plait.spill import fit
    from plait.spill.footprint import likely_bytes
    from plait.spill.makespan import Disk
    from plait.spill.plan import SpillPlan
    from plait.spill.policies import policy
    from plait.strategy.demand import Demand
    from plait.strategy.site import Site
    from plait.strategy.spilled import spilled
    from plait.units import parse_bytes

    given, lines = jobs(steps), []
    folders = [directory / f"profile{i}" for i in range(DEVICES)]
    cores = sorted(os.sched_getaffinity(0))[:DEVICES]
    # On all cores at once: devices share the machine's memory when they train, too.
    measuring = [
        subprocess.Popen([sys.executable, __file__, str(folder), str(core)])
        for folder, core in zip(folders, cores, strict=False)
    ]
    codes = [each.wait() for each in measuring]
    if any(codes):
        raise RuntimeError("a job could not be measured")
    profile = Profile.load(folders[0] / "profile.json")
    before = Moment.now()
    outcomes = fit(given, memory=MEMORY, devices=DEVICES, directory=directory / "run", show=lines.append)
    left = Moment.now().left(before)
    said = re.search(r"processes by themselves ([\d.]+ ?[KMG]i?B)", "\n".join(lines))
    assert said is not None, f"nothing is said of what processes take: {lines}"
    each_bytes = (parse_bytes(MEMORY) - parse_bytes(said[1].replace(" ", ""))) // DEVICES
    cluster = Cluster.detect(devices=DEVICES, directory=directory).measure(["disk"])
    likely = -(-likely_bytes(DEVICES) // DEVICES)  # the planner takes that off, not what was measured
    site = Site(cluster=cluster, memory_bytes=each_bytes + likely)
    demand = Demand.of(given[0], profile)
    option = spilled(demand, site, at_once=DEVICES)
    plan = option.plan
    assert isinstance(plan, SpillPlan), option.why_not
    disk = cluster.tier(cluster.hosts[0].name, "disk")
    assert disk.read_bytes_per_s is not None, "it was measured"
    assert disk.write_bytes_per_s is not None, "it was measured"
    played = play_spill(
        [SpilledJob(name=job.name, plan=plan, profile=profile, batch=ROWS, steps=steps) for job in given],
        DEVICES,
        policy("sticky"),
        Disk(
            memory_bytes=DEVICES * plan.arena_bytes,
            read_bytes_per_s=disk.read_bytes_per_s,
            write_bytes_per_s=disk.write_bytes_per_s,
        ),
        speeds=dict.fromkeys(range(DEVICES), left),
    )
    told = {
        "jobs": JOBS,
        "memory": MEMORY,
        "measured_read_bytes": outcomes.measured.read_bytes,
        "simulated_read_bytes": played.disk_bytes[0],
        "shards": len(plan.shards),
        "left": left,
    }
    return 1e3 * outcomes.measured.seconds, played.makespan_ms, told


if __name__ == "__main__":
    measure(sys.argv[1], int(sys.argv[2]))
