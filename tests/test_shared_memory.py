"""Memory that processes share: large pages where that is allowed, and memory all the same where it is not."""

import mmap
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from plait import shared_memory

SIZE = (6 << 20) + 3 * mmap.PAGESIZE
SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")
SETTING, LARGE = SYSTEM / "shmem_enabled", SYSTEM / "hpage_pmd_size"
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
            try:
                with mmap.mmap(fd, SIZE) as theirs:
                    theirs[-5:] = b"there"
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert ours[-5:] == b"there"
        assert ours[: SIZE - 5].count(0) == SIZE - 5
        ours[:] = b"x" * SIZE
        if (
            SETTING.exists() and "[never]" in SETTING.read_text()
        ):  # else all of the system may be in large pages
            assert os.fstat(fd).st_blocks * 512 == SIZE  # these reach no further than what was asked for
    assert os.fstat(fd).st_nlink == 0
    assert not os.get_inheritable(fd)
    os.close(fd)
    assert mounts() == before


@pytest.mark.parametrize("way", WAYS)
def test_the_file_is_mapped_in_large_pages(way):
    if not LARGE.exists() or "[deny]" in SETTING.read_text():
        pytest.skip("the kernel has no large pages for shared memory")
    fd, large = made(way), int(LARGE.read_text())
    os.ftruncate(fd, 4 * large)
    with mmap.mmap(fd, 4 * large) as memory:
        memory[:] = bytes(4 * large)
        rows = Path("/proc/self/smaps").read_text().split("\nVmFlags")
        mapped = [row for row in rows if "(deleted)" in row and "ShmemPmdMapped:        0 kB" not in row]
        assert any("ShmemPmdMapped:" in row for row in mapped)  # how many, memory in pieces may decide
    os.close(fd)


@pytest.fixture
def tried_anew():
    """What is allowed is asked again, before and after."""
    shared_memory._way.cache_clear()
    yield
    shared_memory._way.cache_clear()


def test_the_size_of_pages_is_found_by_writing(tried_anew, monkeypatch):
    assert shared_memory.page_bytes() >= mmap.PAGESIZE
    shared_memory._way.cache_clear()
    monkeypatch.setattr(shared_memory, "_on_a_mount", refusing)
    monkeypatch.setattr(shared_memory, "_in_a_namespace", refusing)
    fd = shared_memory.create("plait-test")
    os.ftruncate(fd, 1 << 20)
    os.pwrite(fd, b"x", 0)
    assert shared_memory.page_bytes() == os.fstat(fd).st_blocks * 512
    os.close(fd)


def refusing():
    raise PermissionError


class Refusing:
    """A system that knows no such calls."""

    restype = None

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, *arguments):
        self.calls.append(arguments)
        return -1


@pytest.mark.parametrize(
    ("capable", "executable"), [(True, "/bin/false"), (False, "/bin/false"), (False, None)]
)
def test_where_it_is_not_allowed_pages_are_small(tried_anew, monkeypatch, capable, executable):
    calls = []

    monkeypatch.setattr(
        shared_memory.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(syscall=Refusing(calls))
    )
    monkeypatch.setattr(shared_memory, "_may_mount", lambda: capable)
    monkeypatch.setattr(shared_memory.sys, "executable", executable)
    for _ in range(2):
        fd = shared_memory.create("plait-test")
        assert "memfd:plait-test" in os.readlink(f"/proc/self/fd/{fd}")
        os.close(fd)
    assert len(calls) == capable  # once, and without the right not at all
