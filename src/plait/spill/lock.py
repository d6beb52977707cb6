"""A directory's lock: one process at a time, and the next one learns who has it."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from plait.errors import UsageError


class Lock:
    """A locked file, until :meth:`release`; where a process is killed, the lock goes with it."""

    def __init__(self, path: Path) -> None:
        """Take the lock, or raise with who has it."""
        self._path = path
        self._fd = _locked(path)

    def release(self) -> None:
        """Let the next one in."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def _locked(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(fd, 100, 0).decode(errors="replace").strip() or "another process"
            os.close(fd)
            raise UsageError(
                f"{path.parent} is in use by {owner}",
                setting="directory",
                works="another directory, or wait until that run has ended",
            ) from None
        # The one before may have removed the file between our opening and locking it.
        with suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                os.ftruncate(fd, 0)
                with suppress(OSError):  # a full disk; who has it is only good to know
                    os.pwrite(fd, f"process {os.getpid()}\n".encode(), 0)
                return fd
        os.close(fd)
