"""What backward hides of the reductions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.strategy.overlap import Piece, overlap

MS = st.floats(0, 100)
PIECES = st.lists(st.tuples(MS, MS, st.floats(0, 1), MS).map(lambda p: Piece(p[0], p[1], p[1] * p[2], p[3])))


def test_a_drawing():
    """
    device   | B 4 | pack 1 | B 4      | wait 3 |
    wire           | 4            | 4           |
    """
    done = overlap([Piece(4, 4, 1), Piece(4, 4, 1)])
    # The first is reduced from 4 to 8; backward goes on from 5 to 9; the second is reduced from 9 to 13.
    assert done == (13, 4, 1)


@given(st.lists(st.tuples(MS, MS).map(lambda p: Piece(*p)), min_size=1))
def test_without_packing_it_is_the_longest_chain(pieces):
    """A chain: backward up to some piece, and from there the wire, which never rests."""
    after = [
        sum(p.compute_ms for p in pieces[: i + 1]) + sum(p.sync_ms for p in pieces[i:])
        for i in range(len(pieces))
    ]
    assert overlap(pieces).end_ms == pytest.approx(max(after))


@given(PIECES)
def test_work_is_kept(pieces):
    done = overlap(pieces)
    computed = sum(piece.compute_ms + piece.move_ms for piece in pieces)
    packed = sum(piece.busy_ms for piece in pieces)
    assert done.end_ms == pytest.approx(computed + done.slowed_ms + done.wait_ms, abs=1e-6)
    assert done.end_ms >= computed + packed - 1e-6 or done.wait_ms > 0
    assert done.end_ms >= sum(piece.sync_ms + piece.move_ms for piece in pieces) - 1e-6
    assert done.end_ms <= computed + sum(piece.sync_ms for piece in pieces) + 1e-6


@given(PIECES, st.floats(0, 1))
def test_a_faster_wire_is_never_slower(pieces, factor):
    quick = [piece._replace(sync_ms=max(piece.busy_ms, factor * piece.sync_ms)) for piece in pieces]
    assert overlap(quick).end_ms <= overlap(pieces).end_ms + 1e-6
