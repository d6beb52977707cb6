"""The numbers that an exchange works on: the user's own where they lie as it needs them, else a copy in fp32.

A copy is made for tensors of other dtypes, for those that are not contiguous, and for those on another
device, which so take the way through host memory (this has not been run on a GPU: there was none).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.compress.arena import Arena, Buffer


@dataclass(kw_only=True)
class Workspace:
    """Opened and closed by the communication thread."""

    count: int
    """Elements."""
    home: Tensor | None = None
    """Memory of the user's to work in, flat; None for a buffer of the arena."""
    fill: Callable[[Tensor], object] | None = None
    """Writes the numbers into the opened workspace."""
    result: Callable[[Tensor], object] | None = None
    """Takes the result out of it."""
    _buffer: Buffer | None = None

    def open(self, arena: Arena) -> Tensor:
        """The numbers: contiguous fp32 in host memory."""
        if self.home is None:
            self._buffer = arena.take(4 * self.count)
            self.home = self._buffer.tensor.view(torch.float32)
        if self.fill is not None:
            self.fill(self.home)
        return self.home

    def close(self) -> None:
        """Hand the result over and give the memory back."""
        assert self.home is not None, "a workspace is opened before it is closed"
        if self.result is not None:
            self.result(self.home)
        if self._buffer is not None:
            self._buffer.drop()
        self.home = None


def fits(tensor: Tensor) -> bool:
    """Whether an exchange can work in the tensor's own memory."""
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()


def flat(tensor: Tensor) -> Tensor:
    """A tensor that fits, as one row."""
    return tensor.detach().view(-1)


def read(tensor: Tensor, into: Tensor) -> None:
    """Copy the numbers of any tensor into a row of fp32 in host memory."""
    _wait_for_device(tensor)
    into.view(tensor.shape).copy_(tensor.detach())


def write(tensor: Tensor, source: Tensor) -> None:
    """Copy a row of fp32 over any tensor of as many elements; fewer bits round to the nearest."""
    tensor.detach().copy_(source.view(tensor.shape))
    _wait_for_device(tensor)


def _wait_for_device(tensor: Tensor) -> None:
    # The caller's stream is not ours: what it has queued must be done before we read, and what we have
    # written must be there before it goes on.
    if tensor.device.type != "cpu":
        torch.accelerator.synchronize(tensor.device)
