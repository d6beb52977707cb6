"""A net of convolutions and large dense layers learns to read digits, each block as wide as it pays.

torchrun --nproc-per-node 2 examples/burst.py
torchrun --nproc-per-node 2 examples/burst.py --widest                  # data parallelism, for comparison
plait lab run --hosts 2 --rate 1gbit -- python examples/burst.py        # over a real (shaped) wire
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import plait
from plait import losses
from plait.burst import BurstParallel, BurstPlan, plan
from plait.data import Batches
from plait.factory import load_file

ROWS = 32


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * 36, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 10),
    )  # fmt: skip


def optimizer_of(parameters: "object") -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)  # type: ignore[arg-type]


def choose(chain: plait.Chain, rate: str) -> BurstPlan:
    """Measured and planned by the first rank, so that all have the same plan."""
    found = [None]
    if dist.get_rank() == 0:
        world = dist.get_world_size()
        sizes = sorted({-(-ROWS // width) for width in range(1, world + 1)})
        profile = plait.Profile.measure(chain, sizes, optimizer=optimizer_of, repetitions=3)
        found = [plan(profile, devices=world, batch=ROWS, bandwidth=rate, latency="100us").fastest]
    dist.broadcast_object_list(found)
    assert found[0] is not None
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rate", default="1gbit", help="between the hosts, for the planner")
    parser.add_argument("--widest", action="store_true", help="every block on every rank")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()

    chain = plait.Chain.trace(model(), torch.zeros(2, 1, 12, 12))
    chosen = choose(chain, options.rate)
    if options.widest:
        chosen = BurstPlan.of(chosen.blocks, [world] * len(chain), batch=ROWS)
    parallel = BurstParallel(chain, chosen, loss=losses.cross_entropy)
    optimizer = optimizer_of(parallel.parameters())
    if rank == 0:
        print("widths", dict(zip(chosen.blocks, chosen.widths, strict=True)), flush=True)
        if chosen.forecast is not None:
            print(f"a step should take {chosen.forecast.step_ms:.0f} ms", flush=True)

    digits = load_file(Path(__file__).with_name("digits.py")).digits(seed=0)
    batches = Batches(dataset=digits, batch=ROWS, seed=0, collate=torch.utils.data.default_collate)
    begun = time.perf_counter()
    for step in range(options.steps):
        loss = parallel.step(batches.fetch(batches.indices(step)))
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step}: loss {loss:.3f}", flush=True)
    if rank == 0:
        print(f"{1e3 * (time.perf_counter() - begun) / options.steps:.0f} ms a step", flush=True)
        print("idle, by rank:", ", ".join(f"{gap:.0f} ms" for gap in parallel.gaps), flush=True)
    parallel.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
