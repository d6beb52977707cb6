"""Background jobs in what others leave."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.strategy.holes import Hole, Work, done_ms, filled, gapless


def hole(start, end, share, memory=100.0):
    return Hole(start_ms=start, end_ms=end, share=share, memory_bytes=memory)


def test_a_drawing():
    """
    device 0  | 30% free, 100 ms | free        50 ms of work: 30 by 100 ms, and 20 after
    """
    holes = [gapless([hole(0, 100, 0.3)], 100.0)]
    (one,) = filled(holes, [Work(name="b", work_ms=50, memory_bytes=10)])
    assert (one.device, one.start_ms, one.end_ms) == (0, 0, 120)
    assert done_ms(holes[0], one, 10, 100) == pytest.approx(30)


def test_it_rests_where_its_memory_does_not_fit():
    holes = [gapless([hole(0, 100, 0.5, memory=5.0), hole(100, 200, 0.5)], 100.0)]
    (one,) = filled(holes, [Work(name="b", work_ms=40, memory_bytes=10)])
    assert (one.start_ms, one.end_ms) == (100, 180)
    assert done_ms(holes[0], one, 10, 150) == pytest.approx(25)
    assert filled(holes, [Work(name="b", work_ms=40, memory_bytes=1000)]) == []


def test_each_takes_the_device_on_which_it_ends_first():
    holes = [gapless([hole(0, 100, 0.1)], 100.0), gapless([hole(0, 100, 0.9)], 100.0)]
    works = [Work(name=name, work_ms=ms, memory_bytes=1) for name, ms in (("long", 80), ("short", 5))]
    found = {one.name: one for one in filled(holes, works)}
    assert found["long"].device == 1
    assert found["short"].device == 0
    assert found["short"].end_ms == 50


@given(
    st.lists(st.lists(st.tuples(st.floats(1, 50), st.floats(0, 1)), max_size=4), min_size=1, max_size=3),
    st.lists(st.floats(0.5, 100), max_size=6),
)
def test_no_device_is_used_twice_and_all_work_is_done(shapes, lengths):
    holes = []
    for shape in shapes:
        at, its = 0.0, []
        for length, share in shape:
            its.append(hole(at, at + length, share))
            at += length
        holes.append(gapless(its, 100.0))
    works = [Work(name=str(i), work_ms=ms, memory_bytes=1) for i, ms in enumerate(lengths)]
    found = filled(holes, works)
    assert len(found) == len(works)
    for one in found:
        assert done_ms(holes[one.device], one, 1, math.inf) >= lengths[int(one.name)] - 1e-6
    for device, its in enumerate(holes):
        mine = [one for one in found if one.device == device]
        end = max((one.end_ms for one in mine), default=0.0)
        free = sum(h.share * (min(h.end_ms, end) - h.start_ms) for h in its if h.start_ms < end)
        assert sum(lengths[int(one.name)] for one in mine) <= free + 1e-6
