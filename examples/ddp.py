"""Ordinary data-parallel training in plain PyTorch: a character model learns English. plait is not mentioned.

torchrun --nproc-per-node 2 examples/ddp.py                       # as it is
PLAIT_COMPRESS=4 torchrun --nproc-per-node 2 examples/ddp.py      # with gradients in 4 bits
"""

import argparse
from pydoc_data import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

CONTEXT, WIDTH = 64, 256


def batches(rows: int, seed: int) -> "list[Tensor]":
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    letters = torch.tensor(list(text.encode("ascii", "replace")))
    windows = letters[: len(letters) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    return list(windows[order].split(rows))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, WIDTH)
        self.mix = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, letters: Tensor) -> Tensor:
        mixed, _ = self.mix(self.embed(letters))
        return self.head(self.norm(mixed))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step, batch in enumerate(batches(16 * world, seed=0)[:steps]):
        mine = batch[rank::world]
        logits = model(mine[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % 20 == 0 or step == steps - 1):
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    del model  # before the process group goes
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
