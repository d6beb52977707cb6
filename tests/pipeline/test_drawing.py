"""The drawings, as a reader sees them."""

import inspect

import pytest

from plait.errors import UsageError
from plait.pipeline import drawing, orders
from plait.pipeline.drawing import draw
from plait.pipeline.orders import depth, gpipe, kfkb, listed, one_f_one_b, work_conserving


def lines(text):
    return [line.strip() for line in text.strip().splitlines()]


def test_1f1b():
    assert lines(draw(one_f_one_b(3, 4))) == lines("""
        stage 0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
        stage 1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
        stage 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..
    """)


def test_groups_of_two():
    assert lines(draw(kfkb(3, 5, 2))) == lines("""
        stage 0  F0 F1 F2 F3 F4 .. B0 B1 .. .. B2 B3 .. B4
        stage 1  .. F0 F1 F2 F3 B0 B1 F4 .. B2 B3 .. B4 ..
        stage 2  .. .. F0 F1 B0 B1 F2 F3 B2 B3 F4 B4 .. ..
    """)


def test_gpipe():
    assert lines(draw(gpipe(2, 3))) == lines("""
        stage 0  F0 F1 F2 .. .. B0 B1 B2
        stage 1  .. F0 F1 F2 B0 B1 B2 ..
    """)


def test_depth_runs_ahead():
    assert lines(draw(depth(2, 5, 2))) == lines("""
        stage 0  F0 F1 F2 B0 F3 B1 F4 B2 .. B3 .. B4
        stage 1  .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 ..
    """)


def test_a_rule_is_drawn_too():
    assert lines(draw(work_conserving(3, 4, 2))) == lines("""
        stage 0  F0 F1 .. .. .. B0 F2 B1 F3 .. .. B2 .. B3
        stage 1  .. F0 F1 .. B0 .. B1 F2 .. F3 B2 .. B3 ..
        stage 2  .. .. F0 B0 F1 B1 .. .. F2 B2 F3 B3 .. ..
    """)


def test_a_backward_may_be_wider():
    assert lines(draw(one_f_one_b(2, 2), backward=2)) == lines("""
        stage 0  F0 F1 .. .. B0 B0 .. B1 B1
        stage 1  .. F0 B0 B0 F1 B1 B1 .. ..
    """)


def test_cells_are_as_wide_as_the_widest():
    first, _ = draw(one_f_one_b(2, 11)).splitlines()
    assert first.startswith("stage 0  F0  F1  ... B0  F2 ")
    assert first.endswith("F10 B9  ... B10")


def test_the_drawings_in_the_docstrings_are_true():
    said = inspect.getdoc(orders)
    for order in (one_f_one_b(2, 4), kfkb(2, 4, 2)):
        for line in draw(order).splitlines():
            assert line in said
    for line in draw(one_f_one_b(2, 3)).splitlines():
        assert line in inspect.getdoc(drawing)


def test_what_never_ends_is_not_drawn():
    with pytest.raises(UsageError, match="wait for each other"):
        draw(listed(["FBFB", "FFBB"]))
    with pytest.raises(UsageError, match="backward is 0"):
        draw(one_f_one_b(2, 2), backward=0)
