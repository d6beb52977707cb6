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
    per_sample: int
    """Entries of the first of them for each row of the batch; 0 for a value that all rows share."""
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
        batch, per_sample = _batch_dimension(name, tensor, rows, value, cut)
        rest = [place for place in range(tensor.ndim) if place != batch]
        strides = tensor.stride()
        rest.sort(key=lambda place: -strides[place])  # stable: ties stay as they are
        return cls(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            order=tuple(rest) if batch is None else (batch, *rest),
            per_sample=per_sample,
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
        batched = (rows * self.per_sample,) if self.per_sample else ()
        return torch.empty((*batched, *self.shape), dtype=getattr(torch, self.dtype), device=device)

    def pack(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        """The tensor's numbers without gaps, the batch first."""
        packed = tensor.detach().permute(self.order)
        batched = (rows * self.per_sample,) if self.per_sample else ()
        wanted = ((*batched, *self.shape), getattr(torch, self.dtype))
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


def _batch_dimension(
    name: str, tensor: torch.Tensor, rows: int, value: Value | None, cut: str
) -> tuple[int | None, int]:
    """Which dimension grows with the batch, and by how many entries a row; (None, 0) for none."""
    if value is None:  # a chain made without example inputs: the batch is the first dimension
        if tensor.ndim == 0 or tensor.shape[0] % rows:
            raise UsageError(
                f"value {name!r} has shape {tuple(tensor.shape)}, which is not by {rows} rows, and crosses "
                f"{cut}",
                setting="example_inputs",
                works="Chain.of(blocks, example_inputs), so that sizes are known",
            )
        return 0, tensor.shape[0] // rows
    growing = [(place, size) for place, size in enumerate(value.dimensions) if size[0]]
    if not growing:
        return None, 0
    ((place, (per_sample, constant)), *others) = growing
    if others or constant:
        sizes = " x ".join(f"({a}b + {c})" if a else str(c) for a, c in value.dimensions)
        raise UsageError(
            f"value {name!r} of {sizes} for b rows cannot be cut into rows, and it crosses {cut}",
            setting="widths",
            works=_WHOLE.format(cut=cut),
        )
    return place, per_sample
