"""On hosts with networks of their own: what crosses the wire, and what becomes of a wire that is cut."""

import json
import sys
import threading
import time

import pytest

from plait.compress.codec import Quantizer
from plait.lab import Lab
from plait.lab.network import missing

pytestmark = pytest.mark.skipif(
    missing() is not None, reason=f"{missing()} is missing: no network namespaces here"
)

COUNT = 1 << 20

START = f"""
import json, os, time
import torch
import torch.distributed as dist
from plait.compress.collectives import all_reduce
from plait.compress.communicator import prepare, shutdown
from plait.compress.settings import Settings
from plait.errors import WorkerError

torch.set_num_threads(1)
dist.init_process_group("gloo")
tensor = torch.ones({COUNT})

def say(**what):
    print(json.dumps(what), flush=True)

def leave():
    os._exit(0)  # gloo may wait for ever for a peer that cannot be reached
"""

COUNT_BYTES = """
def on_the_wire():
    with open("/proc/self/net/dev") as devices:
        return next(int(line.split(":")[1].split()[8]) for line in devices if "lab0:" in line)

for name, settings in (
    ("flat", Settings(algorithm="scatter")),
    ("lanes", Settings()),
    ("leaders", Settings(leaders=True)),
):
    all_reduce(tensor, settings=settings)
    dist.barrier()
    before = on_the_wire()
    dist.barrier()
    all_reduce(tensor, settings=settings)
    dist.barrier()
    say(name=name, bytes=on_the_wire() - before, hosts=prepare().hosts)
leave()
"""

UNTIL_CUT = """
settings = Settings(timeout_s=2.0)
all_reduce(tensor, settings=settings)
say(ready=True)
try:
    while True:
        all_reduce(tensor, settings=settings)
except WorkerError as error:
    say(error=str(error))
leave()
"""


def said(lines):
    """What the workers printed, by worker."""
    found = {}
    for line in lines:
        name, _, text = line.partition(" | ")
        if text.startswith("{"):
            found.setdefault(name, []).append(json.loads(text))
    return found


def test_workers_of_a_host_share_its_wire():
    lines = []
    with Lab(hosts=2) as lab:
        command = [sys.executable, "-c", START + COUNT_BYTES]
        outcome = lab.run(command, per_host=2, show=lines.append, timeout_seconds=120)
    assert outcome.exit_code == 0, lines
    payload = Quantizer(bits=4).payload_bytes(COUNT)
    for worker in said(lines).values():
        assert all(each["hosts"] == [[0, 1], [2, 3]] for each in worker)
        crossed = {each["name"]: each["bytes"] / payload for each in worker}
        # Of 4 shares, each of 2 workers sends 2 to the other host, and its own sum to 2 workers there.
        assert 2.0 <= crossed["flat"] < 2.1
        # With two levels a host sends half of the buffer, and the sums of the other half.
        assert 1.0 <= crossed["lanes"] < 1.1
        assert 1.0 <= crossed["leaders"] < 1.1


def test_a_wire_that_is_cut_ends_every_worker_within_the_timeout():
    lines = []
    with Lab(hosts=3) as lab:

        def cut():
            while sum('"ready"' in line for line in list(lines)) < 3:
                time.sleep(0.02)
            lab.cut(1)

        threading.Thread(target=cut, daemon=True).start()
        command = [sys.executable, "-c", START + UNTIL_CUT]
        outcome = lab.run(command, show=lines.append, timeout_seconds=120)
    assert outcome.exit_code == 0, lines
    errors = {name: worker[-1]["error"] for name, worker in said(lines).items()}
    assert "nothing came from rank 1 for" in errors["host0"]
    assert "nothing came from rank 1 for" in errors["host2"]
    assert "nothing came from rank" in errors["host1"]
