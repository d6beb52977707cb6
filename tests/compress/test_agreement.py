import time

import pytest
import torch.distributed as dist

from plait.compress.agreement import agree, meet
from plait.errors import WorkerError


def agreeing(facts_of_rank):
    facts = facts_of_rank[dist.get_rank()]
    try:
        agree(facts)
    except WorkerError as error:
        return str(error), error.setting
    return None


def test_those_who_agree_go_on(ranks):
    assert ranks(2, agreeing, [{"bits": 4, "seed": 0}] * 2) == [None, None]


@pytest.mark.parametrize(
    ("facts", "setting"),
    [
        ([{"bits": 4, "seed": 0}, {"bits": 4, "seed": 1}, {"bits": 3, "seed": 0}], "seed"),
        ([{"bits": 4}, {"bits": 4}, {"bits": 4, "weight": "(3, 4)"}], "weight"),
        ([{"bits": 4, "weight": None}, {"bits": 4}, {"bits": 4, "weight": None}], "weight"),
    ],
)
def test_the_first_difference_is_named_everywhere(ranks, facts, setting):
    outcomes = ranks(3, agreeing, facts)
    assert len(set(outcomes)) == 1
    assert outcomes[0][1] == setting


def awaiting():
    """Rank 2 does not come until the others have lost patience, and comes again when they do."""
    rank, found = dist.get_rank(), []
    pair = dist.new_group([0, 1])
    for timeout_s in (1.5, 60.0):
        if timeout_s == 1.5 and rank == 2:
            dist.barrier()
        begun = time.monotonic()
        try:
            agree({"bits": 4}, timeout_s=timeout_s)
        except WorkerError as error:
            found.append((error.what, error.setting, time.monotonic() - begun < 20))
        if rank < 2:  # a group of its own, with meetings of its own
            agree({"bits": 4}, pair)
            if timeout_s == 1.5:
                dist.barrier()
    return found


def test_one_that_does_not_come_is_named_and_learns_of_it_when_it_does(ranks):
    outcomes = ranks(3, awaiting)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    ((what, setting, soon),) = outcomes[0]
    assert what.startswith("rank 2 did not come to compare what it asks for: rank ")
    assert what.endswith(" waited 1.5 s")
    assert setting == "timeout_s"
    assert soon


def crosswise():
    try:
        meet(None, purpose="go left" if dist.get_rank() else "go right", timeout_s=0.5)
    except WorkerError as error:
        return error.what


def test_those_who_come_for_different_purposes_do_not_meet(ranks):
    zero, one = ranks(2, crosswise)
    assert zero == "rank 1 did not come to go right: rank 0 waited 0.5 s"
    assert one == "rank 0 did not come to go left: rank 1 waited 0.5 s"


def left_alone():
    """The store is rank 0's, and ends with it."""
    rank = dist.get_rank()
    if rank == 0:
        return None
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)

    class Group:
        def get_group_store(self):
            return client

    dist.get_process_group_ranks = lambda group: [0, 1]
    del store
    try:
        meet(Group(), purpose="go", timeout_s=60)
    except WorkerError as error:
        return error.what


def test_a_store_that_is_gone(ranks):
    assert ranks(2, left_alone)[1].startswith("rank 1 lost the store of its process group: ")
