"""The arena: free space against a naive model, and memory that processes share."""

import mmap
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from plait.errors import UsageError
from plait.spill.arena import Arena, Space, without
from plait.spill.segment import PAGE_BYTES, padded

PAGES = 24


class SpaceIsAsPagesSay(RuleBasedStateMachine):
    """The model is a list with an owner, or none, for every page."""

    def __init__(self):
        super().__init__()
        self.space = Space(PAGES * PAGE_BYTES + 17)
        self.pages = [None] * PAGES
        self.taken = {}

    def runs(self):
        """(length, start) of each run of free pages."""
        found, start = [], None
        for i, owner in enumerate([*self.pages, "end"]):
            if owner is None and start is None:
                start = i
            elif owner is not None and start is not None:
                found.append((i - start, start))
                start = None
        return found

    @rule(nbytes=st.integers(1, 10 * PAGE_BYTES))
    def allocate(self, nbytes):
        count = padded(nbytes) // PAGE_BYTES
        best = min((run for run in self.runs() if run[0] >= count), default=None)
        place = self.space.allocate(nbytes)
        if best is None:
            assert place is None
            return
        assert place == best[1] * PAGE_BYTES
        self.taken[place] = nbytes
        self.pages[best[1] : best[1] + count] = [place] * count

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data):
        place = data.draw(st.sampled_from(sorted(self.taken)))
        self.space.free(place, self.taken.pop(place))
        self.pages = [None if owner == place else owner for owner in self.pages]

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free_the_first_page(self, data):
        place = data.draw(st.sampled_from(sorted(self.taken)))
        nbytes = padded(self.taken.pop(place))
        self.space.free(place, PAGE_BYTES)
        rest = place + PAGE_BYTES
        self.pages[place // PAGE_BYTES] = None
        if nbytes > PAGE_BYTES:
            self.taken[rest] = nbytes - PAGE_BYTES
            self.pages = [rest if owner == place else owner for owner in self.pages]

    @invariant()
    def gaps_are_the_runs_of_free_pages(self):
        gaps = [(start * PAGE_BYTES, (start + count) * PAGE_BYTES) for count, start in self.runs()]
        assert self.space.gaps() == gaps
        assert self.space.free_bytes == sum(end - start for start, end in gaps)
        assert self.space.used_bytes + self.space.free_bytes == PAGES * PAGE_BYTES
        assert self.space.copy().gaps() == gaps


SpaceIsAsPagesSay.TestCase.settings = settings(max_examples=50, deadline=None)
TestSpace = SpaceIsAsPagesSay.TestCase


def test_what_is_taken_cannot_be_taken_and_what_is_free_cannot_be_freed():
    space = Space(4 * PAGE_BYTES)
    space.take(PAGE_BYTES, PAGE_BYTES)
    for start, nbytes in ((0, 2 * PAGE_BYTES), (PAGE_BYTES, 1), (3 * PAGE_BYTES, 2 * PAGE_BYTES), (5, 1)):
        with pytest.raises(AssertionError, match="is not free"):
            space.take(start, nbytes)
    for start, nbytes in ((0, 1), (0, 2 * PAGE_BYTES), (PAGE_BYTES, 2 * PAGE_BYTES), (-PAGE_BYTES, 1)):
        with pytest.raises(AssertionError, match="was not taken"):
            space.free(start, nbytes)


def test_a_copy_is_another():
    space = Space(4 * PAGE_BYTES)
    space.copy().take(0, PAGE_BYTES)
    assert space.free_bytes == 4 * PAGE_BYTES


@given(st.tuples(st.integers(0, 20), st.integers(0, 20)), st.sets(st.integers(0, 20)))
def test_holes_are_taken_out(ends, cuts):
    whole, edges = (min(ends), max(ends)), sorted(cuts)
    holes = list(zip(edges[::2], edges[1::2], strict=False))
    left = {i for start, end in without(whole, holes[::-1]) for i in range(start, end)}
    assert left == set(range(*whole)) - {i for start, end in holes for i in range(start, end)}
    assert all(start < end for start, end in without(whole, holes))


def test_others_map_the_same_memory():
    arena = Arena(5 * PAGE_BYTES - 1)
    try:
        assert arena.space.nbytes == 4 * PAGE_BYTES == arena.memory.nbytes
        arena.memory[5] = 7
        with mmap.mmap(arena.fd, 4 * PAGE_BYTES) as other:
            assert other[5] == 7
            other[6] = 8
        assert arena.memory[6] == 8
        arena.take(0, PAGE_BYTES)
        arena.take(PAGE_BYTES, PAGE_BYTES)
        arena.space.free(0, 2 * PAGE_BYTES)
        assert arena.peak_bytes == 2 * PAGE_BYTES
    finally:
        arena.close()


def test_a_view_outlives_the_arena():
    arena = Arena(PAGE_BYTES)
    view = arena.memory[:3]
    view[:] = b"abc"
    arena.close()
    assert bytes(view) == b"abc"


def test_too_little_or_too_much_memory_is_refused_and_leaves_nothing_open():
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UsageError, match="4095 bytes of memory hold no page") as caught:
        Arena(PAGE_BYTES - 1)
    assert caught.value.setting == "memory_bytes"
    with pytest.raises(UsageError, match="cannot be mapped"):
        Arena(1 << 62)
    assert len(os.listdir("/proc/self/fd")) == before
