"""Curves: where points are, what the axes say, and values that cannot be drawn."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import FileError, UsageError
from plait.plot import Level, Plot, Series, round_steps, written


def plot(points=((1, 10.0), (2, 20.0), (4, 40.0)), **more):
    return Plot(title="T", x="devices", y="ms", series=[Series(name="s", points=points)], **more)


def markers(drawn):
    """Where the circles of the first series are, the legend's apart."""
    root = ElementTree.fromstring(drawn)
    found = [part for part in root.iter() if part.get("class") == "marker" and len(part)]
    return [tuple(map(float, re.match(r"M(\S+) (\S+)a", part.get("d")).groups())) for part in found]


def labels(drawn, anchor):
    root = ElementTree.fromstring(drawn)
    return [part.text for part in root.iter() if part.get("text-anchor") == anchor]


def test_places_are_in_proportion_on_linear_axes():
    (x0, y0), (x1, y1), (x2, y2) = markers(plot().svg())
    assert (x2 - x0) / (x1 - x0) == pytest.approx(3, abs=0.01)
    assert (y2 - y0) / (y1 - y0) == pytest.approx(3, abs=0.01)
    assert y2 < y1 < y0  # up is more


def test_equal_factors_are_equal_distances_on_logarithmic_axes():
    drawn = plot(log_x=True, log_y=True).svg()
    (x0, y0), (x1, y1), (x2, y2) = markers(drawn)
    assert x2 - x1 == pytest.approx(x1 - x0, abs=0.11)
    assert y2 - y1 == pytest.approx(y1 - y0, abs=0.11)
    assert labels(drawn, "middle")[:3] == ["1", "2", "4"]  # the values, where they are few


def test_a_linear_axis_begins_at_zero_unless_told():
    assert labels(plot().svg(), "end")[0] == "0"
    assert labels(plot(from_zero=False).svg(), "end")[0] == "10"
    assert labels(plot(points=((0, -5.0), (1, 5.0))).svg(), "end")[0] == "-6"


def test_missing_values_leave_a_gap():
    drawn = plot(points=((1, 1.0), (2, None), (3, math.nan), (4, 2.0), (5, math.inf), (6, 3.0))).svg()
    assert len(markers(drawn)) == 3
    (curve,) = re.findall(r'class="series" stroke="\S+" d="(M[^h]*)"/>', drawn)
    assert curve.count("M") == 3


def test_levels_and_bands_are_drawn_and_within_the_picture():
    drawn = plot(levels=[Level(name="claim", y=(90, 100)), Level(name="limit", y=50)]).svg()
    assert drawn.count('class="band"') == 2
    assert drawn.count('class="line"') == 3
    assert ">claim<" in drawn
    assert labels(drawn, "end").count("100") == 1


def test_the_legend_wraps_and_the_picture_grows():
    series = [Series(name=f"a rather long name {i}", points=[(1, 1.0)], dashed=i == 3) for i in range(9)]
    many = Plot(title="T", x="x", y="y", series=series)
    one = plot()
    heights = [int(re.search(r'height="(\d+)"', drawn.svg())[1]) for drawn in (one, many)]
    assert heights[1] > heights[0]
    assert many.svg().count('stroke-dasharray="6 4"') == 2  # its curve, and its name


def test_names_are_escaped(tmp_path):
    odd = Plot(title='<a "b">', x="<x>", y="&y", series=[Series(name="<s>", points=[(1, 1.0)])])
    odd.save(tmp_path / "p.svg")
    root = ElementTree.parse(tmp_path / "p.svg").getroot()
    assert root.get("aria-label") == '<a "b">'


@pytest.mark.parametrize(
    ("points", "more", "message"),
    [
        ((), {}, "no point to draw"),
        (((1, None),), {}, "no point to draw"),
        (((0, 1.0),), {"log_x": True}, "x = 0 on a logarithmic axis"),
        (((1, -2.0),), {"log_y": True}, "y = -2 on a logarithmic axis"),
    ],
)
def test_what_cannot_be_drawn(points, more, message):
    with pytest.raises(UsageError, match=message):
        plot(points, **more)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileError, match="cannot be written"):
        plot().save(tmp_path / "none" / "p.svg")


@settings(deadline=None)
@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_round_steps_enclose_both_ends_and_are_few(low, length):
    high = low + length
    if high - low < 1e-9 * max(abs(low), abs(high)):
        return
    steps = round_steps(low, high)
    slack = 1e-6 * (high - low)
    assert steps[0] <= low + slack
    assert steps[-1] >= high - slack
    assert 2 <= len(steps) <= 10


def test_values_whose_logarithms_are_the_same_have_an_axis():
    points = [(1.0, 1e-6), (2.0, 1.0000000000000002e-06)]
    shown = Plot(title="t", x="x", y="y", log_y=True, series=[Series(name="s", points=points)]).svg()
    assert 'class="series"' in shown


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.floats(1e-6, 1e9), st.floats(1e-6, 1e9)), min_size=1, max_size=12),
    st.booleans(),
    st.booleans(),
)
def test_every_point_lies_within_the_frame(points, log_x, log_y):
    for x, y in markers(plot(sorted(points), log_x=log_x, log_y=log_y).svg()):
        assert 78 - 4.1 <= x <= 744 - 3.9  # a circle's path begins at its left edge
        assert 39.9 <= y <= 348.1


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.25, "0.25"), (64.0, "64"), (20_000, "20,000"), (5e-6, "5e-6"), (2e12, "2e12"), (0, "0")],
)
def test_numbers_beside_an_axis(value, text):
    assert written(value) == text


def test_a_series_may_have_a_colour_that_is_not_by_its_place():
    points = ((0, 1.0), (1, 2.0))
    series = (Series(name="a", points=points), Series(name="b", points=points, place=4))
    drawn = Plot(title="", x="", y="", series=series).svg()
    assert re.findall(r'class="series" stroke="([^"]*)"', drawn) == ["#0072b2", "#56b4e9"] * 2
