"""Tensors in the store's memory: views for one unit, since a segment may lie elsewhere in the next."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from plait.spill.segment import Entry, Extent


@dataclass(frozen=True)
class Place:
    """A tensor in a segment, wherever that lies."""

    key: str
    offset: int
    """Bytes from the segment's start."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Views:
    """The memory that a store and its devices share, seen as tensors."""

    def __init__(self, memory: memoryview) -> None:
        self.device = torch.device("cpu")
        """Where tensors are."""
        self._memory = memory
        self._start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr() if memory.nbytes else 0
        self._places: dict[str, int] = {}
        self._starts: list[int] = []
        self._keys: list[str] = []

    def use(self, places: Mapping[str, int], extents: Mapping[str, Extent] | None = None) -> None:
        """From now on segments lie at these offsets; views made before are void.

        ``extents`` is for devices with memory of their own: how large segments are, and what they are for.
        """
        self._places = dict(places)
        pairs = sorted((offset, key) for key, offset in places.items())
        self._starts, self._keys = [p[0] for p in pairs], [p[1] for p in pairs]

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def tensor(self, place: Place) -> torch.Tensor:
        """The tensor at a place.

        Each is made from the memory anew: views of one tensor would share a version counter, and autograd
        would take a change of one for a change of all.
        """
        count = span(place.shape, place.stride)
        if count == 0:
            return torch.empty_strided(place.shape, place.stride, dtype=place.dtype)
        offset = self._places[place.key] + place.offset
        flat = torch.frombuffer(self._memory, dtype=place.dtype, count=count, offset=offset)
        return flat.as_strided(place.shape, place.stride).detach()

    def entry(self, key: str, entry: Entry, stride: Sequence[int] | None = None) -> torch.Tensor:
        """A tensor of a segment, in the layout it has in the model."""
        dtype = type_of(entry.dtype)
        strides = tuple(stride) if stride is not None else torch.empty(entry.shape, device="meta").stride()
        return self.tensor(Place(key, entry.offset, entry.shape, strides, dtype))

    def locate(self, tensor: torch.Tensor) -> Place | None:
        """Where a tensor lies; None for one in memory of its own."""
        offset = tensor.data_ptr() - self._start
        if not 0 <= offset < self._memory.nbytes or tensor.numel() == 0:
            return None
        index = bisect_right(self._starts, offset) - 1
        assert index >= 0, "a view of memory that no segment has now"
        key = self._keys[index]
        within = offset - self._places[key]
        return Place(key, within, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def type_of(name: str) -> torch.dtype:
    """A type by the name that it has in a segment."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), name
    return found


def name_of(dtype: torch.dtype) -> str:
    """The name of a type in a segment."""
    return str(dtype).removeprefix("torch.")


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements lie between a tensor's first and last, both counted."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements between a tensor's first and last, as they lie in memory."""
    return tensor.as_strided((span(tensor.shape, tensor.stride()),), (1,), tensor.storage_offset())
