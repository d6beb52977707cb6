"""Ranks of which some are lost on purpose."""

import pickle
import runpy
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from plait.worker import Place

RANK = Path(__file__).parents[1] / "rank.py"


@pytest.fixture
def survivors(forkserver, tmp_path):
    """Run a function in real processes, of which those ``lost`` never answer.

    ``survivors(world, function, *args, lost=[1])`` returns what each other rank returned. A rank that raises
    fails the test: functions catch what they expect.
    """

    def run(world, function, *args, lost=(), timeout_s=60.0):
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes, pending = [], {}
        try:
            for rank in range(world):
                place = Place(rank=rank, world=world, local_rank=rank, local_world=world, port=store.port)
                task = {
                    "function": {
                        "file": function.__code__.co_filename,
                        "module": function.__module__,
                        "name": function.__qualname__,
                    },
                    "args": pickle.dumps(args),
                    "group": True,
                    "log": str(tmp_path / f"{rank}.log"),
                    "environment": {
                        **place.environment(),
                        "TORCHELASTIC_USE_AGENT_STORE": "True",
                        "GLOO_SOCKET_IFNAME": "lo",
                    },
                }
                receive, send = forkserver.Pipe(duplex=False)
                given = {"task": task, "connection": send}
                process = forkserver.Process(
                    target=runpy.run_path, args=(str(RANK), given, "rank"), daemon=True
                )
                process.start()
                send.close()
                processes.append(process)
                if rank not in lost:
                    pending[receive] = rank
            return _answers(pending, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()

    return run


def _answers(pending, timeout_s):
    found, deadline = {}, time.monotonic() + timeout_s
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {sorted(pending.values())} still wait after {timeout_s} s"
        for connection in ready:
            rank = pending.pop(connection)
            kind, content = connection.recv()
            value = pickle.loads(content)
            assert kind == "done", f"rank {rank}: {value[0]}\n{value[1]}"
            found[rank] = value
    return found
