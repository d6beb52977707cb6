"""Whether a model of six billion parameters trains in 4 GiB, and how near to the disk's speed."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from plait.bench import Bench, Measured
from plait.bench.machine import Moment
from plait.cluster.disk import measure_disk
from plait.cluster.machine import disk_free_bytes
from plait.lab.limited import run_limited
from plait.lab.memory import can_limit

HERE = Path(__file__).parent
VOCABULARY = 50257
LIMIT_BYTES = 4 << 30


def attempt(side: str, config: dict[str, Any], memory: int | None) -> dict[str, Any]:
    """One side in a process of its own, within a memory limit if there is one."""
    command = [sys.executable, str(HERE / "worker.py"), side, json.dumps(config)]
    before = Moment.now()
    done = run_limited(command, memory=memory, env={"PYTHONPATH": str(HERE)})
    found: dict[str, Any] = json.loads(done.lines[-1])
    return {**found, "activity": Moment.now().since(before), "peak_bytes": done.peak_bytes}


def parameters(config: dict[str, Any]) -> int:
    width, layers = config["width"], config["layers"]
    layer = 12 * width * width + 13 * width
    return layers * layer + (VOCABULARY + config["context"] + 2) * width


def disk_speeds(directory: str) -> list[tuple[float, float]]:
    """How fast the disk reads and writes, with one request at a time and with eight."""
    found = [measure_disk(Path(directory), size_bytes=2 << 30, at_once=count) for count in (1, 8)]
    return [(speed.read_bytes_per_s, speed.write_bytes_per_s) for speed in found]


def run(bench: Bench) -> None:
    if not can_limit():
        bench.skip("all", "memory cannot be limited here: there is no control group that can be written")
        return
    config: dict[str, Any] = {"width": 4096, "layers": bench.pick(quick=4, full=28), "context": 64}
    config |= {"rate": 1e-5, "steps": 3, "seed": bench.seed, "memory_bytes": LIMIT_BYTES, "export": False}
    count = parameters(config)
    room = 2 * 4 * count + (2 << 30)
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as directory:
        if disk_free_bytes(Path(directory)) < room:
            bench.skip("all", f"{room >> 30} GiB of disk are needed in {directory}")
            return
        config["directory"] = directory
        bench.configure(**{k: v for k, v in config.items() if k != "directory"}, parameters=count)
        speeds = disk_speeds(directory)
        large = attempt("spilled", config, LIMIT_BYTES)
        speeds += disk_speeds(directory)
        shallow = {**config, "layers": 2}
        same = [attempt("spilled", shallow, LIMIT_BYTES)["losses"], attempt("plain", shallow, None)["losses"]]
    if same[0] != same[1]:
        raise RuntimeError(f"two layers lose {same[0]}, and in memory {same[1]}")
    losses = large["losses"]
    steps = Measured(name="step", values=tuple(large["seconds"]), better="lower", activity=large["activity"])
    read, written = large["read_bytes"] / len(losses), large["written_bytes"] / len(losses)
    reads, writes = (max(speed[i] for speed in speeds) for i in (0, 1))
    disk = read / reads + written / writes
    name = f"GPT-2 of {count / 1e9:.2f} billion parameters"
    bench.case(f"{name}, a step", steps, unit="s", limit=("the disk alone", disk))
    bench.case("the disk reads", reads / 1e9, unit="GB/s", better="higher")
    bench.case("the disk writes", writes / 1e9, unit="GB/s", better="higher")
    bench.case("of the disk's speed", disk / steps.value, unit="", better="higher", at_least=0.7)
    bench.case("read a step", read / 1e9, unit="GB", better="lower")
    bench.case("written a step", written / 1e9, unit="GB", better="lower")
    bench.case(
        "peak memory, all processes", large["peak_bytes"] / 2**30, unit="GiB", better="lower", at_most=4.0
    )
    fell = losses[0] - losses[-1]
    bench.case("loss fell in three steps by", fell, unit="nats", better="higher", at_least=1e-6)
    bench.case("loss at the first step", losses[0], unit="nats", better="lower")
    bench.case("two layers: losses equal to those in memory, of 3", 3, unit="", better="higher", at_least=3)
