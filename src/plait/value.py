"""A value that crosses from one block to a later one, and how its size follows the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Value:
    """A tensor between blocks. Each dimension is ``per_sample * batch + constant``."""

    name: str
    dtype: str
    """Without the ``torch.`` before it: ``"float32"``."""
    itemsize: int
    dimensions: tuple[tuple[int, int], ...]
    """(per_sample, constant) for each dimension."""
    differentiable: bool
    """Whether a gradient comes back for it."""

    def shape(self, batch: int) -> tuple[int, ...]:
        """The shape at a batch size."""
        return tuple(per_sample * batch + constant for per_sample, constant in self.dimensions)

    def nbytes(self, batch: int) -> int:
        """The size in bytes at a batch size."""
        return self.itemsize * prod(self.shape(batch))

    @property
    def batch_dimension(self) -> int | None:
        """The first dimension that grows with the batch; None for what is the same for every sample."""
        for place, (per_sample, _) in enumerate(self.dimensions):
            if per_sample:
                return place
        return None


def line(small: Sequence[int], large: Sequence[int], batch: int) -> tuple[tuple[int, int], ...]:
    """Dimensions from two shapes, one at ``batch`` and one at ``batch + 1``."""
    return tuple((b - a, a - (b - a) * batch) for a, b in zip(small, large, strict=True))
