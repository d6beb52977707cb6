"""What a process keeps between collectives, and what becomes of it in other threads and processes."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from plait import native
from plait.compress import communicator
from plait.compress.collectives import all_reduce
from plait.compress.settings import Settings
from plait.errors import UsageError, WorkerError

SETTINGS = Settings(timeout_s=20)


def in_a_child(function):
    """What a function returns in a forked child, as text; a child that hangs is killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            text = str(function())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with open(read) as file:
        return file.read()


def forking():
    all_reduce(torch.ones(3000), settings=SETTINGS)
    outcomes = [in_a_child(lambda: all_reduce(torch.ones(3000), settings=SETTINGS))]
    outcomes.append(in_a_child(lambda: (communicator.shutdown(), communicator.memory_bytes())))
    if dist.get_rank() == 0:  # its handle cannot end before the other rank has come
        work = all_reduce(torch.ones(3000), async_op=True, settings=SETTINGS)
        outcomes.append(in_a_child(work.wait))
    dist.barrier()
    if dist.get_rank() == 1:
        all_reduce(torch.ones(3000), settings=SETTINGS)
    else:
        work.wait()
    tensor = torch.ones(3000)
    all_reduce(tensor, settings=SETTINGS)  # the parents go on
    return outcomes, tensor.unique().tolist()


def test_a_forked_child_is_no_worker_and_its_parent_goes_on(ranks):
    (zero, first), (one, second) = ranks(2, forking)
    assert first == second == [2.0]
    for rank, (collective, ending) in enumerate((zero[:2], one)):
        assert collective.startswith("UsageError: process ")
        assert f" was forked from rank {rank}, and is no worker itself" in collective
        assert ending == "(None, 0)"
    assert zero[2].startswith("WorkerError: this process was forked while the operation was under way")


def orphaning(over):
    """Rank 1 is a child that is killed, and leaves one of its own behind."""
    rank = int(os.environ["RANK"])
    child = os.fork() if rank == 1 else 0
    if child:
        while not over.exists():
            time.sleep(0.02)
        os.waitpid(child, 0)
        return None
    dist.init_process_group("gloo")
    all_reduce(torch.ones(3000), settings=SETTINGS)
    dist.barrier()
    if rank == 1:
        if os.fork() == 0:
            while not over.exists():
                time.sleep(0.02)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(2):
            all_reduce(torch.ones(3000), settings=SETTINGS)
    except WorkerError as error:
        return error.what
    finally:
        over.touch()


def test_a_child_does_not_keep_the_connections_of_a_dead_worker(ranks, tmp_path):
    what = ranks(2, orphaning, tmp_path / "over", group=False)[0]
    assert what.startswith("rank 1 was lost in operation 1 ")


def counting():
    """A second operation is handed in while the first, begun before, is not yet."""
    all_reduce(torch.ones(10), settings=SETTINGS)
    thread = communicator.current().thread
    submit, works = thread.submit, []
    tensors = [torch.randn(3000, generator=torch.Generator().manual_seed(i)) for i in (1, 2)]

    def overtaken(operation):
        thread.submit = submit
        works.append(all_reduce(tensors[1], async_op=True, settings=SETTINGS))
        return submit(operation)

    if dist.get_rank() == 0:
        thread.submit = overtaken
        all_reduce(tensors[0], settings=SETTINGS)
    else:
        works.append(all_reduce(tensors[1], async_op=True, settings=SETTINGS))
        all_reduce(tensors[0], settings=SETTINGS)
    for work in works:
        work.wait()
    return [native.checksum(tensor) for tensor in tensors]


def test_an_operation_is_numbered_when_it_is_handed_in(ranks):
    one, other = ranks(2, counting)
    assert one == other


def test_buffers_are_counted_while_links_come_about():
    class Arena:
        @property
        def bytes(self):
            made._meshes[len(made._meshes)] = SimpleNamespace(arena=self)
            return 4096

    world = Arena()
    made = communicator.Communicator(world)
    made._meshes[0] = SimpleNamespace(arena=world)
    made.thread.close()
    assert made.memory_bytes == 4096
    assert made.memory_bytes == 8192


def test_there_must_be_a_group_to_prepare():
    with pytest.raises(UsageError, match="there is no process group"):
        communicator.prepare()
