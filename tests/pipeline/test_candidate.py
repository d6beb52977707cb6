"""Candidates: how a batch is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import UsageError
from plait.pipeline.candidate import Candidate
from plait.pipeline.orders import kfkb


@settings(deadline=None)
@given(st.integers(1, 50), st.data())
def test_a_batch_is_cut_as_torch_does(global_batch, data):
    import torch

    micro_batches = data.draw(st.integers(1, global_batch))
    candidate = Candidate(order=kfkb(2, micro_batches, 1), global_batch=global_batch)
    sizes = [len(part) for part in torch.tensor_split(torch.arange(global_batch), micro_batches)]
    assert candidate.rows == max(sizes)
    assert [share * candidate.rows for share in candidate.shares] == pytest.approx(sizes)
    assert Candidate.from_json(candidate.to_json()) == candidate


def test_it_says_what_it_is():
    assert str(Candidate(order=kfkb(2, 4, 2), global_batch=13)) == "2F2B, 4 micro-batches of 4 rows"


def test_more_micro_batches_than_rows():
    with pytest.raises(UsageError, match=r"3 rows cannot be cut into 4 micro-batches.*works: 1 to 3"):
        Candidate(order=kfkb(2, 4, 2), global_batch=3)
    with pytest.raises(UsageError, match="global_batch is 0"):
        Candidate(order=kfkb(2, 4, 2), global_batch=0)
