"""The fifth act: a net whose layers are each as wide as they pay, and a second job in what that leaves idle.

Run as a module it is the worker on each host, under the torchrun contract; with the word ``background`` it is
what trains behind it.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

RATE, LATENCY = "1gbit", "200us"
ROWS, SIDE, CLASSES = 32, 32, 10
STEPS, UNCOUNTED = 8, 2
BESIDE = 40
"""Steps beside the background; in the first ones it is measured what a step takes alone."""
BEGIN_S, ALONE_S = 20.0, 0.8
"""Within which the background begins, at most, and for how long it has the cores for itself."""
MARK = "plait demo:"


def act(directory: Path) -> None:
    """Train in a lab: data parallel, as planned, and as planned beside a background."""
    from plait.burst.occupancy import with_idle
    from plait.cli.console import console, status
    from plait.errors import LabError
    from plait.lab import Lab
    from plait.timeline import Timeline

    show, lines = console(), list[str]()
    # A core each: the two hosts and their background must not share one.
    with Lab(hosts=2, rate=RATE, cores=_cores()) as lab, status("a net is planned and trained on two hosts"):
        wire = "an unshaped loopback" if lab.loopback else RATE
        words = [sys.executable, "-m", __name__, str(directory.resolve())]
        outcome = lab.run(words, show=lines.append, timeout_seconds=300)
    found = [line.split(MARK, 1)[1] for line in lines if MARK in line]
    if outcome.exit_code or not found:
        raise LabError("the workers failed:\n" + "\n".join(lines[-20:]))
    told = json.loads(found[-1])
    show.print(f"A net of convolutions and dense layers, {told['parameters']:,} parameters, over {wire}:")
    show.print("  plan, blocks by width: " + ", ".join(f"{name} {w}" for name, w in told["widths"].items()))
    show.print(f"  DDP                      {told['DDP']:6.0f} ms a step")
    show.print(
        f"  as planned               {told['burst']:6.0f} ms a step (predicted {told['predicted']:.0f})"
    )
    show.print(f"  beside a background      {told['beside']:6.0f} ms a step")
    for host, report in enumerate(told["reports"]):
        show.print(f"  host {host}: {report}")
    timelines = [Timeline.load(directory / f"burst-{rank}.json") for rank in range(2)]
    with_idle(Timeline.merge(timelines)).export(directory / "burst.html")
    show.print(f"foreground, background and idle on each device: {directory / 'burst.html'}")


def _cores() -> str | None:
    import os

    usable = sorted(os.sched_getaffinity(0))
    return f"{usable[0]}:{usable[1]}" if len(usable) > 1 else None


def work(directory: Path) -> None:
    """One host's worker; the first tells what came of it."""
    import torch
    import torch.distributed as dist

    import plait
    from plait import burst, losses

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, timeline, batch = dist.get_rank(), plait.Timeline(), _batch()
    words = [sys.executable, "-m", "plait.demo.burst", "background"]
    with burst.background(words, timeline=timeline) as behind:
        _let_begin(behind)
        behind.pause()
        blocks = _blocks()
        result: dict[str, Any] = {"parameters": sum(p.numel() for b in blocks for p in b.parameters())}
        result["DDP"] = _time(_data_parallel(blocks, batch))
        chain = plait.Chain.of(_blocks(), batch[0][:2])
        plans = [_plan(chain) if rank == 0 else None]
        dist.broadcast_object_list(plans)
        assert plans[0] is not None
        plan = plans[0]
        model = burst.BurstParallel(chain, plan, loss=losses.cross_entropy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01) if list(model.parameters()) else None

        def step() -> None:
            model.step(batch)
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()

        result["burst"] = _time(step)
        behind.resume()
        dist.barrier()
        result["beside"] = _time(step, BESIDE, uncounted=BESIDE // 2)
        reports: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(reports, str(behind.report))
    directory.mkdir(parents=True, exist_ok=True)
    timeline.save(directory / f"burst-{rank}.json")
    result |= {"widths": dict(zip(plan.blocks, plan.widths, strict=True)), "reports": reports}
    result["predicted"] = plan.forecast.step_ms
    dist.barrier()
    if rank == 0:
        print(MARK, json.dumps(result), flush=True)
    model.close()
    dist.destroy_process_group()


def _let_begin(behind: Any) -> None:
    """Give the background a moment alone, once it trains: what it gets later is a share of that."""
    import torch.distributed as dist

    deadline = time.monotonic() + BEGIN_S
    while not behind.steps and behind.exit_code is None and time.monotonic() < deadline:
        time.sleep(0.05)
    dist.barrier()
    time.sleep(ALONE_S)


def _plan(chain: Any) -> Any:
    """As the first host measures its blocks and the link is sold."""
    import functools

    import torch

    import plait
    from plait import burst

    sgd = functools.partial(torch.optim.SGD, lr=0.01)
    profile = plait.Profile.measure(chain, (ROWS // 2, ROWS), optimizer=sgd, repetitions=3, threads=1)
    return burst.plan(profile, devices=2, batch=ROWS, bandwidth=RATE, latency=LATENCY).fastest


def _data_parallel(blocks: list[nn.Module], batch: tuple[Tensor, Tensor]) -> Callable[[], None]:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(nn.Sequential(*blocks))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, classes = (part[dist.get_rank() :: dist.get_world_size()] for part in batch)

    def step() -> None:
        cross_entropy(model(images), classes).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def _time(step: Callable[[], None], steps: int = STEPS, *, uncounted: int = UNCOUNTED) -> float:
    """Milliseconds of a step: the median."""
    taken = []
    for _ in range(steps):
        begun = time.perf_counter()
        step()
        taken.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(taken[uncounted:])


def _blocks() -> list[nn.Module]:
    """Convolutions that compute, and dense layers that hold nearly all parameters."""
    from torch import nn

    sizes = [(3, 32), (32, 64), (64, 128)]
    made: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)) for i, o in sizes
    ]
    made.append(nn.Sequential(nn.Flatten(), nn.Linear(128 * (SIDE // 8) ** 2, 2048), nn.ReLU()))
    return [*made, nn.Sequential(nn.Linear(2048, 1024), nn.ReLU()), nn.Linear(1024, CLASSES)]


def _batch() -> tuple[Tensor, Tensor]:
    import torch

    images = torch.randn(ROWS, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    return images, images.flatten(1)[:, :CLASSES].argmax(1)


def train_behind() -> None:
    """What runs in the background: a small net that learns for as long as it is let."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in itertools.count():
        x = torch.randn(64, 64)
        nn.functional.mse_loss(model(x), x.flip(1)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    train_behind() if sys.argv[1] == "background" else work(Path(sys.argv[1]))
