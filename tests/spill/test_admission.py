"""Leases: who may have which segments when, what is read ahead for them, and what leaves."""

import threading
from concurrent.futures import FIRST_COMPLETED, wait

import pytest
from store_letters import SOON_S, P, define, lease, read, segment, until, write

from plait.errors import UsageError
from plait.spill.segment import Request


def test_readers_share_and_writers_do_not(make):
    store = make()
    define(store, "ab")
    write(store, a="a", b="b")
    one, two = lease(store, a="read"), lease(store, a="read", b="read")
    waiting = store.request([Request("job/a", "change")])
    behind = store.request([Request("job/a", "read")])
    one.release()
    assert not waiting.done()
    two.release()
    changing = waiting.result(SOON_S)
    assert not behind.done(), "a later request for the same segment does not overtake"
    changing.release()
    changing.release()
    behind.result(SOON_S).release()
    assert store.statistics().waits == 2


def test_a_request_that_does_not_fit_is_overtaken_by_one_that_does(make):
    store = make(pages=4)
    define(store, "abc", pages=2)
    store.define(segment("job/all", pages=4))
    held = lease(store, a="write")
    large = store.request([Request("job/all", "write")])
    lease(store, b="write").release()
    assert not large.done()
    held.release()
    large.result(SOON_S).release()


def test_a_request_that_does_not_fit_is_not_overtaken_for_ever(make):
    store = make(pages=4)
    define(store, "abc", pages=2)
    store.define(segment("job/all", pages=4))
    held = lease(store, a="write")
    large = store.request([Request("job/all", "write")])
    for key in "bcabcabcabcabc":  # one of them is always leased
        following = store.request([Request(f"job/{key}", "write")])
        held.release()
        wait([following, large], SOON_S, return_when=FIRST_COMPLETED)
        if large.done():
            break
        held = following.result(SOON_S)
    large.result(0).release()
    following.result(SOON_S).release()


def test_segments_that_lie_apart_are_brought_together(make):
    """Four pages, of which b has the second: three pages for c do not fit beside it, so it moves."""
    store = make(pages=4)
    define(store, "abde")
    store.define(segment("job/c", pages=3))
    write(store, a="a", b="b", d="d", e="e")
    with lease(store, b="read") as held:
        assert held.places["job/b"] not in (0, 3 * P)
    write(store, "write", c="c")
    assert read(store, "c", "b") == "cb"


def test_a_request_can_be_cancelled(make):
    store = make()
    define(store, "a")
    held = lease(store, a="write")
    waiting = store.request([Request("job/a", "read")])
    assert waiting.cancel()
    held.release()
    write(store, a="x")
    assert read(store, "a") == "x"


def test_who_waits_behind_a_cancelled_request_goes_on(make):
    store = make(pages=2)
    define(store, "ab")
    store.define(segment("job/c", pages=2))
    write(store, a="a", b="b")
    held = lease(store, a="read")
    waiting = store.request([Request("job/a", "change")])
    behind = store.request([Request("job/a", "read")])
    assert not behind.done()
    waiting.cancel()
    behind.result(SOON_S).release()
    held.release()
    for _ in range(20):  # cancelled while it is read, more often than not
        write(store, c="c")
        admitted = store.request([Request("job/a", "read")])
        behind = store.request([Request("job/c", "read")])
        admitted.cancel()
        behind.result(SOON_S).release()
        if not admitted.cancelled():
            admitted.result(SOON_S).release()


def test_equal_keys_in_a_request_are_one(make):
    store = make()
    define(store, "a")
    write(store, a="a")
    with store.request([Request("job/a", "read"), Request("job/a", "write")]).result(SOON_S) as held:
        assert bytes(store.memory[held.places["job/a"] :][:1]) == b"a", "read and write is change"
    store.request([]).result(SOON_S).release()


def test_what_is_expected_is_there_before_it_is_asked_for(make):
    store = make(pages=4)
    define(store, "abcdefgh")
    write(store, **{name: name for name in "abcd"})
    write(store, **{name: name for name in "efgh"})
    order = [[Request(f"job/{name}", "read")] for name in "abcd"]
    store.expect(order)
    before = until(store, lambda figures: figures.read_bytes == 4 * P)
    assert "".join(read(store, name) for name in "abcd") == "abcd"
    after = store.statistics()
    assert (after.waits, after.read_bytes) == (before.waits, before.read_bytes)


def test_what_is_needed_last_leaves_first(make):
    """Three pages; a is needed next, b later, c never."""
    store = make(pages=3)
    define(store, "abcd")
    write(store, a="a", b="b", c="c")
    store.expect([[Request("job/d", "write")], [Request("job/a", "read")], [Request("job/b", "read")]])
    with lease(store, d="write"):
        assert store.missing_bytes([Request("job/a", "read"), Request("job/b", "read")]) == 0
        assert store.missing_bytes([Request("job/c", "read"), Request("job/c", "write")]) == P
        assert store.missing_bytes([Request("job/c", "write"), Request("job/unknown", "read")]) == 0


def test_reading_ahead_takes_no_room_from_what_is_needed_sooner(make):
    store = make(pages=2)
    define(store, "abc")
    write(store, a="a", b="b")
    write(store, c="c")
    order = [[Request("job/a", "read")], [Request("job/b", "read")], [Request("job/c", "read")]]
    for _ in range(3):
        store.expect(order)
        before = store.statistics().read_bytes
        assert "".join(read(store, name) for name in "abc") == "abc"
        assert store.statistics().read_bytes - before <= 3 * P, "nothing is read twice"


def test_reading_ahead_leaves_room_for_what_is_to_be_made(make):
    """Four pages; two are made first, so of three that are read afterwards two have room."""
    store = make(pages=4)
    define(store, "abcdefg")
    write(store, a="a", b="b", c="c")
    write(store, d="d", e="e", f="f", g="g")
    made = Request("job/made", "write", 2 * P)
    store.expect([[made], *([Request(f"job/{name}", "read")] for name in "abc")])
    until(store, lambda figures: figures.read_bytes == 2 * P)
    store.define(segment("job/made", pages=2, persistent=False))
    lease(store, made="write").release()
    assert read(store, "a", "b") == "ab"
    assert store.statistics().read_bytes == 2 * P, "neither left before it was used"


def test_what_was_read_ahead_does_not_leave_for_what_is_read_ahead(make):
    """Two pages: what b was read for still comes, though c now comes before it."""
    store = make(pages=2)
    define(store, "abcd")
    write(store, a="a", b="b")
    write(store, c="c", d="d")
    soon = {name: [Request(f"job/{name}", "read")] for name in "abc"}
    store.expect([soon["a"], soon["b"]])
    until(store, lambda figures: figures.read_bytes == 2 * P)
    store.expect([soon["a"], soon["c"], soon["b"]])
    assert store.missing_bytes([*soon["a"], *soon["b"]]) == 0
    store.expect([soon["a"], soon["c"]])
    until(store, lambda figures: figures.read_bytes == 3 * P)
    assert store.missing_bytes(soon["b"]) == P, "nothing needs it any more"


def test_scratch_in_use_is_not_written_behind(make):
    """All that is not in use, and not needed soon, is written while there is more than memory holds."""
    store = make(pages=4)
    define(store, "bcdef")
    define(store, "a", persistent=False)
    store.expect([[Request("job/a", "read")]])
    write(store, a="a", b="b")
    with lease(store, a="read"):
        write(store, c="c")
        write(store, d="d")
        store.commit("job", {}).result(SOON_S)
        assert store.statistics().written_bytes == 3 * P
    until(store, lambda figures: figures.written_bytes == 4 * P)


def test_a_broken_promise_is_told_to_all_and_the_store_can_be_closed(make, monkeypatch):
    store = make(pages=2)
    define(store, "ab")
    held = lease(store, a="write")
    waiting = store.request([Request("job/a", "read")])
    monkeypatch.setattr(store._admission, "_grant", lambda: 1 / 0)
    held.release()
    with pytest.raises(ZeroDivisionError):
        waiting.result(SOON_S)
    with pytest.raises(RuntimeError, match="the store failed in one of its threads"):
        store.request([])


def test_who_waits_for_what_is_dropped_is_told(make):
    store = make()
    define(store, "ab")
    held = lease(store, b="write")
    waiting = store.request([Request("job/a", "write"), Request("job/b", "write")])
    store.drop("job/a")
    with pytest.raises(UsageError, match="job/a was dropped"):
        waiting.result(SOON_S)
    held.release()


def test_a_callback_may_use_the_store(make):
    store = make(pages=2)
    define(store, "abc")
    order, finished = iter("abcabcabc"), threading.Event()

    def next_one(done=None):
        if done is not None:
            done.result().release()
        name = next(order, None)
        if name is None:
            finished.set()
        else:
            store.request([Request(f"job/{name}", "write")]).add_done_callback(next_one)

    next_one()
    assert finished.wait(SOON_S)


def test_many_requests_at_once_are_all_granted(make):
    store = make(pages=3)
    define(store, "abcdef")
    futures = [store.request([Request(f"job/{name}", "write")]) for name in "abcdef" * 3]
    for future in futures:
        future.add_done_callback(lambda done: done.result().release())
    assert not wait(futures, SOON_S).not_done
