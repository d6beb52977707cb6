"""The memory that all segments share: one mapping of fixed size, and who has which part of it.

The mapping is of an anonymous file, so that other processes can map it too, by its descriptor. It is a
shared mapping also for the sake of direct reads: a fork in the middle of one would make a private page two
pages, and the disk would fill the wrong one (see open(2), O_DIRECT).
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from plait import shared_memory
from plait.errors import UsageError
from plait.spill.segment import PAGE_BYTES, padded
from plait.units import format_bytes

Range = tuple[int, int]
"""From a byte to before another."""


class Space:
    """Which bytes of a range are free: whole pages, neighbours always joined."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes - nbytes % PAGE_BYTES
        self._starts = [0] if self.nbytes else []
        self._ends = [self.nbytes] if self.nbytes else []
        self._free_bytes = self.nbytes

    @property
    def free_bytes(self) -> int:
        """How much is free, in however many pieces."""
        return self._free_bytes

    @property
    def used_bytes(self) -> int:
        """How much is taken."""
        return self.nbytes - self._free_bytes

    def gaps(self) -> list[Range]:
        """The free pieces, by place."""
        return list(zip(self._starts, self._ends, strict=True))

    def find(self, nbytes: int) -> int | None:
        """Where so many bytes are best taken: the smallest gap that holds them, of equals the first."""
        need = padded(nbytes)
        sizes = ((end - start, start) for start, end in zip(self._starts, self._ends, strict=True))
        return min((gap for gap in sizes if gap[0] >= need), default=(0, None))[1]

    def allocate(self, nbytes: int) -> int | None:
        """Take the best place for so many bytes; None where no gap holds them."""
        place = self.find(nbytes)
        if place is not None:
            self.take(place, nbytes)
        return place

    def take(self, start: int, nbytes: int) -> None:
        """Take a free range."""
        end = start + padded(nbytes)
        at = bisect_right(self._starts, start) - 1
        free = start % PAGE_BYTES == 0 and start < end and at >= 0 and end <= self._ends[at]
        assert free, f"{start} to {end} is not free"
        left, right = self._starts[at], self._ends[at]
        rest = [(a, b) for a, b in ((left, start), (end, right)) if a < b]
        self._starts[at : at + 1] = [a for a, _ in rest]
        self._ends[at : at + 1] = [b for _, b in rest]
        self._free_bytes -= end - start

    def free(self, start: int, nbytes: int) -> None:
        """Give a taken range back, or a part of one."""
        end = start + padded(nbytes)
        at = bisect_left(self._starts, start)
        inside = start % PAGE_BYTES == 0 and 0 <= start < end <= self.nbytes
        before = at == 0 or self._ends[at - 1] <= start
        after = at == len(self._starts) or end <= self._starts[at]
        taken = inside and before and after
        assert taken, f"{start} to {end} was not taken"
        self._free_bytes += end - start
        first, last = at, at
        if at > 0 and self._ends[at - 1] == start:
            first, start = at - 1, self._starts[at - 1]
        if at < len(self._starts) and self._starts[at] == end:
            last, end = at + 1, self._ends[at]
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def copy(self) -> Space:
        """Another of the same state, to try things out on."""
        other = Space(0)
        other.nbytes, other._free_bytes = self.nbytes, self._free_bytes
        other._starts, other._ends = self._starts.copy(), self._ends.copy()
        return other


def without(whole: Range, holes: list[Range]) -> Iterator[Range]:
    """What is left of a range when others, which do not overlap each other, are taken out of it."""
    start, end = whole
    for a, b in sorted(holes):
        if start < min(a, end):
            yield start, min(a, end)
        start = max(start, b)
    if start < end:
        yield start, end


class Arena:
    """Memory of a fixed size that processes share; pages that were never touched take none."""

    def __init__(self, nbytes: int) -> None:
        self.space = Space(nbytes)
        if self.space.nbytes < PAGE_BYTES:
            raise UsageError(
                f"{nbytes} bytes of memory hold no page of {PAGE_BYTES}",
                setting="memory_bytes",
                works=format_bytes(64 << 20),
            )
        self.peak_bytes = 0
        self.fd = shared_memory.create("plait-arena")
        try:
            os.ftruncate(self.fd, self.space.nbytes)
            self._map = mmap.mmap(self.fd, self.space.nbytes)
        except (OSError, ValueError) as error:
            os.close(self.fd)
            raise UsageError(
                f"{format_bytes(nbytes)} of memory cannot be mapped: {error}",
                setting="memory_bytes",
                works="less than the machine has",
            ) from None
        self.memory = memoryview(self._map)

    def take(self, start: int, nbytes: int) -> None:
        """Take a free range, and note how much is taken at most."""
        self.space.take(start, nbytes)
        self.peak_bytes = max(self.peak_bytes, self.space.used_bytes)

    def close(self) -> None:
        """Give the memory back; a view that somebody still holds keeps it until it goes."""
        os.close(self.fd)
        try:
            self.memory.release()
            self._map.close()
        except BufferError:
            pass
