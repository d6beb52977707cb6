"""The fixture that starts ranks, since every test of more than one process stands on it."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from plait.worker import Place


def whoami(greeting):
    return greeting, Place.from_environment().rank, dist.get_rank(), dist.get_world_size(), os.getpid()


def ungrouped():
    return dist.is_initialized(), torch.get_num_threads(), os.environ["COLOUR"]


def one_raises(rank):
    if dist.get_rank() == rank:
        raise ValueError("the cat is out")
    dist.barrier()


def one_dies(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def sleeps_on():
    time.sleep(60)


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_every_rank_gives_its_result_and_is_gone(ranks):
    results = ranks(3, whoami, "hello")
    assert [result[:4] for result in results] == [("hello", rank, rank, 3) for rank in range(3)]
    assert all(gone(result[4]) for result in results)


def test_a_function_of_an_installed_module_and_no_group(ranks):
    assert ranks(1, Place.from_environment, group=False)[0].world == 1
    assert ranks(1, ungrouped, group=False, environment={"COLOUR": "red"}) == [(False, 1, "red")]


def test_a_failing_rank_is_named_with_its_error(ranks):
    with pytest.raises(
        RuntimeError, match=r"rank 1 of 2 raised ValueError: the cat is out\n(?s:.*)one_raises"
    ):
        ranks(2, one_raises, 1)


def test_a_dead_rank_is_named(ranks):
    with pytest.raises(RuntimeError, match="rank 0 of 2 died with exit code -9"):
        ranks(2, one_dies, 0)


def test_a_late_rank_is_named_with_where_it_hangs(ranks):
    ranks(1, whoami, "warm")  # so that starting the server of processes is not part of the time
    with pytest.raises(RuntimeError, match=r"ranks \[0\] of 1 did not finish in 5 s:\n(?s:.*)sleeps_on"):
        ranks(1, sleeps_on, timeout_s=5)
