"""Figures with names on one axis."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.bench.forest import Forest, Mark
from plait.errors import UsageError

SVG = "{http://www.w3.org/2000/svg}"
LEFT, RIGHT = 470, 1120 - 118


def forest(*marks: Mark) -> Forest:
    return Forest(title="T", x="ratio", marks=marks)


def mark(value: float, **fields: object) -> Mark:
    return Mark(**{"group": "q", "name": "case", **fields}, value=value)  # type: ignore[arg-type]


def parts(drawn: str, kind: str) -> list[ElementTree.Element]:
    return [part for part in ElementTree.fromstring(drawn).iter() if part.get("class") == kind]


def centre(part: ElementTree.Element) -> float:
    """The middle of a mark, whichever shape it has."""
    path = part.get("d") or ""
    found = re.match(r"M(\S+) (\S+?)([ahl])", path)
    assert found is not None
    return float(found[1]) + (4 if found[3] in "ah" else 0)


def ticks(drawn: str) -> dict[str, float]:
    texts = ElementTree.fromstring(drawn).iter(f"{SVG}text")
    return {t.text or "": float(t.get("x") or 0) for t in texts if t.get("text-anchor") == "middle"}


def test_equal_factors_are_equal_distances_and_shapes_tell_verdicts_apart() -> None:
    drawn = forest(mark(0.5, holds=False), mark(1.0), mark(2.0, holds=True)).svg()
    low, one, high = map(centre, parts(drawn, "mark"))
    assert high - one == pytest.approx(one - low, abs=0.11)
    assert ticks(drawn)["1"] == pytest.approx(one, abs=0.11)
    assert ticks(drawn)["2"] == pytest.approx(high, abs=0.11)
    shapes = {re.sub(r"[\d.\- ]", "", part.get("d") or "") for part in parts(drawn, "mark")}
    assert len(shapes) == 3
    assert len({part.get("fill") for part in parts(drawn, "mark")}) == 3


def test_the_spread_and_the_bound_are_where_their_values_are() -> None:
    drawn = forest(mark(2.0, low=1.0, high=4.0, bound=1.0), mark(4.0)).svg()
    (spread,) = parts(drawn, "spread")
    (bound,) = parts(drawn, "bound")
    begin, end = map(float, re.fullmatch(r"M(\S+) \S+H(\S+)", spread.get("d") or "").groups())  # type: ignore[union-attr]
    (line,) = parts(drawn, "one")
    assert begin == float(bound.get("x1") or 0) == float(line.get("x1") or 0)
    assert end == pytest.approx(centre(parts(drawn, "mark")[1]), abs=0.11)


def test_groups_are_named_once_and_long_names_cut() -> None:
    drawn = forest(mark(1.0, group="a"), mark(1.0, group="a", name="x" * 200), mark(1.0, group="b")).svg()
    assert [part.text for part in parts(drawn, "group")] == ["a", "b"]
    assert "x" * 65 + "…" in drawn
    assert "<title>" + "x" * 200 + "</title>" in drawn


def test_what_is_not_above_zero_is_counted_and_not_drawn() -> None:
    drawn = forest(mark(-1.0), mark(0.0), mark(3.0, low=-1.0, high=4.0)).svg()
    assert len(parts(drawn, "mark")) == 1
    assert parts(drawn, "spread") == []
    assert "2 of 3 are not above zero, and not drawn" in drawn
    with pytest.raises(UsageError, match="has no mark above zero"):
        forest(mark(0.0))


def test_names_are_escaped(tmp_path: Path) -> None:
    odd = Forest(title='<a "b">', x="<x>", marks=[mark(1.0, group="<g>", name="<n>&")])
    odd.save(tmp_path / "f.svg")
    assert ElementTree.parse(tmp_path / "f.svg").getroot().get("aria-label") == '<a "b">'


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=8))
def test_everything_lies_within_the_picture(values: list[float]) -> None:
    drawn = forest(*(mark(value, low=value / 2, high=value * 2, bound=value) for value in values)).svg()
    for x in map(centre, parts(drawn, "mark")):
        assert LEFT - 0.1 <= x <= RIGHT + 0.1
    shown = ticks(drawn)
    assert "1" in shown
    assert len(shown) <= 26
    height = float(ElementTree.fromstring(drawn).get("height") or 0)
    assert all(
        float(part.get("y") or 0) <= height for part in ElementTree.fromstring(drawn).iter(f"{SVG}text")
    )
