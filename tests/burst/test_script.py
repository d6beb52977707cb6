"""Scripts that know nothing of plait say their steps, and with DistributedDataParallel when they wait."""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from plait.burst.phases import Listener, Phase, default_directory, publishing

PLAIN = """
import sys, torch
from plait.burst.phases import Listener, default_directory, publishing
models = [torch.nn.Linear(4, 4) for _ in range(2)]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
for step in range(5):
    for model, optimizer in zip(models, optimizers):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    if not step:
        (path,) = publishing(default_directory(), "foreground")
        listener = Listener(path)
print([step.number for step in listener.new_steps()], listener.step, listener.has_phases)
"""


def test_any_script_with_an_optimizer(published):
    """Two of them, as in a GAN: the first to update counts."""
    environment = {**os.environ, "PLAIT_PUBLISH": "foreground"}
    done = subprocess.run(
        [sys.executable, "-c", PLAIN],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[1, 2, 3, 4] 5 False\n"
    assert not published.exists()


BURST = """
import torch
from plait.burst.diary import Diary
from plait.burst.phases import default_directory, publishing
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def update():
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    (path,) = publishing(default_directory(), "foreground")
    return path

plain = update()
diary = Diary(0, None)
same = [update() == diary._publisher.path for _ in range(2)]
diary.close()
print(same, update() == plain)
"""


def test_a_burst_parallel_model_is_not_published_twice(published):
    environment = {**os.environ, "PLAIT_PUBLISH": "foreground"}
    done = subprocess.run(
        [sys.executable, "-c", BURST],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[True, True] False\n"
    assert not published.exists()


def train():
    """A rank: what it publishes, phase by phase."""
    from plait.burst.script import install

    install()
    install()  # twice is once
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    listener = None
    for _ in range(3):
        with model.no_sync():
            model(torch.ones(4, 8)).sum().backward()
        before = None if listener is None else listener.phase
        model(torch.ones(4, 8)).sum().backward()
        after = None if listener is None else listener.phase
        optimizer.step()
        if listener is None:
            mine = list(publishing(default_directory(), "foreground"))
            (path,) = [path for path in mine if Listener(path).pid == os.getpid()]
            listener = Listener(path)
    dist.barrier()
    phases = [phase for _, phase in listener.new_phases()]
    return listener.device, [step.number for step in listener.new_steps()], before, after, phases


def test_a_data_parallel_script_says_when_it_waits(ranks, published):
    environment = {"PLAIT_BURST_DIRECTORY": str(published)}
    for rank, told in enumerate(ranks(2, train, environment=environment)):
        wait, work = Phase.COLLECTIVE, Phase.COMPUTE
        # An accumulated gradient is not sent, so nobody waits for it.
        assert told == (rank, [1, 2], work, wait, [wait, work, work] * 2)
