"""A character model learns English in a pipeline that adapts to its network.

torchrun --nproc-per-node 2 examples/pipeline.py
torchrun --nproc-per-node 2 examples/pipeline.py --schedule 1f1b       # torch's own, for comparison
plait lab run --hosts 2 --rate 50mbit -- python examples/pipeline.py   # over a thin wire
"""

import argparse
import logging
import time
from pydoc_data import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

import plait
from plait.pipeline import AdaptiveSchedule, ScheduleKFKB, stages

CONTEXT, WIDTH, LAYERS, ROWS = 64, 128, 4, 32


def batches(rows: int, seed: int) -> "list[Tensor]":
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    letters = torch.tensor(list(text.encode("ascii", "replace")))
    windows = letters[: len(letters) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    return list(windows[order].split(rows))


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(128, WIDTH), nn.Embedding(CONTEXT, WIDTH)

    def forward(self, letters: Tensor) -> Tensor:
        return self.letter(letters) + self.place.weight[: letters.shape[1]]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.feed = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        seen = self.norm(x)
        x = x + self.attention(seen, seen, seen, attn_mask=later, need_weights=False)[0]
        return x + self.feed(x)


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [Layer() for _ in range(LAYERS)]
    return nn.Sequential(Embed(), *layers, nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128)))


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--schedule", choices=["adaptive", "2f2b", "1f1b"], default="adaptive")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # decisions are logged, with their reasons

    chain = plait.Chain.trace(model(), torch.zeros(2, CONTEXT, dtype=torch.long))
    profile = [plait.Profile.measure(chain, batch_sizes=(4,), repetitions=3) if rank == 0 else None]
    dist.broadcast_object_list(profile)  # one profile for all, so that all cut alike
    stage = stages(chain, profile[0], world, rows=4).stage()
    if options.schedule == "adaptive":
        schedule = AdaptiveSchedule(stage, global_batch=ROWS, loss_fn=cross_entropy)
    elif options.schedule == "2f2b":
        schedule = ScheduleKFKB(stage, n_microbatches=8, loss_fn=cross_entropy, k=2)
    else:
        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=cross_entropy)

    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=2e-3)
    begun = time.perf_counter()
    for step, batch in enumerate(batches(ROWS, seed=0)[: options.steps]):
        optimizer.zero_grad()
        losses: list[Tensor] = []
        inputs = [batch[:, :-1]] if rank == 0 else []
        asked = {"target": batch[:, 1:], "losses": losses} if rank == world - 1 else {}
        schedule.step(*inputs, **asked, return_outputs=False)
        optimizer.step()
        if rank == world - 1 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step}: loss {torch.stack(losses).mean().item():.3f}", flush=True)
    if rank == 0:
        seconds = (time.perf_counter() - begun) / options.steps
        print(f"{options.schedule}: {1e3 * seconds:.0f} ms a step", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
