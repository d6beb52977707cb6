"""Foresight: the next use of everything, and how much of it memory can hold."""

from plait.spill.foresight import Foresight, Use, kept
from plait.spill.segment import Request


def unit(**modes):
    return [Request(key, mode) for key, mode in modes.items()]


def test_the_first_use_counts_and_what_is_waited_for_comes_first():
    foresight = Foresight([unit(a="read", b="write"), unit(b="read", c="change")])
    assert foresight.uses([{"c": "read"}]) == {
        "c": Use(-1, "read"), "a": Use(0, "read"), "b": Use(0, "write"),
    }  # fmt: skip
    assert list(foresight.uses()) == ["a", "b", "c"]


def test_a_unit_that_has_come_is_not_to_come():
    foresight = Foresight([unit(a="read"), unit(b="read"), unit(b="read"), unit(c="read")])
    foresight.begin({"b": "read"})
    assert foresight.units == [tuple(unit(**{key: "read"})) for key in "abc"]
    foresight.begin({"other": "read"})
    assert len(foresight.units) == 3


def test_kept_are_the_next_until_one_does_not_fit():
    sizes = [("a", 3), ("b", 4), ("c", 5), ("d", 1)]
    assert kept(sizes, 7) == {"a", "b"}
    assert kept(sizes, 11) == {"a", "b"}
    assert kept(sizes, 13) == {"a", "b", "c", "d"}
    assert kept(sizes, 2) == set()
