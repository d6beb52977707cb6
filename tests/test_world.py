import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from plait.world import World


def together(text):
    with World.join() as world:
        assert dist.is_initialized()
        sums = world.sum([0.1, float(world.rank)])
        tensors = [torch.full((2,), float(world.rank)), torch.tensor(world.rank + 5)]
        world.take_from_first(tensors)
        world.agree({"text": text})
    return (
        world.rank,
        world.size,
        str(world.device),
        sums,
        [t.tolist() for t in tensors],
        dist.is_initialized(),
    )


@pytest.mark.parametrize("world", [2, 3])
def test_workers_meet_add_up_and_part(ranks, world):
    results = ranks(world, together, "same", group=False)
    assert [result[:3] for result in results] == [(rank, world, "cpu") for rank in range(world)]
    assert len({tuple(result[3]) for result in results}) == 1
    assert results[0][3] == [pytest.approx(0.1 * world), world * (world - 1) / 2]
    assert all(result[4:] == ([[0.0, 0.0], 5], False) for result in results)


def test_one_worker_needs_nobody():
    with World.join() as world:
        assert (world.rank, world.size) == (0, 1)
        assert world.sum([0.1, 2.0]) == [0.1, 2.0]
        world.agree({"anything": 1})
        world.take_from_first([torch.ones(1)])
        assert not dist.is_initialized()


def guests():
    with World.join("cpu") as world:
        assert world.size == 2
    return dist.is_initialized()


def test_a_group_of_the_callers_own_is_used_and_kept(ranks):
    assert ranks(2, guests) == [True, True]


def at_odds():
    with World.join() as world:
        try:
            world.agree({"job": "a", "bits": 4 if world.rank < 2 else 2, "step": world.rank})
        except RuntimeError as error:
            return str(error)
    return "no error"


def test_workers_at_odds_all_learn_of_the_first_difference(ranks):
    told = ranks(3, at_odds, group=False)
    assert len(set(told)) == 1
    assert told[0].startswith("rank 1 has step 1 and rank 0 has 0")


def test_bits_are_named_where_they_are_what_differs(ranks):
    told = ranks(3, at_odds_in_bits, group=False)
    assert set(told) == {
        "rank 2 has bits 2 and rank 0 has 4 (setting: bits); works: the same for every worker"
    }


def at_odds_in_bits():
    with World.join() as world:
        try:
            world.agree({"job": "a", "bits": 4 if world.rank < 2 else 2})
        except RuntimeError as error:
            return str(error)
    return "no error"


MEETINGS = """
from plait.world import World

for meeting in range(6):
    with World.join() as world:
        assert world.sum([1.0]) == [2.0]
print("met")
"""


def test_workers_of_torchrun_can_meet_again_and_again(tmp_path):
    """Its agent keeps one store, in which the addresses of the meeting before still stand."""
    script = tmp_path / "meetings.py"
    script.write_text(MEETINGS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout.count("met")) == (0, 2), done.stderr
