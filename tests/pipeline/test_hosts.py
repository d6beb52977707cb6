"""On hosts with networks of their own: a link that is cut says nothing, and yet all ranks come to an end."""

import sys

import pytest

from plait.lab import Lab
from plait.lab.network import missing

pytestmark = pytest.mark.skipif(
    missing() is not None, reason=f"{missing()} is missing: no network namespaces here"
)

WORKER = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from plait.errors import WorkerError
from plait.pipeline import ScheduleKFKB

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
stage = PipelineStage(nn.Linear(8, 8), rank, world, torch.device("cpu"))
schedule = ScheduleKFKB(stage, 4, lambda output, y: (output - y).square().mean(), k=2, timeout_s=3)
x = torch.randn(8, 8)
try:
    for step in range(100_000):
        schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank == world - 1 else {}))
        if step == 5 and rank == 0:
            print("under way", flush=True)
except WorkerError as error:
    print("ended:", error, flush=True)
"""


def test_a_link_that_is_cut():
    ends = {}

    def listen(line):
        host, said = line.split("|", 1)
        if "under way" in said:
            lab.cut(1)
        elif "ended:" in said:
            ends[host.strip()] = said

    with Lab(hosts=3, rate="1gbit") as lab:
        outcome = lab.run([sys.executable, "-c", WORKER], show=listen, timeout_seconds=120)
    assert outcome.exit_codes == (0, 0, 0)
    for host in ("host0", "host2"):
        assert "rank 1 has shown no sign of life" in ends[host]
    assert "the store of the process group (rank 0 keeps it) has not answered" in ends["host1"]
