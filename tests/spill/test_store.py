"""The store: what is written is read back, in little memory, in the order that is expected."""

import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import wait

import pytest

from plait import Timeline
from plait.errors import FileError, UsageError
from plait.spill.segment import PAGE_BYTES, Request, Segment
from plait.spill.store import Store

P = PAGE_BYTES
SOON_S = 30
"""Longer than anything takes here; what takes longer hangs."""


@pytest.fixture
def make(tmp_path):
    made = []

    def create(pages=4, how=Store.create, **options):
        store = how(tmp_path / "store", memory_bytes=pages * P, **options)
        made.append(store)
        return store

    yield create
    for store in made:
        store.close(keep=False)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("plait")]


def segment(key, pages=1, persistent=True):
    return Segment(key=key, nbytes=pages * P, persistent=persistent)


def lease(store, **modes):
    """A lease of segments of the group ``job``."""
    return store.request([Request(f"job/{key}", mode) for key, mode in modes.items()]).result(SOON_S)


def write(store, mode="write", **letters):
    """Fill segments with a letter each."""
    with lease(store, **dict.fromkeys(letters, mode)) as held:
        for key, letter in letters.items():
            size = next(s.nbytes for s in store.segments("job") if s.key == f"job/{key}")
            at = held.places[f"job/{key}"]
            store.memory[at : at + size] = letter.encode() * size


def read(store, *keys):
    """What segments are filled with, as a word."""
    with lease(store, **dict.fromkeys(keys, "read")) as held:
        word = ""
        for key in keys:
            size = next(s.nbytes for s in store.segments("job") if s.key == f"job/{key}")
            at = held.places[f"job/{key}"]
            content = bytes(store.memory[at : at + size])
            assert content == content[:1] * size, f"{key} is a mixture"
            word += content[:1].decode()
        return word


def define(store, names, **options):
    for name in names:
        store.define(segment(f"job/{name}", **options))


def until(store, condition):
    """The figures when they are so."""
    deadline = time.monotonic() + SOON_S
    while not condition(figures := store.statistics()):
        assert time.monotonic() < deadline, figures
        time.sleep(0.001)
    return figures


@pytest.mark.parametrize("persistent", [True, False])
def test_more_than_memory_is_kept(make, persistent):
    store = make(pages=3)
    define(store, "abcdefgh", persistent=persistent)
    for name in "abcdefgh":
        write(store, **{name: name})
    assert "".join(read(store, name) for name in "abcdefgh") == "abcdefgh"
    write(store, "change", c="x", f="y")
    assert read(store, "a", "c", "f") == "axy"
    figures = store.statistics()
    assert figures.peak_bytes == 3 * P
    assert figures.read_bytes >= 5 * P
    assert figures.written_bytes >= 5 * P
    assert figures.evictions >= 5
    assert figures.disk_bytes == 8 * P * (2 if persistent else 1)


def test_segments_of_several_blocks(make):
    pages = (40 << 20) // P
    store = make(pages=pages + 10)
    define(store, "ab", pages=pages)
    for _ in range(2):
        write(store, a="a")
        write(store, b="b")
    assert read(store, "a") + read(store, "b") == "ab"
    store.commit("job", {}).result(SOON_S)
    assert [len(piece) for piece in store.stream("job/a")] == [16 << 20, 16 << 20, 8 << 20]
    assert {bytes(piece[:1]) + bytes(piece[-1:]) for piece in store.stream("job/a")} == {b"aa"}
    assert {bytes(piece[:1]) + bytes(piece[-1:]) for piece in store.stream("job/b")} == {b"bb"}


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


def test_a_commit_is_what_comes_back(make):
    store = make(pages=3)
    define(store, "ab")
    store.define(segment("job/scratch", persistent=False))
    store.define(segment("job/empty"))
    store.define(segment("other/x"))
    write(store, a="a", b="b", scratch="s")
    note = {"step": 3, "losses": [0.1, float("inf")], "nested": {"x": None}}
    store.commit("job", note).result(SOON_S)
    write(store, "change", a="A")
    store.close(keep=True)

    again = make(pages=3, how=Store.open)
    assert again.groups() == ("job",)
    assert again.committed("job") == note
    assert again.committed("other") is None
    assert {s.key for s in again.segments("job")} == {"job/a", "job/b", "job/empty"}
    assert again.segments("other") == ()
    define(again, "ab")
    assert read(again, "a", "b") == "ab"
    with pytest.raises(UsageError, match="job/empty cannot be read: nothing has been written"):
        lease(again, empty="read")
    write(again, empty="e")
    again.commit("job", {"step": 4}).result(SOON_S)
    again.close(keep=True)
    last = make(pages=3, how=Store.open)
    assert read(last, "a", "b", "empty") == "abe"


def test_the_group_can_go_on_while_it_is_committed(make):
    store = make(pages=3)
    define(store, "abcd")
    for step in range(20):
        for name in "abcd":
            write(store, **{name: chr(ord("a") + step)})
        commit = store.commit("job", {"step": step})
        for name in "abcd":
            write(store, "change", **{name: "z"})
        commit.result(SOON_S)
        store.revert("job")
        assert "".join(read(store, name) for name in "abcd") == chr(ord("a") + step) * 4
        assert store.committed("job") == {"step": step}


def test_writing_after_a_commit_leaves_the_commit_as_it_is(make):
    store = make(pages=1)
    define(store, "ab")
    for round_ in range(3):
        write(store, a="a")
        write(store, b="b")
        store.commit("job", {"round": round_}).result(SOON_S)
        for letter in "xyz":
            write(store, "change", a=letter)
            write(store, "change", b=letter)
        store.revert("job")
        assert read(store, "a") + read(store, "b") == "ab"


def test_threads_may_revert_define_and_commit_the_same_group(make):
    store = make(pages=3)
    problems = []

    def work(number):
        chance = random.Random(number)
        for _ in range(25):
            try:
                define(store, "ab", pages=2)
                with lease(store, **{chance.choice("ab"): "write"}):
                    pass
                chance.choice([store.revert, store.drop_group, lambda name: store.commit(name, {})])("job")
            except UsageError:
                pass  # another one was faster
            except BaseException as error:
                problems.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    store.drop_group("job")
    define(store, "a")
    write(store, a="a")
    assert read(store, "a") == "a"


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


def test_reverting_without_a_commit_leaves_nothing(make, tmp_path):
    store = make()
    define(store, "ab")
    write(store, a="a")
    store.revert("job")
    store.revert("unknown")
    assert store.groups() == ()
    assert os.listdir(tmp_path / "store") == ["store.lock"]
    define(store, "a")
    with pytest.raises(UsageError, match="nothing has been written"):
        lease(store, a="read")


def test_dropping_frees_memory_and_disk(make, tmp_path):
    store = make(pages=4)
    define(store, "ab", pages=2)
    write(store, a="a", b="b")
    store.commit("job", {}).result(SOON_S)
    file = tmp_path / "store" / "job.segments"
    assert file.stat().st_blocks * 512 == 8 * P
    store.drop("job/a")
    assert file.stat().st_blocks * 512 == 6 * P, "the last commit needs one slot"
    assert store.statistics().disk_bytes == 6 * P
    store.commit("job", {}).result(SOON_S)
    assert file.stat().st_blocks * 512 == 4 * P
    store.define(segment("job/c", pages=4))
    write(store, c="c")
    store.drop_group("job")
    store.drop_group("job")
    assert os.listdir(tmp_path / "store") == ["store.lock"]
    assert store.statistics().disk_bytes == 0
    define(store, "a", pages=4)
    write(store, a="a")


def test_what_is_dropped_while_it_moves_touches_nobody_else(make):
    """Its memory, and its room on the disk, are for others only when the transfer has ended."""
    pages = (32 << 20) // P
    store = make(pages=pages)
    for round_ in range(4):
        before = store.statistics().written_bytes
        define(store, "abc", pages=pages, persistent=False)
        write(store, a="a")
        write(store, b="b")  # a has left, b is written behind
        if round_ % 2:
            store.expect([[Request("job/a", "read")]])
            until(store, lambda figures, least=before + 2 * pages * P: figures.written_bytes >= least)
            # Now a is read, in the place of b.
        store.drop("job/a")
        store.drop("job/b")
        write(store, c="c")
        define(store, "b", pages=pages, persistent=False)
        assert read(store, "c") == "c"
        write(store, b="B")
        assert read(store, "c") + read(store, "b") == "cB"
        store.drop_group("job")


def test_who_waits_for_what_is_dropped_is_told(make):
    store = make()
    define(store, "ab")
    held = lease(store, b="write")
    waiting = store.request([Request("job/a", "write"), Request("job/b", "write")])
    store.drop("job/a")
    with pytest.raises(UsageError, match="job/a was dropped"):
        waiting.result(SOON_S)
    held.release()


def test_a_constant_takes_one_slot(make):
    store = make()
    store.define(segment("job/a"), constant=True)
    assert store.statistics().disk_bytes == P
    write(store, a="x")
    write(store, "change", a="y")
    store.commit("job", {}).result(SOON_S)
    with pytest.raises(UsageError, match="job/a is constant, and was committed"):
        lease(store, a="change")
    store.close(keep=True)
    again = make(how=Store.open)
    assert read(again, "a") == "y"
    with pytest.raises(UsageError, match="is constant"):
        lease(again, a="write")


def test_a_stream_keeps_others_from_changing(make):
    store = make(pages=3)
    define(store, "ab", pages=2)
    write(store, a="a")
    for _ in range(2):  # from memory, then from the disk
        pieces = store.stream("job/a")
        assert bytes(next(pieces)) == b"a" * 2 * P
        waiting = store.request([Request("job/a", "change")])
        assert not waiting.done()
        with pytest.raises(UsageError, match="cannot be dropped while in use"):
            store.drop_group("job")
        pieces.close()
        waiting.result(SOON_S).release()
        write(store, b="b")
    store.drop("job/b")
    define(store, "c")
    with pytest.raises(UsageError, match="nothing has been written"):
        next(store.stream("job/c"))


@pytest.mark.parametrize("keep", [True, False])
def test_closing_leaves_what_it_should(make, tmp_path, keep):
    fds = len(os.listdir("/proc/self/fd"))
    store = make()
    define(store, "ab")
    store.define(segment("other/a"))
    store.define(segment("other/s", persistent=False))
    write(store, a="a")
    done = store.commit("job", {})
    held = lease(store, b="write")
    waiting = store.request([Request("job/b", "read")])
    pieces = store.stream("job/a")
    next(pieces)
    store.close(keep=keep)
    store.close(keep=keep)
    assert done.result(0) is None
    with pytest.raises(UsageError, match="the store was closed"):
        waiting.result(0)
    with pytest.raises(UsageError, match="the store was closed"):
        store.request([])
    held.release()
    pieces.close()
    assert len(os.listdir("/proc/self/fd")) == fds
    left = set(os.listdir(tmp_path / "store")) if keep else (tmp_path / "store").exists()
    assert left == ({"job.segments", "job.manifest"} if keep else False)


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


def test_every_move_is_on_the_timeline(make):
    timeline = Timeline()
    store = make(pages=1, timeline=timeline)
    define(store, ["weights/0", "weights/1"])
    store.request([Request("job/weights/0", "write")]).result(SOON_S).release()
    store.request([Request("job/weights/1", "write")]).result(SOON_S).release()
    store.request([Request("job/weights/0", "read")]).result(SOON_S).release()
    spans = [(span.track, span.name, span.info["key"], span.info["bytes"]) for span in timeline.spans]
    assert ("disk write", "job/weights", "job/weights/0", P) in spans
    assert ("disk read", "job/weights", "job/weights/0", P) in spans


REFUSED = {
    "an unknown key": (
        lambda store: store.request([Request("job/x", "read")]),
        "there is no segment job/x",
    ),
    "more than memory": (
        lambda store: store.request([Request("job/a", "write"), Request("job/b", "write")]),
        r"2 segments with 24.00 KiB are needed at once, and the memory is 16.00 KiB",
    ),
    "a segment larger than memory": (
        lambda store: store.define(segment("job/c", pages=5)),
        "segment job/c has 20480 bytes, and the memory 16384",
    ),
    "half a page": (
        lambda store: store.define(Segment(key="job/c", nbytes=5000, persistent=True)),
        "segment job/c has 5000 bytes",
    ),
    "another segment of that name": (
        lambda store: store.define(segment("job/a", pages=2)),
        "segment job/a is known with 12288 bytes and 0 tensors, not with these 8192 bytes",
    ),
    "an unknown group": (lambda store: store.commit("nobody", {}), "there is no group nobody"),
    "a note that JSON has no words for": (
        lambda store: store.commit("job", {"a": object()}),
        "the note of a commit is not plain data",
    ),
    "dropping nothing": (lambda store: store.drop("job/x"), "there is no segment job/x"),
    "a group without a name": (lambda store: store.define(segment("/x")), "a group's name cannot be ''"),
    "over the budget": (
        lambda store: store.define(segment("job/c", pages=3)),
        r"segment job/c needs 24.00 KiB of disk, and 48.00 KiB of the 64.00 KiB in the budget are taken",
    ),
    "scratch over the budget": (
        lambda store: [
            store.define(segment("job/c", pages=3, persistent=False)),
            store.define(segment("job/d", pages=3, persistent=False)),
        ],
        r"segment job/d needs 12.00 KiB of disk, and 60.00 KiB of the 64.00 KiB in the budget are taken",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_at_once(make, case):
    store = make(pages=4, disk_bytes=16 * P)
    define(store, "ab", pages=3)
    call, message = REFUSED[case]
    with pytest.raises(UsageError, match=message) as caught:
        call(store)
    assert caught.value.setting
    assert caught.value.works
    write(store, a="a")
    assert read(store, "a") == "a"


def test_what_is_being_changed_cannot_be_committed_or_dropped(make):
    store = make()
    define(store, "a")
    with lease(store, a="write"):
        for call in (
            lambda: store.commit("job", {}),
            lambda: store.drop("job/a"),
            lambda: store.revert("job"),
        ):
            with pytest.raises(
                UsageError, match=r"while job/a is being changed|job/a cannot be dropped while"
            ):
                call()
    store.commit("job", {}).result(SOON_S)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_bytes": 1 << 50}, "1024.00 TiB of memory are asked for, and there are"),
        ({"memory_bytes": 100}, "100 bytes of memory hold no page"),
        ({"memory_bytes": -1}, "memory_bytes is -1"),
        ({"memory_bytes": P, "disk_bytes": 0}, "disk_bytes is 0"),
    ],
)
def test_impossible_budgets_are_refused_and_leave_nothing(tmp_path, options, message):
    with pytest.raises(UsageError, match=message):
        Store.create(tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be used: Not a directory"):
        Store.create(tmp_path / "file" / "store", memory_bytes=P)


def test_committed_state_is_not_overwritten(make):
    store = make()
    define(store, "a")
    write(store, a="a")
    store.commit("job", {}).result(SOON_S)
    store.close(keep=True)
    with pytest.raises(FileError, match="holds committed state of job, which would be lost"):
        make()
    with pytest.raises(UsageError, match=r"holds 8.00 KiB, and the budget is 4.00 KiB"):
        make(how=Store.open, disk_bytes=P)
    assert read(make(how=Store.open, disk_bytes=2 * P), "a") == "a"


def test_a_directory_is_for_one_store_at_a_time(make, tmp_path):
    store = make()
    with pytest.raises(UsageError, match=f"is in use by process {os.getpid()}"):
        make(how=Store.open)
    code = "import sys; from plait.spill.store import Store; Store.open(sys.argv[1], memory_bytes=4096)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "store")], capture_output=True, text=True, check=False
    )
    assert f"is in use by process {os.getpid()}" in done.stderr
    define(store, "a")
    write(store, a="a")


def test_many_requests_at_once_are_all_granted(make):
    store = make(pages=3)
    define(store, "abcdef")
    futures = [store.request([Request(f"job/{name}", "write")]) for name in "abcdef" * 3]
    for future in futures:
        future.add_done_callback(lambda done: done.result().release())
    assert not wait(futures, SOON_S).not_done
