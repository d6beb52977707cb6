"""How a value lies between blocks, so that ranks that never held it can make room for its rows.

Rows are moved along the dimension that grows with the batch, put first; the others keep the order in which
they lie in memory, so a batch in channels-last crosses as it is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from plait.errors import UsageError
from plait.value import Value

_WHOLE = "the same width before and after it: {cut}"


@dataclass(frozen=True)
class Form:
    """One value at a cut, the same for any number of rows."""

    name: str
    dtype: str
    """Without the ``torch.`` before it."""
    order: tuple[int, ...]
    """The value's dimensions as they lie in memory; of a batched one, the batch first."""
    batched: bool
    """Whether the first of them has an entry for each row of the batch; else all rows share the value."""
    shape: tuple[int, ...]
    """Sizes in that order, without the batch."""
    differentiable: bool

    @classmethod
    def of(cls, name: str, tensor: Any, rows: int, value: Value | None, *, cut: str) -> Form:
        """The form of a tensor that holds so many rows; ``value`` is what tracing knows of it.

        ``cut`` says in words where it crosses.
        """
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(
                f"value {name!r} is a {type(tensor).__name__}, and only tensors can move {cut}",
                setting="widths",
                works=_WHOLE.format(cut=cut),
            )
        batch = _batch_dimension(name, tensor, rows, value, cut)
        rest = [place for place in range(tensor.ndim) if place != batch]
        strides = tensor.stride()
        rest.sort(key=lambda place: -strides[place])  # stable: ties stay as they are
        return cls(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            order=tuple(rest) if batch is None else (batch, *rest),
            batched=batch is not None,
            shape=tuple(tensor.shape[place] for place in rest),
            differentiable=tensor.requires_grad,
        )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Form:
        """Read what ``to_json`` gives."""
        return cls(**{**data, "order": tuple(data["order"]), "shape": tuple(data["shape"])})

    def to_json(self) -> dict[str, Any]:
        """The form as plain data."""
        return asdict(self)

    def empty(self, rows: int, device: torch.device) -> torch.Tensor:
        """Room for so many rows, packed."""
        return torch.empty(self._shape(rows), dtype=getattr(torch, self.dtype), device=device)

    def pack(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        """The tensor's numbers without gaps, the batch first."""
        packed = tensor.detach().permute(self.order)
        wanted = (self._shape(rows), getattr(torch, self.dtype))
        if (tuple(packed.shape), packed.dtype) != wanted:
            raise UsageError(
                f"value {self.name!r} has shape {tuple(packed.shape)} of {packed.dtype} on this rank, where "
                f"rank 0 has {wanted[0]} of {wanted[1]}, the batch first",
                setting="chain",
                works="blocks whose outputs have the same shapes for the same inputs",
            )
        return packed.resolve_conj().resolve_neg().contiguous()

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """The tensor as blocks take it."""
        back = [self.order.index(place) for place in range(len(self.order))]
        return packed.permute(back)

    def _shape(self, rows: int) -> tuple[int, ...]:
        return (rows, *self.shape) if self.batched else self.shape


def _batch_dimension(name: str, tensor: torch.Tensor, rows: int, value: Value | None, cut: str) -> int | None:
    """Which dimension has an entry for each row of the batch; None for a value that all rows share.

    One with several for each row is refused: it may have them row by row, as ``x.flatten(0, 1)`` does, or all
    rows again and again, as ``torch.cat([x, y])`` does, and sizes alone do not tell.
    """
    if value is None:  # a chain made without example inputs: the batch is the first dimension
        if tensor.ndim == 0 or tensor.shape[0] != rows:
            raise UsageError(
                f"value {name!r} has shape {tuple(tensor.shape)}, which is not by {rows} rows, and crosses "
                f"{cut}",
                setting="example_inputs",
                works="Chain.of(blocks, example_inputs), so that sizes are known",
            )
        return 0
    growing = [(place, size) for place, size in enumerate(value.dimensions) if size[0]]
    if not growing:
        return None
    ((place, (per_sample, constant)), *others) = growing
    if others or constant or per_sample != 1:
        sizes = " x ".join(f"({a}b + {c})" if a else str(c) for a, c in value.dimensions)
        raise UsageError(
            f"value {name!r} of {sizes} for b rows cannot be cut into rows, and it crosses {cut}",
            setting="widths",
            works=_WHOLE.format(cut=cut),
        )
    return place
