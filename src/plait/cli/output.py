"""Standard output, whose errors are told from those of other files: a full disk, a pipe nobody reads."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from plait.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class OutputError(OSError):
    """Standard output cannot be written."""


class _Descriptor(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise  # known to all that print
        except OSError as error:
            raise OutputError(error.errno, error.strerror) from None


@contextmanager
def checked_output() -> Iterator[None]:
    """Raise an OutputError in this block, or at its end, when what is printed cannot be written."""
    before = sys.stdout
    if before is None:  # as after `>&-`; the next file to be opened would take its place
        raise UsageError(
            "standard output is closed", setting="standard output", works="a file, a pipe or /dev/null"
        )
    if before is not sys.__stdout__ or not isinstance(before, io.TextIOWrapper):  # someone else's already
        yield
        return
    raw = _Descriptor(before.fileno(), "w", closefd=False)
    output = io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=before.line_buffering,
    )
    sys.stdout = output
    try:
        yield
    finally:
        try:
            output.flush()
        except OSError:
            # What could not be written is still in the buffer; the interpreter would fail at it once more.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, raw.fileno())
            os.close(nowhere)
            raise
        finally:
            sys.stdout = before
