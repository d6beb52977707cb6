"""The buffers that messages lie in, taken and given back, never freed: one arena a process.

With workers on the same host the arena is an anonymous file in memory (``memfd``) that those workers map
too. A message to one of them is then not copied through the kernel: its place in the arena is all that is
sent, and a short answer says when the place may be used again. An anonymous file vanishes with the
processes that hold it, however they end.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import torch
from torch import Tensor

_LEAST_BYTES = 1 << 12
_CAPACITY_BYTES = 1 << 32
"""Of addresses, not of memory: pages count from their first use."""
_MOST_SIZES = 16


class Buffer:
    """Bytes of a message. Whoever needs them holds them, and the last to let go gives them back."""

    __slots__ = ("_give_back", "_holders", "place", "tensor", "view")

    def __init__(
        self, tensor: Tensor, give_back: Callable[[], None] | None = None, *, place: int | None = None
    ) -> None:
        self.tensor = tensor
        """The bytes, as uint8."""
        self.view: memoryview = memoryview(tensor.numpy())  # type: ignore[arg-type]
        self.place = place
        """Where it is in this process's shared arena; None where no other process sees it."""
        self._give_back = give_back
        self._holders = 1

    def hold(self) -> Buffer:
        """Keep the bytes until :meth:`drop`."""
        self._holders += 1
        return self

    def drop(self) -> None:
        """Need the bytes no longer."""
        self._holders -= 1
        assert self._holders >= 0, "a buffer was dropped more often than held"
        if self._holders == 0 and self._give_back is not None:
            self._give_back()


class _Slot:
    """A stretch of the arena, with the buffers that were ever made on it, by size: making one is slow."""

    __slots__ = ("memory", "place", "sizes")

    def __init__(self, memory: Tensor, place: int | None) -> None:
        self.memory = memory
        self.place = place
        self.sizes: dict[int, Buffer] = {}


class Arena:
    """Hands out buffers. Sizes are rounded up to a power of two, and the last given back is the first
    handed out again, so that few pages are ever touched and they stay in the cache.

    Its owner is one thread: nothing here is locked.
    """

    def __init__(self, *, shared: bool) -> None:
        self.descriptor: int | None = None
        """What other processes map; None for an arena of this process alone."""
        self.bytes = 0
        """What it has come to, in all: a size that was once needed stays."""
        self._free: dict[int, list[_Slot]] = {}
        self._memory: Tensor | None = None
        self._end = 0
        if shared:
            self.descriptor = os.memfd_create("plait-arena", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, _CAPACITY_BYTES)
            self._memory = mapped(self.descriptor)

    def take(self, size: int) -> Buffer:
        """A buffer of so many bytes; what is in them is undefined."""
        room = max(_LEAST_BYTES, 1 << (size - 1).bit_length())
        free = self._free.setdefault(room, [])
        slot = free.pop() if free else self._grow(room)
        buffer = slot.sizes.get(size)
        if buffer is not None:
            return buffer.hold()
        if len(slot.sizes) >= _MOST_SIZES:
            slot.sizes.clear()
        buffer = Buffer(slot.memory[:size], lambda: free.append(slot), place=slot.place)
        slot.sizes[size] = buffer
        return buffer

    def _grow(self, room: int) -> _Slot:
        self.bytes += room
        if self._memory is None or self._end + room > _CAPACITY_BYTES:
            return _Slot(torch.empty(room, dtype=torch.uint8), None)
        place = self._end
        self._end += room
        return _Slot(self._memory[place : self._end], place)

    def close(self) -> None:
        """Let the file go; what is mapped stays until nobody uses it."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def mapped(descriptor: int) -> Tensor:
    """Another process's arena, or our own, as one tensor of bytes."""
    size = os.fstat(descriptor).st_size
    return torch.frombuffer(mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED), dtype=torch.uint8)


def borrowed(tensor: Tensor, done: Callable[[], None] | None = None) -> Buffer:
    """A tensor's own bytes as a buffer, without a copy: it must not change until the last has let go."""
    return Buffer(tensor.view(torch.uint8), done)
