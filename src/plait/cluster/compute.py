"""How fast torch multiplies matrices on each device of this host, with all of them at work at once.

Each device gets a process of its own, as in training: pinned to its cores, with its threads. The
process is this module, run as a program; it answers on standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from plait.cluster.parts import Device
from plait.errors import WorkerError

_SIDE = 1024
_OPERATIONS = 2 * _SIDE**3


def measure_compute(devices: Sequence[Device], *, seconds: float, timeout_s: float) -> list[float]:
    """Speed of fp32 matrix multiplication on each device, in 1e9 operations a second."""
    command = [sys.executable, "-P", "-m", "plait.cluster.compute"]
    workers: list[subprocess.Popen[str]] = []

    def hear(i: int) -> Any:
        stream = workers[i].stdout
        line = stream.readline() if stream else ""
        if not line:
            raise WorkerError(
                f"the process that measures device {devices[i].name!r} ended, or took over {timeout_s:g} s",
                setting="timeout",
            )
        return json.loads(line)

    def tell(i: int, order: object) -> None:
        stream = workers[i].stdin
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer will say it
            stream.write(json.dumps(order) + "\n")
            stream.flush()

    def give_up() -> None:
        for worker in workers:
            worker.kill()

    watch = threading.Timer(timeout_s + seconds, give_up)
    watch.daemon = True
    watch.start()
    try:
        for i, device in enumerate(devices):
            workers.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            index = sum(other.kind == device.kind for other in devices[:i])
            where = {"kind": device.kind, "index": index, "cores": device.cores, "threads": device.threads}
            tell(i, where | {"seconds": seconds})
        for i in range(len(devices)):
            hear(i)  # torch is imported
        for i in range(len(devices)):
            tell(i, "go")
        return [float(hear(i)) for i in range(len(devices))]
    finally:
        watch.cancel()
        give_up()
        for worker in workers:
            worker.communicate()


def main() -> None:
    """The process of one device: order in, "ready" out, "go" in, result out."""
    order = json.loads(sys.stdin.readline())
    if order["cores"]:
        os.sched_setaffinity(0, order["cores"])
    import torch

    torch.set_num_threads(order["threads"])
    # The branch for a GPU is not run where plait is developed.
    gpu = order["kind"] == "cuda"
    where = torch.device(f"cuda:{order['index']}" if gpu else "cpu")
    a, b = (torch.rand(_SIDE, _SIDE, device=where) for _ in range(2))

    def once() -> float:
        start = time.perf_counter()
        torch.mm(a, b)
        if gpu:
            torch.cuda.synchronize(where)
        return time.perf_counter() - start

    once()
    print(json.dumps("ready"), flush=True)
    sys.stdin.readline()
    times, end = [once()], time.perf_counter() + order["seconds"]
    while time.perf_counter() < end:
        times.append(once())
    print(json.dumps(_OPERATIONS / statistics.median(times) / 1e9), flush=True)


if __name__ == "__main__":
    main()
