"""Trained weights as a safetensors file, without the model ever being whole in memory, nor twice on the disk.

A segment is streamed into the file, the file flushed, and the segment dropped with a commit that notes it;
then the next one. So the disk holds one segment twice at most. Killed at any moment, the same call goes on
where the last commit left it: what that notes as done is in the file, what it does not is still in the store.

The names are those of the model's ``state_dict``. A tied weight is there once, under its first name, with the
others in the file's metadata, as ``safetensors.torch.save_model`` writes and ``load_model`` reads it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from plait.errors import FileError
from plait.spill.description import Buffer, Description, Parameter
from plait.spill.homes import Home, Plan, homes
from plait.spill.segment import Request, Segment
from plait.spill.store import Store

_TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint16": "U16", "uint32": "U32",
    "uint64": "U64", "complex64": "C64",
}  # fmt: skip


@dataclass(frozen=True)
class _Saved:
    """A tensor that goes into the file."""

    tensor: Parameter | Buffer
    home: Home
    offset: int
    """Bytes from the file's start."""


class _Layout:
    """What the file holds, and where."""

    def __init__(self, description: Description, plan: Plan) -> None:
        self.homes = homes(description, plan)
        kept: list[tuple[Parameter | Buffer, Home]] = []
        kept += [(p, self.homes.parameters[p.name]) for p in description.parameters]
        kept += [(b, self.homes.buffers[b.name]) for b in description.buffers if b.saved]
        table: dict[str, Any] = {"__metadata__": {"format": "pt", **dict(description.aliases)}}
        at = 0
        for tensor, _ in kept:
            ends = [at, at + tensor.nbytes]
            table[tensor.name] = {"dtype": _TYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": ends}
            at = ends[1]
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.nbytes = len(self.header) + at
        self.saved = [_Saved(t, h, len(self.header) + table[t.name]["data_offsets"][0]) for t, h in kept]

    def segments(self) -> list[Segment]:
        """Those that hold something of the file, in order."""
        keys = {saved.home.key for saved in self.saved}
        return [segment for segment in self.homes.persistent if segment.key in keys]


def export(
    store: Store, description: Description, plan: Plan, path: str | Path, *, move: bool = True
) -> Path:
    """Write the weights of a job whose last commit is its result; with ``move`` the store gives them up.

    Nothing of the job is left in the store then. What several jobs share is copied.
    """
    file, layout = Path(path), _Layout(description, plan)
    note = dict(store.committed(description.job) or {})
    progress: dict[str, Any] = note.get("export", {"done": []})
    done: list[str] = list(progress["done"])
    if "renamed" not in progress:
        partial = file.with_name(file.name + ".partial")
        _begin(partial, layout, resumed=bool(done))
        moments = [segment.key for segment in store.segments(description.job) if "/moments" in segment.key]
        if move and moments:  # their room comes first
            for key in moments:
                store.drop(key)
            store.commit(description.job, {**note, "export": {"done": done}}).result()
        for segment in layout.segments():
            if segment.key in done:
                continue
            _copy(store, layout, segment, partial)
            done.append(segment.key)
            if move:
                if segment.group == description.job:
                    store.drop(segment.key)
                store.commit(description.job, {**note, "export": {"done": done}}).result()
        _finish(partial, file)
        if move:
            store.commit(description.job, {**note, "export": {"done": done, "renamed": True}}).result()
    if move:
        store.drop_group(description.job)
    return file


def is_exporting(note: Mapping[str, Any] | None) -> bool:
    """Whether a commit's note is of a job that is done, and whose weights are on their way into the file."""
    return note is not None and "export" in note


def _begin(partial: Path, layout: _Layout, *, resumed: bool) -> None:
    """The file at its full size, with its header."""
    try:
        if resumed and partial.stat().st_size != layout.nbytes:
            raise FileError(
                f"{partial} is not what was begun: {partial.stat().st_size} bytes, not {layout.nbytes}"
            )
        if not resumed:
            partial.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as out:
                out.write(layout.header)
                out.truncate(layout.nbytes)
    except OSError as error:
        raise FileError(
            f"{partial} cannot be written: {error}",
            setting="directory",
            works="one with room for the weights",
        ) from None


def _copy(store: Store, layout: _Layout, segment: Segment, partial: Path) -> None:
    """Bring one segment's tensors into the file, and the file to the disk."""
    wanted = [saved for saved in layout.saved if saved.home.key == segment.key]
    strided = [saved for saved in wanted if not _is_contiguous(saved.tensor)]
    plain = [saved for saved in wanted if _is_contiguous(saved.tensor)]
    try:
        with partial.open("r+b") as out:
            at = 0
            for piece in store.stream(segment.key) if plain else ():
                for saved in plain:
                    _write_part(out, saved, at, piece)
                at += len(piece)
            if strided:
                _write_strided(out, store, segment, strided)
            out.flush()
            os.fsync(out.fileno())
            os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise FileError(
            f"{partial} cannot be written: {error}",
            setting="directory",
            works="one with room for the weights",
        ) from None


def _write_part(out: Any, saved: _Saved, at: int, piece: memoryview) -> None:
    """What a piece of a segment, ``at`` bytes from its start, has of a tensor."""
    start, end = saved.home.entry.offset, saved.home.entry.offset + saved.tensor.nbytes
    low, high = max(start, at), min(end, at + len(piece))
    if low < high:
        out.seek(saved.offset + low - start)
        out.write(piece[low - at : high - at])


def _write_strided(out: Any, store: Store, segment: Segment, strided: list[_Saved]) -> None:
    """Tensors whose dimensions lie in another order than a file has them."""
    import torch

    from plait.spill.views import Views

    views = Views(store.memory)
    lease = store.request([Request(segment.key, "read")]).result()
    try:
        views.use(lease.places)
        for saved in strided:
            tensor = views.entry(segment.key, saved.home.entry, saved.tensor.stride)
            out.seek(saved.offset)
            out.write(tensor.contiguous().flatten().view(torch.uint8).numpy())
    finally:
        lease.release()


def _is_contiguous(tensor: Parameter | Buffer) -> bool:
    """Whether a tensor lies in memory in the order of its dimensions."""
    expected = prod(tensor.shape)
    for size, stride in zip(tensor.shape, tensor.stride, strict=True):
        expected = expected // size if size else 0
        if size > 1 and stride != expected:
            return False
    return True


def _finish(partial: Path, file: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # renamed, and then killed before the commit
        partial.replace(file)
    descriptor = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
