"""Lines of JSON in a file: appended whole, and read as far as they are whole.

A line goes to the kernel in one write at the file's end, so whoever reads meanwhile, and a process that is
killed, see whole lines. What a crash of the machine or a full disk cut short is skipped by the reader, and
the next line begins on a line of its own.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from plait.destination import not_written


class Journal:
    """A file that lines are added to; threads may do so at the same time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._adding = threading.Lock()
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise not_written(path, error, setting="directory") from None
        size = os.fstat(self._fd).st_size
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a line; a number that is not finite becomes null."""
        line = json.dumps(plain(row), separators=(",", ":"), allow_nan=False).encode() + b"\n"
        with self._adding:
            whole = b"\n" + line if self._torn else line
            try:
                written = os.write(self._fd, whole)
                self._torn = self._torn if not written else whole[written - 1 : written] != b"\n"
                if written < len(whole):  # the disk is full now; the next write says so
                    os.write(self._fd, whole[written:])
                    self._torn = False
            except OSError as error:
                raise not_written(self._path, error, setting="directory") from None

    def close(self) -> None:
        """Add no more."""
        os.close(self._fd)


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file in order; none where there is no file, and without those that are not whole."""
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    row = json.loads(line, parse_constant=lambda name: None)
                except (ValueError, RecursionError):
                    continue
                if isinstance(row, dict):
                    yield row
    except FileNotFoundError:
        return


def plain(value: Any) -> Any:
    """As JSON holds it: numbers that are not finite are null, and what JSON does not know is text."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(part) for part in value]
    if getattr(value, "ndim", None) == 0 and hasattr(
        value, "item"
    ):  # a number of numpy's, or a tensor of one
        return plain(value.item())
    return str(value)
