"""Segments in a GPU's memory for the length of a unit: copied there from the store's memory, and back.

The store's memory is pinned, and copies run in a stream of their own: a unit's kernels wait for the segments
on their way in, and the way back waits for the kernels. What CUDA does with that has not been run: there is
no GPU where plait is developed. Everything else here runs in tests, where the other memory is the CPU's own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from plait.spill.segment import Extent
from plait.spill.views import Place, Views, span


class Carried(Views):
    """The segments of one unit at a time, in the memory of a device that cannot see the store's."""

    def __init__(self, memory: memoryview, device: str) -> None:
        super().__init__(memory)
        self.device = torch.device(device)
        self._there: dict[str, torch.Tensor] = {}
        self._back: list[str] = []
        """Those to copy back."""
        self._starts_there: list[tuple[int, str]] = []
        self._stream = _pinned_stream(self.device, self._start, memory.nbytes)

    def use(self, places: Mapping[str, int], extents: Mapping[str, Extent] | None = None) -> None:
        """Copy back what the unit before changed, and copy in what this one reads."""
        with self._copying():
            for key in self._back:
                self._here(key, self._there[key].numel()).copy_(self._there[key], non_blocking=True)
        self._there, self._back, self._starts_there = {}, [], []
        super().use(places)
        if not places:
            return
        assert extents is not None, "how large segments are, and what for"
        with self._copying():
            for key, extent in extents.items():
                there = torch.empty(extent.nbytes, dtype=torch.uint8, device=self.device)
                if extent.mode != "write":
                    there.copy_(self._here(key, extent.nbytes), non_blocking=True)
                if extent.mode != "read":
                    self._back.append(key)
                self._there[key] = there
        self._starts_there = sorted((there.data_ptr(), key) for key, there in self._there.items())

    def _here(self, key: str, nbytes: int) -> torch.Tensor:
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=self._places[key])

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Copies within it begin after all that was computed, and what is computed later sees them.

        The store may move segments as soon as a unit has ended, so the host waits for them, too.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield
        if self._back:
            self._stream.synchronize()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def tensor(self, place: Place) -> torch.Tensor:
        """The tensor at a place; a new one on the same memory, with a version counter of its own."""
        fresh = torch.empty(0, dtype=place.dtype, device=self.device)
        if span(place.shape, place.stride) == 0:
            return fresh.new_empty_strided(place.shape, place.stride)
        storage = self._there[place.key].untyped_storage()
        return fresh.set_(storage, place.offset // fresh.element_size(), place.shape, place.stride)

    def locate(self, tensor: torch.Tensor) -> Place | None:
        """Where a tensor lies; None for one that is in no segment."""
        if tensor.device.type != self.device.type or tensor.numel() == 0:
            return None
        index = bisect_right(self._starts_there, (tensor.data_ptr(), "\uffff")) - 1
        if index < 0:
            return None
        start, key = self._starts_there[index]
        within = tensor.data_ptr() - start
        if within >= self._there[key].numel():
            return None
        return Place(key, within, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _pinned_stream(device: torch.device, start: int, nbytes: int) -> torch.cuda.Stream | None:
    """Pin the store's memory for a GPU, which can then copy while it computes; None where there is none."""
    if device.type != "cuda":
        return None
    if nbytes:
        code = torch.cuda.cudart().cudaHostRegister(start, nbytes, 0)  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(code))
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
