"""What a tensor that crosses between two stages looks like."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

Specs = tuple["Spec", ...]


@dataclass(frozen=True)
class Spec:
    """Shape and type of a tensor, and whether a gradient comes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Spec:
        """That of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        """Bytes that cross."""
        return prod(self.shape) * self.dtype.itemsize

    def empty(self) -> torch.Tensor:
        """Memory to receive it in."""
        return torch.empty(self.shape, dtype=self.dtype)

    def to_json(self) -> list[Any]:
        """As plain data."""
        return [list(self.shape), str(self.dtype).removeprefix("torch."), self.requires_grad]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Spec:
        """From plain data."""
        shape, dtype, requires_grad = data
        return cls(tuple(shape), getattr(torch, dtype), requires_grad)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def nbytes(specs: Iterable[Spec]) -> int:
    """Bytes of all tensors of a message."""
    return sum(spec.nbytes for spec in specs)


def gradients(specs: Iterable[Spec]) -> Specs:
    """What comes back for them: one gradient for each that needs one."""
    return tuple(Spec(spec.shape, spec.dtype, False) for spec in specs if spec.requires_grad)


def text(specs: Iterable[Spec]) -> str:
    """For people."""
    return ", ".join(str(spec) for spec in specs) or "nothing"
