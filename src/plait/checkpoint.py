"""A training state in a folder that is either whole or not there: a distributed checkpoint of torch's.

    runs/first/jobs/gpt/checkpoint/
      .metadata  __0_0.distcp     as torch.distributed.checkpoint writes and reads them
      plait.json                  the format, and of each of these files its size and its checksum

The folder is written beside its place, flushed to the disk, and changes places with the one before (where the
file system cannot do that in one step: by two renames, between which the one before has another name). So a
crash at any moment leaves the old one or the new one. Reading checks sizes and checksums before anything
else. What the files hold, :mod:`plait.checkpoint_data` knows.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import CDLL
from pathlib import Path
from typing import Any

from plait.errors import FileError, UsageError

FORMAT = "plait.checkpoint/2"
NAME = "checkpoint"
"""What a checkpoint is called in its directory."""
MANIFEST = "plait.json"
"""In it: what its other files must be."""
_PIECE_BYTES = 1 << 22
_HERE, _EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE, from linux/fcntl.h and linux/fs.h."""
_TRIES = 3
"""How often reading begins again where a new one took the place of what was read."""
_THERE = "a checkpoint's path; resume=True with a directory begins at step 0 where there is none yet"
_ANOTHER = "an earlier checkpoint, or start again without one"


def find(path: str | Path) -> Path:
    """The checkpoint that a path means: the folder itself, or the one in it."""
    given = Path(path)
    is_one = any((given / name).exists() for name in (MANIFEST, ".metadata"))
    return given / NAME if given.is_dir() and not is_one else given


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
        return target if _standing(target).exists() else None
    source = None
    if resume is not None and resume is not False:
        source = find(resume)
    same = source is not None and target is not None and source.resolve() == target.resolve()
    if target is not None and _standing(target).exists() and not (same or overwrite):
        raise FileError(
            f"{target.parent} holds a checkpoint already, which this run would overwrite",
            setting="directory",
            works="'resume' to go on from it, 'overwrite' to begin again, or another directory",
        )
    return source


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a state of tensors and plain values, atomically and durably."""
    from plait.checkpoint_data import write

    with _replacing(path) as folder:
        files = {
            name: {"bytes": size, "sha256": digest} for name, (size, digest) in write(folder, state).items()
        }
        with (folder / MANIFEST).open("w") as file:
            file.write(json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())


def load(path: Path, *, device: Any = "cpu") -> dict[str, Any]:
    """Read a state back, its tensors on a device; what is not whole is named with what is wrong."""
    tries = _TRIES
    while True:
        folder = _standing(path)
        read, tries = _mark(folder), tries - 1
        try:
            return _checked(folder, path, device)
        except FileError:
            if not tries or _mark(_standing(path)) == read:
                raise  # it was not replaced meanwhile by whoever trains


def _checked(folder: Path, path: Path, device: Any) -> dict[str, Any]:
    """The state in a folder; errors name the path that was asked for."""
    try:
        if not folder.exists():
            raise FileError(f"there is no checkpoint {path}", setting="resume", works=_THERE)
        for name, found in _files(folder, path).items():
            _check_file(folder / name, found["bytes"], found["sha256"], path)
        return _state(folder, path, device)
    except OSError as error:
        raise FileError(
            f"checkpoint {path} cannot be read: {error.strerror}", setting="resume", works=_ANOTHER
        ) from error


def _files(folder: Path, path: Path) -> dict[str, dict[str, Any]]:
    """What the manifest says of the other files."""
    what = None
    try:
        found = json.loads((folder / MANIFEST).read_text())
        if found["format"] != FORMAT:
            what = f"has format {found['format']!r}"
    except (FileNotFoundError, NotADirectoryError):
        what = f"has no {MANIFEST}" if folder.is_dir() else "is a file, and a checkpoint is a folder"
    except (ValueError, TypeError, KeyError):
        what = f"has a {MANIFEST} that cannot be read"
    if what is not None:
        raise FileError(
            f"{path} is not a checkpoint that plait reads: it {what}", setting="resume", works=FORMAT
        )
    files = found.get("files")
    if not isinstance(files, dict) or ".metadata" not in files:
        raise _damaged(path, f"its {MANIFEST} names no files")
    for name, said in files.items():
        if Path(name).name != name:
            raise _damaged(path, f"its {MANIFEST} names {name!r}, which is elsewhere")
        for field, kind in (("bytes", int), ("sha256", str)):
            if not isinstance(said, dict) or type(said.get(field)) is not kind:
                raise _damaged(path, f"its {MANIFEST} does not say the {field} of {name}")
    return files


def _check_file(file: Path, size: int, checksum: str, path: Path) -> None:
    """Compare a file with what the manifest says."""
    if not file.is_file():
        raise _damaged(path, f"{file.name} is missing")
    has = file.stat().st_size
    if has != size:
        raise _damaged(path, f"{file.name} has {has} of {size} bytes")
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while piece := content.read(_PIECE_BYTES):
            digest.update(piece)
    if digest.hexdigest() != checksum:
        is_now = f"{digest.hexdigest()[:12]}..., not {checksum[:12]}..."
        raise _damaged(path, f"the checksum of {file.name}, {size} bytes, is {is_now}")


def _damaged(path: Path, what: str) -> FileError:
    return FileError(f"checkpoint {path} is damaged: {what}", setting="resume", works=_ANOTHER)


def _state(folder: Path, path: Path, device: Any) -> dict[str, Any]:
    """What torch reads from the files; its complaints are of many kinds."""
    from plait.checkpoint_data import read

    try:
        state = read(folder, device=device)
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


# --- its place ------------------------------------------------------------------------------------------


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f"{path.name}.{what}")


def _standing(path: Path) -> Path:
    """Where a checkpoint is: in its place, or, if whoever saved died between two renames, still beside it."""
    before = _beside(path, "before")
    return before if not path.exists() and before.exists() else path


def _mark(folder: Path) -> tuple[int, int] | None:
    """What tells a folder from another in the same place."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """An empty folder to write, which takes the place of ``path`` once what is in it is on the disk."""
    partial = _beside(path, "partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(partial)
        partial.mkdir()
        yield partial
        _flush(partial)
        before = _beside(path, "before")
        if not _exchange(partial, path):
            if path.exists():
                _remove(before)
                path.rename(before)
            partial.rename(path)
        _flush(path.parent)
        with suppress(OSError):  # the new one is in its place
            _remove(partial)
            _remove(before)
    except BaseException as error:
        with suppress(OSError):
            _remove(partial)
        if isinstance(error, OSError):
            raise FileError(
                f"checkpoint {path} cannot be written: {error.strerror}; what was there is untouched",
                setting="directory",
                works="a directory with room for the weights and the optimizer's state",
            ) from error
        raise


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change places in one step; False where one is not there, or the system cannot."""
    try:
        rename = CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    return bool(rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0)


def _remove(path: Path) -> None:
    """Remove what is there, if anything: a folder, or a file of an earlier version."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
