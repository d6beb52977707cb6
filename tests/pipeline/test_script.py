"""A whole script that trains in two processes, and how it ends."""

import os
import subprocess
import sys

import pytest

from plait.worker import Place, free_port

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from plait.pipeline import ScheduleKFKB

dist.init_process_group("gloo")
rank = dist.get_rank()
stage = PipelineStage(nn.Linear(4, 4), rank, 2, torch.device("cpu"))
schedule = ScheduleKFKB(stage, 4, lambda output, y: (output - y).square().mean(), timeout_s=3)
for step in range(3):
    if step == 2 and rank == 1 and sys.argv[1] == "fails":
        raise ValueError("not within a step")
    schedule.step(*[torch.randn(8, 4)][: rank == 0], **({"target": torch.zeros(8, 4)} if rank else {}))
print("done")
"""


@pytest.mark.parametrize("how", ["fails", "just ends"])
def test_a_script_comes_to_its_end(tmp_path, how):
    (tmp_path / "train.py").write_text(SCRIPT)
    port = free_port()
    places = [Place(rank=rank, world=2, port=port) for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "train.py"), how],
            env={**os.environ, **place.environment(), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in places
    ]
    try:
        ends = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    if how == "fails":
        assert codes == [1, 1], ends
        assert "plait.errors.WorkerError: rank 1 has left; before, it was " in ends[0][1]
    else:
        assert codes == [0, 0], ends
        assert all(output == "done\n" for output, _ in ends)
