"""Memory that processes share: large pages where that is allowed, and memory all the same where it is not."""

import ctypes
import mmap
import os
import subprocess
from pathlib import Path

import pytest

from plait import shared_memory

SIZE = (6 << 20) + 3 * mmap.PAGESIZE
WAYS = [shared_memory._on_a_mount, shared_memory._in_a_namespace]


def made(way):
    try:
        return way()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not allowed here: {error}")


def mounts():
    return Path("/proc/self/mountinfo").read_text()


@pytest.mark.parametrize("way", [*WAYS, lambda: shared_memory.create("plait-test")])
def test_processes_see_what_others_write_and_nothing_is_left(way):
    before = mounts()
    fd = made(way)
    os.ftruncate(fd, SIZE)
    with mmap.mmap(fd, SIZE) as ours:
        child = os.fork()
        if child == 0:
            with mmap.mmap(fd, SIZE) as theirs:
                theirs[-5:] = b"there"
            os._exit(0)
        os.waitpid(child, 0)
        assert ours[-5:] == b"there"
        assert ours[: SIZE - 5].count(0) == SIZE - 5
        ours[:] = b"x" * SIZE
        assert os.fstat(fd).st_blocks * 512 == SIZE  # large pages take no more than was asked for
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)
    assert mounts() == before


@pytest.mark.parametrize("way", WAYS)
def test_the_file_is_mapped_in_large_pages(way):
    size = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
    if not size.exists():
        pytest.skip("the kernel has no large pages")
    fd, large = made(way), int(size.read_text())
    os.ftruncate(fd, 4 * large)
    with mmap.mmap(fd, 4 * large) as memory:
        memory[:] = bytes(4 * large)
        rows = Path("/proc/self/smaps").read_text().split("\nVmFlags")
        size = f"{4 * large // 1024:8} kB\n"
        assert [row for row in rows if "(deleted)" in row and f"ShmemPmdMapped: {size}" in row]
    os.close(fd)


def refused(*_):
    ctypes.set_errno(1)
    return -1


class Library:
    """A C library without what mounting takes, or with a system that forbids it."""

    def __init__(self, *names):
        for name in names:
            setattr(self, name, refused)


@pytest.mark.parametrize("library", [Library(), Library("fsopen")])
def test_where_it_is_not_allowed_pages_are_small(library, monkeypatch):
    monkeypatch.setattr(shared_memory.ctypes, "CDLL", lambda *_, **__: library)
    monkeypatch.setattr(shared_memory.sys, "executable", "/bin/false")
    fd = shared_memory.create("plait-test")
    assert "memfd:plait-test" in os.readlink(f"/proc/self/fd/{fd}")
    os.close(fd)
