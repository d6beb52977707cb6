"""Rows that move take as long as the busiest rank, and no rank does two things at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.burst.rows import Move, moves
from plait.sim.exchange import Exchange, turns
from plait.sim.simulation import Simulation


def play(rows: tuple[Move, ...], lengths: dict[Move, float]) -> tuple[float, list[tuple[Move, float, float]]]:
    """When all have arrived, and when each was under way."""
    simulation = Simulation()
    found: list[tuple[Move, float, float]] = []
    ended: list[float] = []

    def send(move: Move, then: Callable[[], None]) -> None:
        found.append((move, simulation.now_ms, simulation.now_ms + lengths[move]))
        simulation.after(lengths[move], then)

    Exchange(rows, send, lambda: ended.append(simulation.now_ms)).begin()
    simulation.run()
    assert len(ended) == 1
    return ended[0], found


def test_every_other_rank_goes_backwards() -> None:
    # 12 rows: 6 6 become 4 4 4. Row 4 and 5 go from 0 to 1, rows 8 to 11 from 1 to 2.
    assert turns(moves(12, 2, 3)) == {
        ("sends", 0): (0,), ("receives", 1): (0,), ("sends", 1): (1,), ("receives", 2): (1,),
    }  # fmt: skip
    # 12 rows: 4 4 4 become 2 2 2 2 2 2: rank 1 receives from 0, rank 2 from 1, and so on.
    assert turns(moves(12, 3, 1)) == {("sends", 1): (0,), ("receives", 0): (0, 1), ("sends", 2): (1,)}


@given(batch=st.integers(1, 96), data=st.data(), seed=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_a_cut_takes_as_long_as_its_busiest_rank(batch: int, data: st.DataObject, seed: int) -> None:
    most = min(batch, 24)
    before, after = (data.draw(st.integers(1, most)) for _ in range(2))
    rows = moves(batch, before, after)
    if not rows:
        return
    source = random.Random(seed)
    lengths = {move: source.choice([0.0, 1.0, source.uniform(0.1, 9.0)]) for move in rows}
    end_ms, found = play(rows, lengths)
    assert sorted(move.start for move, _, _ in found) == [move.start for move in rows]
    busy_ms: dict[tuple[str, int], float] = {}
    for move in rows:
        for end in (("sends", move.source), ("receives", move.target)):
            busy_ms[end] = busy_ms.get(end, 0.0) + lengths[move]
    assert end_ms == pytest.approx(max(busy_ms.values()), rel=1e-9, abs=1e-12)
    for side in ("source", "target"):
        for rank in {getattr(move, side) for move in rows}:
            its = sorted((start, end) for move, start, end in found if getattr(move, side) == rank)
            assert all(later[0] >= earlier[1] - 1e-9 for earlier, later in pairwise(its))
