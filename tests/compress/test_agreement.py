import pytest
import torch.distributed as dist

from plait.compress.agreement import agree
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
