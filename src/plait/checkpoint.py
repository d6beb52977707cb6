"""A training state in one file that is either whole or not there.

The file is written beside its place, flushed to the disk and renamed over it, so a crash at any moment
leaves the old one or the new one. A header of fixed length tells format, size and checksum of what
follows (torch's own serialisation of tensors and plain values), and reading checks all three.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from plait.errors import FileError, UsageError

FORMAT = "plait.checkpoint/1"
NAME = "checkpoint.plait"
"""What a checkpoint is called in its directory."""
_HEADER_BYTES = 256
_PIECE_BYTES = 1 << 22
_THERE = "a checkpoint's path; resume=True with a directory begins at step 0 where there is none yet"
_ANOTHER = "an earlier checkpoint, or start again without one"


class _Hashing:
    """A file that is only written to, and hashes what passes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.size += memoryview(data).nbytes
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def origin(*, resume: str | Path | bool | None, directory: str | Path | None, overwrite: bool) -> Path | None:
    """The checkpoint that a run goes on from, or None where it begins at step 0.

    ``resume`` is a checkpoint, a directory that holds one, or True for the one in ``directory`` where there
    is one. A checkpoint in ``directory`` that the run would replace without going on from it is refused,
    unless ``overwrite`` says so.
    """
    target = None if directory is None else Path(directory) / NAME
    if resume is True:
        if target is None or overwrite:
            why = (
                "has no directory to look in"
                if target is None
                else "and overwrite=True contradict each other"
            )
            raise UsageError(
                f"resume=True {why}",
                setting="resume",
                works="resume with a directory" if target is None else "one of the two",
            )
        return target if target.exists() else None
    source = None
    if resume is not None and resume is not False:
        source = Path(resume) / NAME if Path(resume).is_dir() else Path(resume)
    same = source is not None and target is not None and source.resolve() == target.resolve()
    if target is not None and target.exists() and not (same or overwrite):
        raise FileError(
            f"{target.parent} holds a checkpoint already, which this run would overwrite",
            setting="directory",
            works="'resume' to go on from it, 'overwrite' to begin again, or another directory",
        )
    return source


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a state of tensors and plain values, atomically and durably."""
    import torch

    with _replacing(path) as file:
        file.seek(_HEADER_BYTES)
        body = _Hashing(file)
        try:
            torch.save(state, body)  # type: ignore[arg-type]
        except RuntimeError as error:  # torch complains of its archive's size, which hides the cause
            raise body.error or error from None
        header = {"format": FORMAT, "bytes": body.size, "sha256": body.digest.hexdigest()}
        file.seek(0)
        file.write(json.dumps(header).encode().ljust(_HEADER_BYTES - 1) + b"\n")


def load(path: Path, *, device: Any = "cpu") -> dict[str, Any]:
    """Read a state back, its tensors on a device; a file that is not whole is named with what is wrong."""
    try:
        if not path.is_file():
            raise FileError(f"there is no checkpoint {path}", setting="resume", works=_THERE)
        with path.open("rb") as file:
            _check_body(file, _header(file.read(_HEADER_BYTES), path), path)
            file.seek(_HEADER_BYTES)
            return _state(file, path, device)
    except OSError as error:
        raise FileError(
            f"checkpoint {path} cannot be read: {error.strerror}", setting="resume", works=_ANOTHER
        ) from error


def _check_body(file: BinaryIO, header: dict[str, Any], path: Path) -> None:
    """Compare what follows the header with what the header says."""
    size = os.fstat(file.fileno()).st_size - _HEADER_BYTES
    if size != header["bytes"]:
        raise FileError(
            f"checkpoint {path} holds {size} of {header['bytes']} bytes", setting="resume", works=_ANOTHER
        )
    digest = hashlib.sha256()
    while piece := file.read(_PIECE_BYTES):
        digest.update(piece)
    if digest.hexdigest() != header["sha256"]:
        raise FileError(
            f"checkpoint {path} is damaged: the checksum of its {size} bytes is {digest.hexdigest()[:12]}"
            f"..., not {header['sha256'][:12]}...",
            setting="resume",
            works=_ANOTHER,
        )


def _state(file: BinaryIO, path: Path, device: Any) -> dict[str, Any]:
    """What torch reads from the rest of the file; its complaints are of many kinds."""
    import torch

    try:
        state = torch.load(file, map_location=device, weights_only=True)
    except OSError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise FileError(
            f"checkpoint {path} is whole, but torch cannot read it: {reason}",
            setting="resume",
            works=_ANOTHER,
        ) from error
    if not isinstance(state, dict):
        raise FileError(
            f"checkpoint {path} holds a {type(state).__name__}, not a state", setting="resume", works=_ANOTHER
        )
    return state


def _header(text: bytes, path: Path) -> dict[str, Any]:
    try:
        header = json.loads(text)
        found = header["format"]
    except (ValueError, TypeError, KeyError):
        found = None
    if found != FORMAT:
        what = "has no header of one" if found is None else f"has format {found!r}"
        raise FileError(
            f"{path} is not a checkpoint that plait reads: it {what}", setting="resume", works=FORMAT
        )
    for name, kind in (("bytes", int), ("sha256", str)):
        if type(header.get(name)) is not kind:
            what = f"is {header[name]!r}" if name in header else "is missing"
            raise FileError(
                f"checkpoint {path} is damaged: in its header, {name} {what}",
                setting="resume",
                works=_ANOTHER,
            )
    return header  # type: ignore[no-any-return]


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of ``path`` once it is whole and on the disk."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise FileError(
                f"checkpoint {path} cannot be written: {error.strerror}; what was there is untouched",
                setting="directory",
                works="a directory with room for the weights and the optimizer's state",
            ) from error
        raise
