"""A state of tensors and plain values as files of torch's distributed checkpoint (DCP).

Each tensor is an entry under its place in the state, names joined by dots as DCP joins them, so that torch by
itself reads what it asks for::

    state = {"model": model.state_dict()}
    torch.distributed.checkpoint.load(state, checkpoint_id="runs/first/jobs/gpt/checkpoint")

All else is one entry, :data:`PLAIN`: the same state with a reference in the place of each tensor. From it the
state comes back as it was, tuples, whole numbers as keys and empty dictionaries too, which DCP does not keep.

Reading runs no code that a file asks for. torch reads tensors and plain values with ``weights_only=True``;
the table of contents (``.metadata``) is a pickle, in which only the classes that it is made of are allowed.
(torch's own reader allows any there.)
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

PLAIN = "plait"
"""The entry of all that is no tensor."""
CONTENTS = ".metadata"
"""The file with the table of contents."""
_METADATA = "torch.distributed.checkpoint.metadata"
# What torch 2.13 makes a table of contents of. Some of the names are private, but they are in its files.
_ALLOWED = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}


# --- writing ------------------------------------------------------------------------------------------


class _Hashed(io.RawIOBase):
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
        if not self._file.closed:
            self._file.flush()

    def tell(self) -> int:
        return self.size


class _Disk(FileSystem):
    """A file system that knows what was written to it."""

    def __init__(self) -> None:
        self.written: dict[str, _Hashed] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with open(path, mode) as file:
            stream = self.written[Path(path).name] = _Hashed(file)  # type: ignore[arg-type]
            yield stream
            file.flush()
            os.fsync(file.fileno())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


def write(folder: Path, state: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """Write a state into an empty folder, down to the disk; by file, its size and checksum (SHA-256)."""
    tensors: dict[str, Any] = {}
    tree = _taken_apart(state, (), tensors, {})
    writer = FileSystemWriter(folder, sync_files=False)  # it would do so before what is buffered is out
    disk = writer.fs = _Disk()
    with _alone():
        try:
            save({**tensors, PLAIN: tree}, storage_writer=writer, no_dist=True)
        except CheckpointException as error:
            # Where the disk is full, torch complains of its archive's size, which hides the cause.
            _raise(error, next((file.error for file in disk.written.values() if file.error), None))
    return {name: (file.size, file.digest.hexdigest()) for name, file in sorted(disk.written.items())}


def _taken_apart(
    value: Any, place: tuple[str, ...], tensors: dict[str, Any], seen: dict[tuple[object, ...], str]
) -> tuple[Any, ...]:
    """A value with references for its tensors, which are put into ``tensors`` at their places.

    A tensor that is there twice is an entry twice, as torch asks for it by either name; it comes back as one.
    """
    if isinstance(value, torch.Tensor):
        name = ".".join(place)
        inner = tensors
        for step in place[:-1]:
            inner = inner.setdefault(step, {})
        if place[-1] in inner:
            raise ValueError(f"two tensors of the state are called {name}")
        inner[place[-1]] = value
        stride = torch.empty_like(value, device="meta", memory_format=torch.preserve_format).stride()
        same = (value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        return ("tensor", seen.setdefault(same, name) if value.numel() else name, tuple(stride))
    if not _has_tensors(value):
        return ("value", value)
    if isinstance(value, Mapping):
        parts = [(key, _taken_apart(part, (*place, str(key)), tensors, seen)) for key, part in value.items()]
        kind = "ordered" if isinstance(value, OrderedDict) else "dict"
        return (kind, parts, dict(vars(value)) if isinstance(value, OrderedDict) else {})
    parts = [_taken_apart(part, (*place, str(at)), tensors, seen) for at, part in enumerate(value)]
    return ("tuple" if isinstance(value, tuple) else "list", parts)


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return isinstance(value, torch.Tensor)
    return any(_has_tensors(part) for part in value)


# --- reading ------------------------------------------------------------------------------------------


class _Contents(pickle.Unpickler):
    """Reads a table of contents, and nothing that would have code run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"its table of contents asks for {module}.{name}")


class _Reader(FileSystemReader):
    """torch's, with a table of contents that was read before."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with (folder / CONTENTS).open("rb") as file:
            self.contents: Metadata = _Contents(file).load()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.contents


class _Planner(DefaultLoadPlanner):
    """torch's, for entries by their names, and for plain values alone in what is no tensor."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def read(folder: Path, *, device: Any) -> Any:
    """The state in a folder, its tensors on a device."""
    reader = _Reader(folder)
    found: dict[str, Any] = {PLAIN: None}
    _load(found, reader)
    tree = found[PLAIN]
    known = reader.contents.state_dict_metadata
    entries = {
        name: torch.empty_strided(known[name].size, stride, dtype=known[name].properties.dtype, device=device)  # type: ignore[union-attr]
        for name, stride in _references(tree)
    }
    if entries:
        _load(entries, reader)
    return _put_together(tree, entries)


def _load(entries: dict[str, Any], reader: _Reader) -> None:
    with _alone():
        try:
            load(entries, storage_reader=reader, planner=_Planner(), no_dist=True)
        except CheckpointException as error:
            _raise(error)


def _references(tree: tuple[Any, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors that a tree names, each with how it lies in memory."""
    if tree[0] == "tensor":
        yield tree[1], tree[2]
    elif tree[0] != "value":
        for part in tree[1]:
            yield from _references(part[1] if tree[0] in ("dict", "ordered") else part)


def _put_together(tree: tuple[Any, ...], entries: Mapping[str, Any]) -> Any:
    """The value that was taken apart."""
    kind, parts = tree[:2]
    if kind == "tensor":
        return entries[parts]
    if kind == "value":
        return parts
    if kind in ("dict", "ordered"):
        made: dict[Any, Any] = OrderedDict() if kind == "ordered" else {}
        made.update((key, _put_together(part, entries)) for key, part in parts)
        if kind == "ordered":
            vars(made).update(tree[2])  # such as the versions of a model's modules
        return made
    values = [_put_together(part, entries) for part in parts]
    return tuple(values) if kind == "tuple" else values


# --- both ---------------------------------------------------------------------------------------------


@contextmanager
def _alone() -> Iterator[None]:
    """This process reads or writes all of it by itself, and need not be told so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _raise(error: CheckpointException, known: BaseException | None = None) -> NoReturn:
    """What really happened, in place of a report of all ranks that is no Exception."""
    causes = [cause for cause, _ in error.failures.values()]
    raise known or causes[0] from None
