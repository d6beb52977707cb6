"""Files of segments, read and written past the page cache, block by block, each with its checksum.

Every block goes straight between the disk and the arena. Where a file system takes no direct I/O, blocks go
through the page cache, which is told to let go of them at once, so that no memory beyond the arena stays
in use. A file keeps its room reserved: what was promised when a segment was defined is still there when it
is first written.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

from plait import native
from plait.cluster.machine import disk_free_bytes, file_system
from plait.errors import FileError, PlaitError, UsageError
from plait.spill.arena import Space
from plait.spill.lock import Lock
from plait.spill.segment import PAGE_BYTES, SHARED
from plait.units import format_bytes

BLOCK_BYTES = 16 << 20
"""What is read, written and checksummed at once."""
ENDING = ".manifest"
"""Of the file that says what a group has committed: without it, there is nothing."""
_LOCK = "store.lock"
_IN_MEMORY = ("tmpfs", "ramfs")
_ENDLESS_BYTES = 1 << 62
_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE of <linux/falloc.h>
_SAFE = "nothing that was committed is lost"


def blocks(nbytes: int) -> Iterator[tuple[int, int]]:
    """(offset, size) of each block of so many bytes."""
    for offset in range(0, nbytes, BLOCK_BYTES):
        yield offset, min(BLOCK_BYTES, nbytes - offset)


class SegmentFile:
    """A file in which segments have their room; any thread may read and write blocks."""

    def __init__(self, path: Path, *, direct: bool, named: bool = True) -> None:
        """Open or create it; without a name it goes with the process, however that ends."""
        self.path = path
        self._direct = direct
        self._named = named
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        try:
            if named:
                self._fd = os.open(path, flags | os.O_CREAT, 0o600)
            else:
                self._fd = _unnamed(path.parent, flags)
        except OSError as error:
            raise _failed(f"{path} cannot be opened", error) from None
        self._extents = Space(_ENDLESS_BYTES)
        self.failed: PlaitError | None = None
        """Why nobody knows what of it is on the disk; it is then not written any more."""

    @property
    def reserved_bytes(self) -> int:
        """The room that segments have in it."""
        return self._extents.used_bytes

    @property
    def held_bytes(self) -> int:
        """What it takes on the disk."""
        return os.fstat(self._fd).st_blocks * 512

    def reserve(self, nbytes: int) -> int:
        """Room for a segment, that the disk has promised; returns where."""
        offset = self._extents.find(nbytes)
        assert offset is not None
        self.claim(offset, nbytes)
        return offset

    def claim(self, offset: int, nbytes: int) -> None:
        """The same at a place that is known; what stands there stays."""
        try:
            os.posix_fallocate(self._fd, offset, nbytes)
        except OSError as error:
            raise _failed(f"{self.path} cannot grow by {format_bytes(nbytes)}", error) from None
        self._extents.take(offset, nbytes)

    def release(self, offset: int, nbytes: int) -> None:
        """Give room back; the next segment may have it. A named file gives it back to the disk, too.

        One without a name keeps it: it holds what comes and goes at every step, and the first write to new
        room is slower than the next.
        """
        self._extents.free(offset, nbytes)
        if self._named:
            _libc().fallocate(self._fd, _PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(nbytes))

    def forget(self) -> None:
        """All of its room is free again; what was written in it stays until it is overwritten."""
        self._extents, self.failed = Space(_ENDLESS_BYTES), None

    def write(self, offset: int, block: memoryview) -> int:
        """Write a block and return its checksum."""
        checksum, done = native.checksum(block), 0
        try:
            while done < block.nbytes:
                done += os.pwrite(self._fd, block[done:], offset + done)
            if not self._direct:
                os.fdatasync(self._fd)  # pages that are not yet on the disk cannot be let go
                os.posix_fadvise(self._fd, offset, block.nbytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            what = f"{format_bytes(block.nbytes - done)} at byte {offset + done} of {self.path}"
            raise _failed(f"{what} cannot be written", error) from None
        return checksum

    def read(self, offset: int, block: memoryview, checksum: int) -> None:
        """Read a block and hold it against its checksum."""
        done = 0
        try:
            while done < block.nbytes:
                got = os.preadv(self._fd, [block[done:]], offset + done)
                if got == 0:
                    break
                done += got
            if not self._direct:
                os.posix_fadvise(self._fd, offset, block.nbytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            what = f"{format_bytes(block.nbytes - done)} at byte {offset + done} of {self.path}"
            raise _failed(f"{what} cannot be read", error) from None
        if done < block.nbytes:
            raise damaged(
                f"{self.path} ends at byte {offset + done}: of the block at byte {offset},"
                f" {done} of {block.nbytes} bytes are there",
                self.path,
            )
        found = native.checksum(block)
        if found != checksum:
            raise damaged(
                f"{self.path} is damaged: the {block.nbytes} bytes from byte {offset} have the checksum"
                f" {found:08x}, not {checksum:08x}",
                self.path,
            )

    def check_size(self, least_bytes: int) -> None:
        """Raise where the file is shorter than what it is said to hold."""
        size = os.fstat(self._fd).st_size
        if size < least_bytes:
            what = f"{self.path} holds {size} of at least {least_bytes} bytes: it was cut short"
            raise damaged(what, self.path)

    def sync(self) -> None:
        """Wait until the disk has all that was written, for good."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            self.failed = _failed(f"{self.path} cannot be flushed to the disk", error)
            raise self.failed from None

    def duplicate(self) -> SegmentFile:
        """The same file, open for reading also when this one is closed."""
        other = SegmentFile.__new__(SegmentFile)
        other.path, other._direct, other._named = self.path, self._direct, self._named
        other._fd, other._extents, other.failed = os.dup(self._fd), Space(0), None
        return other

    def close(self) -> None:
        """Close it; nobody may be reading or writing."""
        os.close(self._fd)

    def remove(self) -> None:
        """Close it and give all its room back to the disk."""
        if self._named:
            self.path.unlink(missing_ok=True)
        self.close()


class Disk:
    """A directory for one store at a time, with a budget."""

    def __init__(self, directory: Path, *, budget_bytes: int | None) -> None:
        self.directory = directory
        self._budget_bytes = budget_bytes
        try:
            self._made = not directory.exists()
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(directory / _LOCK)
        except OSError as error:
            raise UsageError(
                f"{directory} cannot be used: {error.strerror}", setting="directory", works="one of your own"
            ) from None
        self.direct = takes_direct(directory)

    def check_room(self, nbytes: int, *, reserved_bytes: int, promised_bytes: int, what: str) -> None:
        """Raise unless so much more fits into the budget and onto the disk.

        ``reserved_bytes`` are all that segments have been given so far, ``promised_bytes`` those of them that
        the disk does not know of yet.
        """
        budget = self._budget_bytes
        if budget is not None and reserved_bytes + nbytes > budget:
            raise UsageError(
                f"{what} needs {format_bytes(nbytes)} of disk, and {format_bytes(reserved_bytes)} of the"
                f" {format_bytes(budget)} in the budget are taken",
                setting="disk_bytes",
                works=f"{reserved_bytes + nbytes} or more",
            )
        free = disk_free_bytes(self.directory)
        if promised_bytes + nbytes > free:
            raise UsageError(
                f"{what} needs {format_bytes(nbytes)} of disk beside {format_bytes(promised_bytes)} promised"
                f" already, and {self.directory} has {format_bytes(free)} free",
                setting="directory",
                works=f"a disk with {format_bytes(promised_bytes + nbytes)} free",
            )

    def sync(self) -> None:
        """Wait until the disk has the names of all files, for good."""
        folder = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        """Let the next store in; a directory that was made for this one and is empty goes."""
        self._lock.release()
        if self._made:
            with suppress(OSError):
                self.directory.rmdir()


def takes_direct(directory: Path) -> bool:
    """Whether pages can be written past the page cache there; tried, since file systems only promise."""
    if file_system(directory) in _IN_MEMORY:
        return False
    try:
        fd = _unnamed(directory, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            return os.pwrite(fd, page, PAGE_BYTES) == PAGE_BYTES
    except OSError:
        return False
    finally:
        os.close(fd)


def damaged(what: str, path: Path) -> FileError:
    """The error of a group's file that does not hold what was written to it."""
    manifest = path.with_suffix(ENDING)
    if path.name.startswith(SHARED):
        again = f"delete all *{ENDING} in {path.parent}, and all jobs there begin again"
    else:
        again = f"delete {manifest}, and {unquote(manifest.stem)!r} alone begins again"
    return FileError(
        what, setting="directory", works=f"a copy of the whole directory from before; or {again}"
    )


def _failed(what: str, error: OSError) -> PlaitError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return FileError(
        f"{what}: {error.strerror}; {_SAFE}",
        setting="directory",
        works="free room on that disk and go on, or a directory on a larger one"
        if full
        else "a disk that takes and gives back what it is given",
    )


def _unnamed(directory: Path, flags: int) -> int:
    """A file that is gone when it is closed."""
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    handle, name = tempfile.mkstemp(prefix=".scratch-", suffix=".partial", dir=directory)
    try:
        return os.open(name, flags)
    finally:
        os.close(handle)
        os.unlink(name)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
