"""The store: what is written is read back, in little memory, in the order that is expected."""

import os
import subprocess
import sys

import pytest
from store_letters import SOON_S, P, define, lease, read, segment, until, write

from plait import Timeline
from plait.errors import UsageError
from plait.spill.segment import Request, Segment
from plait.spill.store import Store


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
