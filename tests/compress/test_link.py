import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.compress.arena import Arena, mapped
from plait.compress.link import ABORT, BEAT, DATA, HELLO, SHARED, Frame, Link


class Shelf:
    """A sink that keeps what it is given, and can be told not to be ready."""

    def __init__(self):
        self.arena = Arena(shared=False)
        self.taken = []
        self.open = True

    def ready(self, link, frame):
        return self.open

    def room(self, link, frame):
        return self.arena.take(frame.length)

    def deliver(self, link, frame, buffer):
        self.taken.append((frame, bytes(buffer.view)))
        self.last = buffer
        if frame.kind != SHARED:
            buffer.drop()


@pytest.fixture
def ends():
    """Two ends of a connection; they are closed afterwards."""
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


def message(arena, text, **fields):
    buffer = arena.take(len(text))
    buffer.view[:] = text
    frame = {"kind": DATA, "phase": 0, "share": 0, "chunk": 0, "operation": 0, "length": len(text)} | fields
    return Frame(**frame), buffer


def test_messages_arrive_whole_and_in_order(ends):
    one, other = Link(ends[0], rank=4, position=0), Link(ends[1], rank=7, position=1)
    arena, shelf = Arena(shared=False), Shelf()
    texts = [b"x", b"yy" * 5000, b"", b"z" * 300_000]
    for i, text in enumerate(texts):
        mark = one.send(*message(arena, text, chunk=i))
    one.send(Frame(BEAT, 0, 0, 0, 0, 0))
    # More than the kernel holds: some of it waits here until the other end has read.
    assert one.unsent
    assert one.pending == 1
    assert not one.taken(mark)
    while len(shelf.taken) < len(texts):
        one.flush()
        other.receive(shelf)
    assert [(frame.chunk, text) for frame, text in shelf.taken] == list(enumerate(texts))
    assert one.taken(mark)
    assert one.pending == 0
    assert not other.receive(shelf)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.binary(max_size=100), max_size=10), st.integers(1, 50))
def test_messages_that_trickle_in_are_put_together(texts, step):
    one, other = socket.socketpair()
    with one, other:
        link, shelf = Link(other, rank=0, position=0), Shelf()
        stream = b"".join(Frame(DATA, 1, 2, i, 3, len(text)).pack() + text for i, text in enumerate(texts))
        for at in range(0, len(stream), step):
            one.send(stream[at : at + step])
            link.receive(shelf)
        assert shelf.taken == [(Frame(DATA, 1, 2, i, 3, len(text)), text) for i, text in enumerate(texts)]


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=300))
def test_rubbish_ends_the_link_and_nothing_else(rubbish):
    one, other = socket.socketpair()
    with one, other:
        link, shelf = Link(other, rank=0, position=0), Shelf()
        one.send(Frame(HELLO, 0, 0, 0, 0, 2).pack() + b"{}" + rubbish)
        one.close()
        while link.lost is None:
            link.receive(shelf)
        assert shelf.taken[0][1] == b"{}"
        assert link.lost


def test_a_header_that_makes_no_sense_is_shown(ends):
    link = Link(ends[1], rank=0, position=0)
    ends[0].send(b"GET / HTTP/1.1\r\nHost: example.org\r\n")
    assert link.receive(Shelf())
    assert "474554202f" in link.lost


@pytest.mark.parametrize("kind", [HELLO, ABORT])
def test_a_text_has_an_end(ends, kind):
    link = Link(ends[1], rank=0, position=0)
    ends[0].send(Frame(kind, 0, 0, 0, 0, 1 << 40).pack())
    link.receive(Shelf())
    assert "where a message should begin" in link.lost


def test_what_cannot_be_taken_stays_on_the_wire(ends):
    one, other = Link(ends[0], rank=0, position=0), Link(ends[1], rank=1, position=1)
    arena, shelf = Arena(shared=False), Shelf()
    shelf.open = False
    one.send(*message(arena, b"early"))
    other.receive(shelf)
    assert other.paused
    assert shelf.taken == []
    shelf.open = True
    assert other.receive(shelf)
    assert not other.paused
    assert [text for _, text in shelf.taken] == [b"early"]


def test_between_neighbours_the_bytes_stay_where_they_are(ends):
    arenas = [Arena(shared=True), Arena(shared=True)]
    one = Link(ends[0], rank=0, position=0, foreign=mapped(arenas[1].descriptor))
    other = Link(ends[1], rank=1, position=1, foreign=mapped(arenas[0].descriptor))
    shelf = Shelf()
    frame, buffer = message(arenas[0], b"shared" * 100_000)
    one.send(frame, buffer)
    buffer.drop()
    assert not one.unsent, "only a header went through the kernel"
    other.receive(shelf)
    ((got, text),) = shelf.taken
    assert (got.kind, got.place) == (SHARED, buffer.place)
    assert text == b"shared" * 100_000
    # Until the other worker is done, the place is not used again.
    assert one.pending == 1
    assert arenas[0].take(600_000) is not buffer
    shelf.last.drop()
    one.receive(shelf)
    assert one.pending == 0
    assert arenas[0].take(600_000) is buffer


@pytest.mark.parametrize("place", [1 << 50, (1 << 32) - 10])
def test_a_place_outside_the_arena_ends_the_link(ends, place):
    link = Link(ends[1], rank=1, position=1, foreign=mapped(Arena(shared=True).descriptor))
    ends[0].send(Frame(SHARED, 0, 0, 0, 0, 100, place).pack())
    link.receive(Shelf())
    assert "an arena that is not there" in link.lost


def test_so_does_returning_what_was_not_lent(ends):
    link = Link(ends[1], rank=1, position=1)
    ends[0].send(Frame(4, 0, 0, 0, 0, 0, 4096).pack())
    link.receive(Shelf())
    assert "was not lent" in link.lost


def test_the_last_words_are_heard_even_when_sending_fails_first(ends):
    link, shelf = Link(ends[1], rank=1, position=1), Shelf()
    ends[0].send(Frame(ABORT, 0, 0, 0, 0, 3).pack() + b"bye")
    ends[0].close()
    arena = Arena(shared=False)
    frame, buffer = message(arena, b"to nobody")
    mark = link.send(frame, buffer)
    buffer.drop()
    assert arena.take(9) is buffer, "what cannot be sent is not kept"
    assert link.lost is None
    assert link.taken(mark)
    link.receive(shelf)
    assert shelf.taken[0][1] == b"bye"
    assert link.lost is not None
    assert link.send(frame, buffer) == mark


def test_a_lost_link_lets_go_of_what_it_kept(ends):
    arenas = [Arena(shared=True), Arena(shared=True)]
    link = Link(ends[0], rank=0, position=0, foreign=mapped(arenas[1].descriptor))
    frame, lent = message(arenas[0], b"lent")
    link.send(frame, lent)
    lent.drop()
    link.lose("tired of it")
    link.lose("of no interest")
    assert link.lost == "tired of it"
    assert arenas[0].take(4) is lent
    assert link.pending == 0
