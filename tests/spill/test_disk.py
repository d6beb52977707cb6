"""Files of segments: past the page cache, with checksums, and with errors that name the place."""

import ctypes
import errno
import mmap
import os
import subprocess
import sys
import threading

import pytest

from plait import native
from plait.errors import FileError, UsageError
from plait.spill.disk import BLOCK_BYTES, Disk, SegmentFile, blocks, takes_direct
from plait.spill.segment import PAGE_BYTES, Request, Segment
from plait.spill.store import Store

P = PAGE_BYTES
SOON_S = 30


@pytest.fixture
def block():
    """Two pages of memory that begin on a page."""
    with mmap.mmap(-1, 2 * P) as memory:
        memory[:] = os.urandom(2 * P)
        with memoryview(memory) as view:
            yield view


@pytest.fixture(params=["disk", "memory"])
def directory(request, tmp_path):
    """On a disk, and on a file system in memory, which takes no direct I/O."""
    if request.param == "disk":
        yield tmp_path
        return
    path = tmp_path / "memory"
    with mounted(path, "16m"):
        yield path


class mounted:
    """A small file system in memory."""

    def __init__(self, path, size):
        self.path, self.size = path, size

    def __enter__(self):
        self.path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={self.size}", "plait-test", str(self.path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        return self.path

    def __exit__(self, *_):
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)


def resident_pages(path):
    """How many pages of a file are in the page cache."""
    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as memory:
        vector = (ctypes.c_ubyte * (size // P))()
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), vector) == 0
        return sum(value & 1 for value in vector)


def test_blocks_cover_a_segment():
    assert list(blocks(P)) == [(0, P)]
    assert list(blocks(2 * BLOCK_BYTES + P)) == [
        (0, BLOCK_BYTES),
        (BLOCK_BYTES, BLOCK_BYTES),
        (2 * BLOCK_BYTES, P),
    ]


@pytest.mark.parametrize("named", [True, False])
def test_what_is_written_is_read(directory, block, named):
    file = SegmentFile(directory / "x.segments", direct=takes_direct(directory), named=named)
    content = bytes(block)
    first, second = file.reserve(2 * P), file.reserve(2 * P)
    assert {first, second} == {0, 2 * P}
    checksum = file.write(second, block)
    assert checksum == native.checksum(content)
    block[:] = bytes(2 * P)
    file.read(second, block, checksum)
    assert bytes(block) == content
    assert os.path.exists(directory / "x.segments") == named
    other = file.duplicate()
    file.remove()
    block[:] = bytes(2 * P)
    other.read(second, block, checksum)
    assert bytes(block) == content
    other.close()
    assert os.listdir(directory) == []


@pytest.mark.parametrize("direct", [True, False])
def test_nothing_stays_in_the_page_cache(tmp_path, block, direct):
    if direct and not takes_direct(tmp_path):
        pytest.skip("the disk takes no direct I/O")
    file = SegmentFile(tmp_path / "x.segments", direct=direct)
    checksum = file.write(file.reserve(2 * P), block)
    assert resident_pages(file.path) == 0
    file.read(0, block, checksum)
    assert resident_pages(file.path) == 0
    file.remove()


def test_memory_takes_no_direct_writes_and_this_disk_does(tmp_path):
    with mounted(tmp_path / "memory", "1m") as path:
        assert not takes_direct(path)
    fd = os.open(tmp_path, os.O_RDWR | os.O_TMPFILE)
    os.close(fd)
    assert takes_direct(tmp_path)
    assert os.listdir(tmp_path) == ["memory"]


def test_room_is_given_back_and_used_again(tmp_path, block):
    file = SegmentFile(tmp_path / "x.segments", direct=takes_direct(tmp_path))
    places = [file.reserve(2 * P) for _ in range(3)]
    assert (file.reserved_bytes, file.held_bytes) == (6 * P, 6 * P)
    file.release(places[1], 2 * P)
    assert (file.reserved_bytes, file.held_bytes) == (4 * P, 4 * P)
    assert file.reserve(P) == places[1]
    file.forget()
    file.claim(places[2], 2 * P)
    assert file.reserved_bytes == 2 * P
    file.remove()


def test_a_damaged_or_short_block_names_file_and_place(tmp_path, block):
    file = SegmentFile(tmp_path / "x.segments", direct=takes_direct(tmp_path))
    file.reserve(4 * P)
    checksum = file.write(2 * P, block)
    with (tmp_path / "x.segments").open("r+b") as raw:
        raw.seek(3 * P)
        byte = raw.read(1)
        raw.seek(3 * P)
        raw.write(bytes([byte[0] ^ 4]))
    found = f"{checksum:08x}"
    with pytest.raises(
        FileError, match=rf"x\.segments is damaged: the 8192 bytes from byte 8192 .* not {found}"
    ):
        file.read(2 * P, block, checksum)
    os.truncate(tmp_path / "x.segments", 3 * P)
    with pytest.raises(FileError, match=r"ends at byte 12288: of the block at byte 8192, 4096 of 8192 bytes"):
        file.read(2 * P, block, checksum)
    with pytest.raises(FileError, match="holds 12288 of at least 16384 bytes: it was cut short"):
        file.check_size(4 * P)
    file.remove()


def test_a_disk_that_does_not_answer_is_reported(tmp_path, block):
    file = SegmentFile(tmp_path / "x.segments", direct=takes_direct(tmp_path))
    file.reserve(2 * P)
    other = SegmentFile(tmp_path / "y.segments", direct=False)
    os.dup2(os.open("/dev/full", os.O_RDWR), other._fd)
    with pytest.raises(
        FileError, match=r"8\.00 KiB at byte 0 of .*y\.segments cannot be written: No space left"
    ) as caught:
        other.write(0, block)
    assert "free room on that disk" in caught.value.works
    read_end, write_end = os.pipe()
    os.dup2(read_end, file._fd)
    for end in (read_end, write_end):
        os.close(end)
    for call in (lambda: file.read(0, block, 0), lambda: file.write(0, block), file.sync):
        with pytest.raises(
            FileError, match=r"x\.segments cannot be (read|written|flushed).*nothing that was committed"
        ):
            call()
    assert file.failed is not None


def test_a_lock_whose_file_was_removed_is_not_one(tmp_path):
    first = Disk(tmp_path / "d", budget_bytes=None)
    with pytest.raises(UsageError, match=f"is in use by process {os.getpid()}"):
        Disk(tmp_path / "d", budget_bytes=None)
    first.close()
    assert not (tmp_path / "d").exists()
    (tmp_path / "kept").mkdir()
    Disk(tmp_path / "kept", budget_bytes=None).close()
    assert (tmp_path / "kept").exists()


def store_on(path, pages=4, how=Store.create):
    return how(path / "store", memory_bytes=pages * P)


def fill(store, key, letter, mode="write"):
    with store.request([Request(key, mode)]).result(SOON_S) as held:
        at = held.places[key]
        store.memory[at : at + P] = letter * P


def held_letter(store, key):
    with store.request([Request(key, "read")]).result(SOON_S) as held:
        at = held.places[key]
        return bytes(store.memory[at : at + 1])


def stuff(path):
    """Fill a file system to its last byte."""
    with (path / "stuffing").open("wb") as file:
        size = 1 << 20
        while size:
            try:
                os.write(file.fileno(), bytes(size))
            except OSError:
                size //= 2


def test_a_disk_that_is_too_small_is_refused_before_work_starts(tmp_path):
    with mounted(tmp_path / "small", "1m") as path:
        store = store_on(path, pages=200)
        with pytest.raises(UsageError, match=r"segment job/a needs 1\.56 MiB of disk .* has .* free"):
            store.define(Segment(key="job/a", nbytes=200 * P, persistent=True))
        store.define(Segment(key="job/a", nbytes=200 * P, persistent=False))
        with pytest.raises(
            UsageError, match=r"needs 800\.00 KiB of disk beside 800\.00 KiB promised already"
        ):
            store.define(Segment(key="job/b", nbytes=200 * P, persistent=False))
        store.close(keep=False)


def test_room_that_was_promised_is_there_on_a_full_disk(tmp_path):
    with mounted(tmp_path / "small", "1m") as path:
        store = store_on(path, pages=2)
        for i in range(6):
            store.define(Segment(key=f"job/{i}", nbytes=P, persistent=True))
        stuff(path)
        for i in range(6):
            fill(store, f"job/{i}", b"%d" % i)
        assert [held_letter(store, f"job/{i}") for i in range(6)] == [b"%d" % i for i in range(6)]
        store.close(keep=False)


def test_a_disk_that_fills_up_loses_nothing(tmp_path):
    with mounted(tmp_path / "small", "1m") as path:
        store = store_on(path, pages=2)
        store.define(Segment(key="job/kept", nbytes=P, persistent=True))
        fill(store, "job/kept", b"k")
        store.commit("job", {"step": 1}).result(SOON_S)
        for name in "abc":
            store.define(Segment(key=f"job/{name}", nbytes=P, persistent=False))
        stuff(path)
        fill(store, "job/a", b"a")
        fill(store, "job/b", b"b")
        futures = [store.request([Request("job/c", "write")]) for _ in range(3)]
        for future in futures:
            with pytest.raises(FileError, match=r"cannot grow by 4\.00 KiB: No space left on device"):
                future.result(SOON_S).release()
        assert held_letter(store, "job/a") + held_letter(store, "job/b") == b"ab"
        with pytest.raises(FileError, match="the commit before it is untouched"):
            store.commit("job", {"step": 2}).result(SOON_S)
        assert store.committed("job") == {"step": 1}
        (path / "stuffing").unlink()
        fill(store, "job/c", b"c")
        assert b"".join(held_letter(store, f"job/{name}") for name in "abc") == b"abc"
        store.commit("job", {"step": 3}).result(SOON_S)
        store.close(keep=True)
        assert sorted(os.listdir(path / "store")) == ["job.manifest", "job.segments"]
        again = store_on(path, how=Store.open)
        assert again.committed("job") == {"step": 3}
        assert held_letter(again, "job/kept") == b"k"
        again.close(keep=False)


@pytest.fixture
def kept(tmp_path):
    """A directory with a commit of segments a and b, and where each of them is in the file."""
    store = store_on(tmp_path)
    for name in "ab":
        store.define(Segment(key=f"job/{name}", nbytes=P, persistent=True))
        fill(store, f"job/{name}", name.encode())
    store.commit("job", {}).result(SOON_S)
    places = {h.segment.key: h.slots[h.committed.slot] for h in store._catalogue.holdings.values()}
    store.close(keep=True)
    return tmp_path / "store", places


def test_a_damaged_segment_hurts_no_other(kept):
    directory, places = kept
    with (directory / "job.segments").open("r+b") as file:
        file.seek(places["job/a"] + 100)
        file.write(b"!")
    store = store_on(directory.parent, how=Store.open)
    store.expect([[Request("job/a", "read")]])
    for _ in range(2):
        with pytest.raises(FileError, match=rf"job\.segments is damaged: .* from byte {places['job/a']}"):
            held_letter(store, "job/a")
        with pytest.raises(FileError, match="is damaged"):
            list(store.stream("job/a"))
    both = store.request([Request("job/b", "write"), Request("job/a", "read")])
    with pytest.raises(FileError, match="is damaged"):
        both.result(SOON_S)
    assert held_letter(store, "job/b") == b"b"
    fill(store, "job/a", b"A")
    store.commit("job", {}).result(SOON_S)
    store.close(keep=True)
    again = store_on(directory.parent, how=Store.open)
    assert held_letter(again, "job/a") + held_letter(again, "job/b") == b"Ab"
    again.close(keep=False)


def test_files_that_are_cut_short_missing_or_damaged_are_refused(kept):
    directory, _ = kept
    names = ["job.manifest", "job.segments"]
    manifest, segments = ((directory / name).read_bytes() for name in names)
    (directory / "job.segments").write_bytes(segments[:-P])
    with pytest.raises(FileError, match=r"job\.segments holds 12288 of at least 16384 bytes"):
        store_on(directory.parent, how=Store.open)
    (directory / "job.segments").unlink()
    with pytest.raises(
        FileError, match=r"job\.segments, which holds the segments of group 'job', is missing"
    ):
        store_on(directory.parent, how=Store.open)
    (directory / "job.segments").write_bytes(segments)
    (directory / "job.manifest").write_bytes(manifest[:-20])
    with pytest.raises(FileError, match=r"job\.manifest is not a manifest"):
        store_on(directory.parent, how=Store.open)
    assert sorted(os.listdir(directory)) == names, "what is damaged is left for whoever can mend it"
    (directory / "job.manifest").write_bytes(manifest)
    store = store_on(directory.parent, how=Store.open)
    assert held_letter(store, "job/a") == b"a"
    store.close(keep=False)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("plait")]


def test_what_killed_runs_left_is_cleared_away(kept):
    directory, _ = kept
    for name in ("gone.segments", "job.manifest.partial", ".scratch-x.partial", "notes.txt"):
        (directory / name).write_bytes(b"x")
    store = store_on(directory.parent, how=Store.open)
    assert sorted(os.listdir(directory)) == ["job.manifest", "job.segments", "notes.txt", "store.lock"]
    store.close(keep=False)
    assert os.listdir(directory) == ["notes.txt"]


def test_when_the_disk_cannot_say_what_it_has_nothing_more_is_written(kept, monkeypatch):
    """A flush that fails once may succeed the next time without having written anything: no second try."""
    directory, _ = kept
    store = store_on(directory.parent, how=Store.open)
    fill(store, "job/a", b"A")

    def fails(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(
            FileError, match=r"job\.segments cannot be flushed to the disk: Input/output error"
        ):
            store.commit("job", {"step": 2}).result(SOON_S)
    with pytest.raises(FileError, match="cannot be flushed"):
        store.commit("job", {"step": 2})
    store.revert("job")
    assert held_letter(store, "job/a") == b"a"
    assert store.committed("job") == {}
    fill(store, "job/a", b"B")
    store.commit("job", {"step": 3}).result(SOON_S)
    store.close(keep=False)


def test_python_that_ends_without_closing_ends(tmp_path):
    code = (
        "import sys; from plait.spill.store import Store;"
        "store = Store.create(sys.argv[1], memory_bytes=4096); print('made')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=True,
    )
    assert done.stdout == "made\n"
