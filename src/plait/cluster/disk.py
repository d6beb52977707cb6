"""How fast a directory's disk really is: direct I/O, past the page cache, and nothing left behind."""

from __future__ import annotations

import mmap
import os
import queue
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from plait import shared_memory
from plait.cluster.machine import disk_free_bytes, file_system
from plait.errors import UsageError
from plait.units import format_bytes

REQUEST_BYTES = 16 << 20
_PROBE_LEAST_BYTES = 1 << 20
_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True, kw_only=True)
class DiskSpeed:
    """Sequential bandwidth with requests of 16 MiB, or less where that had no room."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    """Of overwriting; the first write of a file also allocates and is slower."""
    direct: bool
    """False where the file system takes none, or is memory: the figures are then the page cache's."""


def measure_disk(directory: Path, *, size_bytes: int, at_once: int = 1) -> DiskSpeed:
    """Write and read back a file of about that size, which has no name and so cannot outlive the process.

    ``at_once`` requests are under way at a time; some disks are faster with several.
    """
    requests = size_bytes // REQUEST_BYTES
    free = disk_free_bytes(directory)
    if requests < 1 or free < 2 * size_bytes:
        raise UsageError(
            f"{format_bytes(size_bytes)} cannot be measured in {directory} with {format_bytes(free)} free",
            setting="disk_bytes, directory",
            works=f"at least {format_bytes(REQUEST_BYTES)}, and twice that free",
        )
    return _measured(directory, requests, REQUEST_BYTES, at_once)


def move_at_once(directory: Path, *, read_bytes: int, written_bytes: int, size_bytes: int = 1 << 30) -> float:
    """Seconds in which one reader and one writer, both at once, move so many bytes of a file of that size.

    A disk's two directions hinder each other, more or less: what it does of both together does not follow
    from what it does of each.
    """
    requests = size_bytes // REQUEST_BYTES
    fd, _ = _open(directory)
    with ExitStack() as stack:
        stack.callback(os.close, fd)
        buffers = [stack.enter_context(_buffer(REQUEST_BYTES)) for _ in range(2)]
        for number in range(requests):  # all of it, so that what is read is there
            _write(fd, buffers[0], number * REQUEST_BYTES)
        os.fsync(fd)
        pool = stack.enter_context(ThreadPoolExecutor(2))

        def all_of(move: Callable[[int, mmap.mmap, int], None], buffer: mmap.mmap, count_bytes: int) -> None:
            for number in range(-(-count_bytes // REQUEST_BYTES)):
                move(fd, buffer, number % requests * REQUEST_BYTES)

        start = time.perf_counter()
        moving = [
            pool.submit(all_of, _read, buffers[0], read_bytes),
            pool.submit(all_of, _write, buffers[1], written_bytes),
        ]
        for each in moving:
            each.result()
        return time.perf_counter() - start


def probe_disk(directory: Path, *, most_bytes: int) -> DiskSpeed | None:
    """The same with a smaller file where the disk has less room; None where it has next to none."""
    size = min(most_bytes, disk_free_bytes(directory) // 2)
    request = min(size, REQUEST_BYTES) // _PROBE_LEAST_BYTES * _PROBE_LEAST_BYTES
    return _measured(directory, size // request, request) if request else None


def _measured(directory: Path, requests: int, request_bytes: int, at_once: int = 1) -> DiskSpeed:
    fd, direct = _open(directory)
    with ExitStack() as stack:
        stack.callback(os.close, fd)
        buffers = queue.SimpleQueue[mmap.mmap]()
        for _ in range(at_once):
            buffer = stack.enter_context(_buffer(request_bytes))
            buffer[:] = os.urandom(1 << 20) * (request_bytes >> 20)  # a disk that compresses gains nothing
            buffers.put(buffer)
        pool = stack.enter_context(ThreadPoolExecutor(at_once))

        def seconds(request: Callable[[int, mmap.mmap, int], None]) -> float:
            def one(number: int) -> None:
                buffer = buffers.get()
                try:
                    request(fd, buffer, number * request_bytes)
                finally:
                    buffers.put(buffer)

            start = time.perf_counter()
            list(pool.map(one, range(requests)))
            os.fsync(fd)
            return time.perf_counter() - start

        seconds(_write)
        write_s = seconds(_write)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        read_s = seconds(_read)
    moved = requests * request_bytes
    return DiskSpeed(read_bytes_per_s=moved / read_s, write_bytes_per_s=moved / write_s, direct=direct)


def _buffer(nbytes: int) -> mmap.mmap:
    """Memory as spill moves it: the size of its pages is half of how fast a disk is."""
    fd = shared_memory.create("plait-measure")
    try:
        os.ftruncate(fd, nbytes)
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)


def _open(directory: Path) -> tuple[int, bool]:
    try:
        fd, name = tempfile.mkstemp(prefix=".plait-measure-", dir=directory)
    except OSError as error:
        raise UsageError(
            f"{directory} cannot be written: {error.strerror}", setting="directory", works="one of your own"
        ) from None
    try:
        if file_system(directory) in _IN_MEMORY:
            return fd, False
        try:
            other = os.open(name, os.O_RDWR | os.O_DIRECT)
        except OSError:
            return fd, False
        os.close(fd)
        return other, True
    finally:
        os.unlink(name)


def _write(fd: int, buffer: mmap.mmap, offset: int) -> None:
    done = 0
    with memoryview(buffer) as view:
        while done < len(buffer):
            done += os.pwrite(fd, view[done:], offset + done)


def _read(fd: int, buffer: mmap.mmap, offset: int) -> None:
    got = os.preadv(fd, [buffer], offset)
    assert got == len(buffer), f"read {got} of {len(buffer)} bytes that were written"
