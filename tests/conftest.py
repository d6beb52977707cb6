"""Fixtures that all tests share."""

import inspect
import multiprocessing
import os
import pickle
import runpy
import signal
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from plait.worker import Place

HERE = Path(__file__).parent

# What several test files share is in files beside them, which tests, and ranks with them, import by name.
sys.path.extend(str(folder) for folder in (HERE, *sorted(HERE.iterdir())) if folder.is_dir())
pytest.register_assert_rewrite("fit_jobs", "reference_jobs", "store_letters")

PRELOADED = [  # a fresh process would take seconds to import these, a forked one has them
    "torch",
    "torch.distributed",
    "torch.distributed.pipelining",
    "torch._dynamo",
    "hypothesis",
    "pytest",
    "plait.compress.script",
    "plait.compress.sharded",
    "plait.pipeline.adaptive",
    "plait.reference",
]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """The longest come first (what README and docs print): no worker has to wait for them at the end."""
    items.sort(key=lambda item: item.path.name not in ("test_docs.py", "test_wheel.py"))


class RankError(RuntimeError):
    """A rank failed, died or did not finish; the message names it."""


@pytest.fixture(scope="session", autouse=True)
def signals():
    """What started the tests may ignore these, as ``nohup`` and a shell's ``&`` do; children must not."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def forkserver():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@pytest.fixture
def ranks(forkserver, tmp_path_factory):
    """Run a function in real processes: ``ranks(world, function, *args)`` returns every rank's result.

    Each process has the torchrun contract in its environment (``Place.from_environment()``), one torch
    thread and, unless ``group=False``, a gloo process group. The function is one at the top level of the
    test file or of an installed module; arguments and results are pickled. The first rank to fail ends
    the others and raises a RuntimeError with its number, its error and its traceback. Ranks that are
    ``lost`` on purpose never answer: None is their result.
    """

    def run(world, function, *args, group=True, environment=None, lost=(), timeout_s=120.0):
        import torch.distributed as dist

        # A store of our own on a port that the kernel picks, as torchrun's agent has: no race for a port.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        logs = tmp_path_factory.mktemp("ranks")
        processes, connections = [], {}
        try:
            for rank in range(world):
                place = Place(rank=rank, world=world, local_rank=rank, local_world=world, port=store.port)
                task = {
                    "function": _found_by(function),
                    "args": pickle.dumps(args),
                    "group": group,
                    "log": str(logs / f"{rank}.log"),
                    "environment": {
                        **place.environment(),
                        "TORCHELASTIC_USE_AGENT_STORE": "True",
                        "GLOO_SOCKET_IFNAME": "lo",
                        **(environment or {}),
                    },
                }
                receive, send = forkserver.Pipe(duplex=False)
                given = {"task": task, "connection": send}
                process = forkserver.Process(
                    target=runpy.run_path, args=(str(HERE / "rank.py"), given, "rank"), daemon=True
                )
                process.start()
                send.close()
                processes.append(process)
                connections[receive] = rank
            return _results(connections, processes, logs, lost, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
            for connection in connections:
                connection.close()

    return run


def _found_by(function):
    file = Path(inspect.getfile(function)).resolve()
    by_path = HERE in file.parents
    return {
        "file": str(file) if by_path else None,
        "module": function.__module__,
        "name": function.__qualname__,
    }


def _results(connections, processes, logs, lost, timeout_s):
    world, results = len(connections), {}
    pending = {connection: rank for connection, rank in connections.items() if rank not in lost}
    deadline = time.monotonic() + timeout_s
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = sorted(pending.values())
            stacks = "\n".join(_stack(rank, processes[rank], logs) for rank in late)
            raise RankError(f"ranks {late} of {world} did not finish in {timeout_s} s:\n{stacks}")
        for connection in ready:
            rank = pending.pop(connection)
            try:
                kind, content = connection.recv()
            except EOFError:
                processes[rank].join()
                raise RankError(
                    f"rank {rank} of {world} died with exit code {processes[rank].exitcode}"
                ) from None
            value = pickle.loads(content)
            if kind == "failed":
                raise RankError(f"rank {rank} of {world} raised {value[0]}\n{value[1]}")
            results[rank] = value
    return [results.get(rank) for rank in range(world)]


def _stack(rank, process, logs):
    os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.3)
    log = logs / f"{rank}.log"
    return f"rank {rank}:\n{log.read_text() if log.exists() else ''}"
