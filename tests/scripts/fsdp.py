"""A training script as people write them: FSDP2, and nothing of plait."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
fully_shard(model[2], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.Generator().manual_seed(dist.get_rank())
for _ in range(20):
    x = torch.randn(32, 64, generator=data)
    loss = nn.functional.cross_entropy(model(x), x[:, :8].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
whole = [parameter.full_tensor() for parameter in model.parameters()]
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in whole)).hexdigest()
print(f"result {dist.get_rank()} {loss.item():.6f} {digest}\n", end="", flush=True)
dist.destroy_process_group()
