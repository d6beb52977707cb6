"""A training script as people write them: DistributedDataParallel, and nothing of plait."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.Generator().manual_seed(dist.get_rank())
for _ in range(20):
    x = torch.randn(32, 64, generator=data)
    loss = nn.functional.cross_entropy(model(x), x[:, :8].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print(f"result {dist.get_rank()} {loss.item():.6f} {digest}\n", end="", flush=True)
del model  # a DDP module that outlives the process group may wait for ever in its destructor
dist.destroy_process_group()
