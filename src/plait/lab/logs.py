"""What workers say, kept in files: one a worker, line by line as it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from io import FileIO
from pathlib import Path

from plait.destination import make_folder, not_written


def open_logs(folder: Path, names: Sequence[str], stack: ExitStack) -> list[Callable[[str], None]]:
    """Functions that write a line each into the file of its name, until the stack is left."""
    make_folder(folder, setting="logs")
    writers: list[Callable[[str], None]] = []
    for name in names:
        path = folder / f"{name}.log"
        try:
            # Without a buffer a line is there at once, and closing has nothing left that could fail.
            file = stack.enter_context(FileIO(path, "w"))
        except OSError as error:
            raise not_written(path, error, setting="logs") from None
        writers.append(partial(_write, file, path))
    return writers


def _write(file: FileIO, path: Path, line: str) -> None:
    left = line.encode() + b"\n"
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        raise not_written(path, error, setting="logs") from None
