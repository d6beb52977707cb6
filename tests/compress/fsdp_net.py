"""A model for FSDP2, sharded and compressed; test files load this one by its path."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from plait import native
from plait.compress.compression import Compression
from plait.compress.sharded import attach_fsdp

LOSSY = {"embed.weight", "head.weight"} | {
    f"blocks.{i}.{name}.weight" for i in range(2) for name in ("up", "down")
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(48)
        self.up = nn.Linear(48, 51)  # 51 rows: parts are filled up
        self.down = nn.Linear(51, 48)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(67, 48)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(48, 67, bias=False)
        self.expert = nn.Linear(48, 48)

    def forward(self, tokens, expert=False, depth=2):
        x = self.embed(tokens)
        for block in self.blocks[:depth]:
            x = block(x)
        return self.head(self.expert(x) if expert else x)


def sharded(model=None, *, root=True, **options):
    model = model or Net()
    for block in model.blocks:
        fully_shard(block, **options)
    if root:
        fully_shard(model, **options)
    return model


def compressed(model, **fields):
    return attach_fsdp(model, Compression(**{"decline": False, "bucket": 1024, **fields}))


def batch(step=0, rank=None):
    generator = torch.Generator().manual_seed(1000 * step + (dist.get_rank() if rank is None else rank))
    return torch.randint(67, (2, 17), generator=generator)


def backward(model, step=0, rank=None, **options):
    tokens = batch(step, rank)
    logits = model(tokens[:, :-1], **options).float()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.item()


def gradients(model):
    """The whole gradients, taken out of the model."""
    found = {
        name: each.grad.full_tensor() for name, each in model.named_parameters() if each.grad is not None
    }
    model.zero_grad()
    return found


def reference(rank, **options):
    """A rank's own gradients, from a model that is in one piece."""
    model = Net()
    backward(model, rank=rank, **options)
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def checksums(tensors):
    return {name: native.checksum(each.detach().contiguous().float()) for name, each in tensors.items()}


def same(outcomes):
    return all(outcome == outcomes[0] for outcome in outcomes)


def parts(tensor, world):
    """The parts of workers, filled up with zeros, as torch cuts them."""
    rows = -(-len(tensor) // world)
    filled = torch.zeros(rows * world, *tensor.shape[1:])
    filled[: len(tensor)] = tensor
    return [filled[i * rows : (i + 1) * rows].flatten() for i in range(world)]


def through(codec, values, key=0):
    payload = torch.empty(codec.payload_bytes(len(values)), dtype=torch.uint8)
    codec.compress(values, payload, key=key)
    decoded = torch.empty_like(values)
    codec.extract(payload, decoded)
    return decoded
