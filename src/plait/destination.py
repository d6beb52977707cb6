"""Where results go, tried before the work: hours of it must not end at a file that cannot be written."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from plait.errors import FileError

_BLOCK = bytes(4096)


def check_file(path: Path, *, setting: str) -> None:
    """Raise unless a file can be written there; what stands in it stays, and what does not exist will not."""
    try:
        if not path.exists():
            target = path.resolve()  # a link may lead to what does not exist yet
            target.open("xb").close()
            target.unlink()
        elif path.is_file() or path.is_dir():
            path.open("ab").close()
        elif not os.access(path, os.W_OK):
            # A pipe or device is not opened: whoever reads the pipe would take that for all there is.
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise not_written(path, error, setting=setting) from None


def make_folder(path: Path, *, setting: str) -> None:
    """Make a folder where there is none, and raise unless files can be written into it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(_BLOCK)  # a full disk takes a file, but nothing in it
    except OSError as error:
        raise not_written(path, error, setting=setting) from None


def write_text(path: Path, text: str, *, setting: str) -> None:
    """Write a file, or raise with the reason why it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise not_written(path, error, setting=setting) from None


def not_written(path: Path, error: OSError, *, setting: str) -> FileError:
    """The error of a file or folder that cannot be written."""
    return FileError(
        f"{path} cannot be written: {error.strerror}",
        setting=setting,
        works="a path in a folder that exists and may be written, on a disk with room",
    )
