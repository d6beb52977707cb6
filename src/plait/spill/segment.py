"""Segments: the named byte ranges in which a model's state moves between memory and disk; no torch here.

A segment holds tensors one after another, each aligned for vector instructions, and is padded to whole
pages, so that it can be read and written past the page cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal

from plait.errors import UsageError

PAGE_BYTES = 4096
ALIGNMENT_BYTES = 64
"""Of a tensor within its segment: a line of the cache."""
SHARED = "_shared-"
"""How the names of groups begin that belong to several jobs; no job's does."""

Mode = Literal["read", "write", "change"]
"""What a unit does with a segment: ``write`` needs nothing of what it held before."""

_ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16, "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip


def padded(nbytes: int, to: int = PAGE_BYTES) -> int:
    """The size rounded up to whole pages."""
    return -(-nbytes // to) * to


def item_bytes(dtype: str) -> int:
    """The size of one element of a type, as torch names it without the ``torch.``."""
    if dtype not in _ITEM_BYTES:
        raise UsageError(
            f"tensors of type {dtype} cannot be kept in a segment", setting="model", works="float32"
        )
    return _ITEM_BYTES[dtype]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor in a segment."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Without the ``torch.`` before it: ``"float32"``."""
    offset: int
    """Bytes from the segment's start."""

    @property
    def nbytes(self) -> int:
        """Its size, as a dense tensor."""
        return prod(self.shape) * item_bytes(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """What moves as one. Its group is what stands before the first ``/`` of its key: whose it is."""

    key: str
    nbytes: int
    """Whole pages."""
    persistent: bool
    """Part of a commit; what is not is gone when a run ends."""
    entries: tuple[Entry, ...] = ()

    @classmethod
    def pack(
        cls, key: str, tensors: Iterable[tuple[str, tuple[int, ...], str]], *, persistent: bool
    ) -> Segment:
        """Lay out tensors, given as (name, shape, dtype), in their order."""
        entries, end = [], 0
        for name, shape, dtype in tensors:
            entry = Entry(name=name, shape=shape, dtype=dtype, offset=padded(end, ALIGNMENT_BYTES))
            entries.append(entry)
            end = entry.offset + entry.nbytes
        return cls(key=key, nbytes=padded(max(end, 1)), persistent=persistent, entries=tuple(entries))

    @property
    def group(self) -> str:
        """Whose it is: commits, and what they leave behind, are by group."""
        return self.key.partition("/")[0]


@dataclass(frozen=True)
class Extent:
    """How much of the memory a segment has, and what a unit does with it."""

    nbytes: int
    mode: Mode


@dataclass(frozen=True)
class Request:
    """A segment that a unit needs in memory, and what for."""

    key: str
    mode: Mode
    nbytes: int = 0
    """The room that it will take, where it is announced before it is defined."""
