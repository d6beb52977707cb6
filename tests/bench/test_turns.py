"""What little time is spent on."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.bench.turns import turns, why_not

seconds = st.floats(0, 1e4)
names = st.sets(st.from_regex(r"[abc]-[a-f]", fullmatch=True), max_size=18)


def test_every_family_has_its_turn_with_its_shortest_first() -> None:
    known = {"spill-one": 60.0, "spill-bound": 9.0, "burst-wide": 200.0}
    asked = ["spill-one", "cli-start", "spill-new", "burst-wide", "spill-bound"]
    assert turns(asked, known) == ("burst-wide", "cli-start", "spill-bound", "spill-one", "spill-new")


@settings(deadline=None)
@given(names, st.dictionaries(st.from_regex(r"[abc]-[a-f]", fullmatch=True), seconds))
def test_each_is_asked_once_and_no_family_waits_for_a_second_of_another(
    asked: set[str], known: dict[str, float]
) -> None:
    found = turns(asked, known)
    assert sorted(found) == sorted(asked)
    families = [name[0] for name in found]
    for place, family in enumerate(families):
        before = families[:place].count(family)
        for other in set(families):
            assert families[:place].count(other) >= min(before, families.count(other))
    for family in set(families):
        own = [known.get(name, float("inf")) for name in found if name[0] == family]
        assert own == sorted(own)


@pytest.mark.parametrize(
    ("spent", "known", "budget", "why"),
    [
        (9e9, 9e9, None, None),
        (0, 600, 600, None),
        (1, 600, 600, "took 600 s before, and 599 of 600 s were left"),
        (599, None, 600, None),
        (600, None, 600, "the 600 s were over"),
        (700, 0.5, 600, "took 0 s before, and 0 of 600 s were left"),
    ],
)
def test_what_is_begun_in_the_time_that_is_left(
    spent: float, known: float | None, budget: float | None, why: str | None
) -> None:
    assert why_not(spent, known, budget) == why
