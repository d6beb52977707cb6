"""Rows at a width, and what moves between widths."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.burst.rows import Move, begin, moves, shares
from plait.errors import UsageError


def test_uneven_shares():
    assert shares(32, 3) == (11, 11, 10)
    assert [begin(32, 3, rank) for rank in range(5)] == [0, 11, 22, 32, 32]


def test_the_drawing():
    assert moves(8, 2, 3) == (Move(0, 1, 3, 4), Move(1, 2, 6, 8))


@given(st.integers(1, 60).flatmap(lambda b: st.tuples(st.just(b), st.integers(1, b), st.integers(1, b))))
def test_rows_are_cut_as_torch_cuts_them_and_only_those_that_must_move(case):
    batch, before, after = case
    old, new = torch.arange(batch).tensor_split(before), torch.arange(batch).tensor_split(after)
    assert shares(batch, before) == tuple(len(part) for part in old)
    held = {row: rank for rank, part in enumerate(old) for row in part.tolist()}
    wanted = {row: rank for rank, part in enumerate(new) for row in part.tolist()}
    moved = {}
    pairs = set()
    for move in moves(batch, before, after):
        assert move.rows > 0
        assert (move.source, move.target) not in pairs  # one message from a rank to another
        pairs.add((move.source, move.target))
        for row in range(move.start, move.end):
            assert held[row] == move.source
            moved[row] = move.target
    assert moved == {row: wanted[row] for row in range(batch) if wanted[row] != held[row]}


@pytest.mark.parametrize("width", [0, 5])
def test_more_devices_than_rows(width):
    with pytest.raises(UsageError, match=f"4 rows cannot be shared by {width} devices.*1 to 4"):
        shares(4, width)
