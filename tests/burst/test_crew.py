"""Ranks meet, agree, and find out about each other."""

import time

import pytest
import torch
import torch.distributed as dist

from plait.burst.crew import Crew
from plait.burst.terms import compare
from plait.errors import UsageError, WorkerError


def test_the_first_difference_is_named():
    compare([{"batch": 4, "width of block": {"a": 1}}] * 2)
    with pytest.raises(WorkerError, match="rank 1 has width of block 'b' None, and rank 0 has 2"):
        compare([{"width of block": {"a": 1, "b": 2}}, {"width of block": {"a": 1}}])


def meetings():
    """One rank comes late to a meeting; then all wait for what nobody sends."""
    said, rank = [], dist.get_rank()
    crew = Crew(device=torch.device("cpu"), timeout_s=1.0)
    if rank == 1:
        time.sleep(1.5)
    try:
        crew.meet({}, within_s=0.5)
    except WorkerError as error:
        said.append(str(error))
    crew.close()
    dist.barrier()
    crew = Crew(device=torch.device("cpu"), timeout_s=1.0)
    crew.meet({"plan": 1})
    crew.agree({"plan": 2})
    if rank == 0:
        crew.tell("word", [1, "a"])
    said.append(crew.hear("word", "word"))
    try:
        crew.wait(lambda: None, "nothing")
    except WorkerError as error:
        said.append(str(error))
    crew.close()
    return said


def test_ranks_meet_and_notice_that_all_wait(ranks):
    late, first, circle = ranks(2, meetings)[0]
    assert late.startswith("rank 1 did not come within 0.5 s")
    assert first == [1, "a"]
    assert circle.startswith(
        "all ranks wait for each other: rank 0 waiting for nothing before the first step; rank 1"
    )


def test_a_process_of_several_without_a_group(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="rank 0 of 2, and there is no process group"):
        Crew(device=torch.device("cpu"), timeout_s=1.0)
