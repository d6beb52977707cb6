"""Placement: what fits is placed, what must stay stays, and what is missed last leaves."""

from hypothesis import given
from hypothesis import strategies as st

from plait.spill.arena import Space
from plait.spill.placement import Occupant, place
from plait.spill.segment import PAGE_BYTES

P = PAGE_BYTES


@st.composite
def memories(draw):
    """Pages with occupants, some of which must stay: (space, occupants that may leave, ranges that stay)."""
    total, at = draw(st.integers(4, 30)), 0
    space, may_leave, stay = Space(total * P), [], []
    while at < total:
        count = min(draw(st.integers(1, 6)), total - at)
        kind = draw(st.sampled_from(["free", "leaves", "stays"]))
        where = at * P, (at + count) * P
        if kind != "free":
            space.take(where[0], count * P)
        if kind == "leaves":
            may_leave.append(Occupant(key=f"old{at}", place=where, loss=(draw(st.integers(0, 3)),)))
        elif kind == "stays":
            stay.append(where)
        at += count
    return space, may_leave, stay


def overlap(one, other):
    return one[0] < other[1] and other[0] < one[1]


@given(memories(), st.lists(st.integers(1, 8), min_size=1, max_size=4))
def test_a_plan_gives_everyone_room_of_its_own(memory, counts):
    space, may_leave, stay = memory
    before = space.gaps()
    plan = place(space, {f"new{i}": count * P for i, count in enumerate(counts)}, may_leave)
    assert space.gaps() == before
    if plan is None:
        return
    gone = [occupant.place for occupant in may_leave if occupant.key in plan.leaving]
    stay += [occupant.place for occupant in may_leave if occupant.key not in plan.leaving]
    new = [(start, start + counts[int(key[3:])] * P) for key, start in plan.places.items()]
    assert len(new) == len(counts)
    for i, one in enumerate(new):
        assert 0 <= one[0] < one[1] <= space.nbytes
        assert not any(overlap(one, other) for other in [*stay, *new[:i]])
    assert all(any(overlap(one, other) for other in new) for one in gone), "nobody leaves for nothing"


@given(memories(), st.lists(st.integers(1, 8), min_size=1, max_size=4))
def test_what_fits_the_memory_fits_when_nothing_has_to_stay(memory, counts):
    space, may_leave, stay = memory
    everybody = may_leave + [Occupant(key=f"s{place}", place=place, loss=(0,)) for place in stay]
    plan = place(space, {i: count * P for i, count in enumerate(counts)}, everybody)
    assert (plan is not None) == (sum(counts) * P <= space.nbytes)


@given(memories(), st.integers(1, 8))
def test_one_segment_is_placed_where_the_least_is_lost(memory, count):
    """Against every possible range: the worst member of the run that leaves is as dispensable as can be."""
    space, may_leave, stay = memory
    plan = place(space, {"new": count * P}, may_leave)
    losses = []
    for start in range(0, space.nbytes - count * P + 1, P):
        window = start, start + count * P
        if not any(overlap(window, other) for other in stay):
            out = [occupant for occupant in may_leave if overlap(occupant.place, window)]
            losses.append(max((occupant.loss[0] for occupant in out), default=-1))
    assert (plan is None) == (not losses)
    if plan is not None:
        gone = [occupant.loss[0] for occupant in may_leave if occupant.key in plan.leaving]
        assert max(gone, default=-1) == min(losses)


def test_a_gap_in_the_middle_does_not_keep_segments_apart():
    space = Space(10 * P)
    space.take(0, 3 * P)
    space.take(7 * P, 3 * P)
    ends = [
        Occupant(key="low", place=(0, 3 * P), loss=(1,)),
        Occupant(key="high", place=(7 * P, 10 * P), loss=(1,)),
    ]
    plan = place(space, {"a": 4 * P, "b": 4 * P, "c": 2 * P}, ends)
    assert plan is not None
    assert plan.places == {"a": 0, "b": 4 * P, "c": 8 * P}
    assert sorted(plan.leaving) == ["high", "low"]
