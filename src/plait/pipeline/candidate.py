"""A way to run a step that a tuner may choose: an order, with the global batch cut into its micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.errors import UsageError
from plait.pipeline.orders import Order
from plait.units import parse_whole


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An order for a global batch, cut as `torch.tensor_split` does: sizes differ by one row at most."""

    order: Order
    global_batch: int
    """Rows (samples) of a step."""

    def __post_init__(self) -> None:
        parse_whole(self.global_batch, setting="global_batch")
        if self.order.micro_batches > self.global_batch:
            raise UsageError(
                f"{self.global_batch} rows cannot be cut into {self.order.micro_batches} micro-batches",
                setting="micro_batches",
                works=f"1 to {self.global_batch}",
            )

    @property
    def rows(self) -> int:
        """Rows of the largest micro-batch."""
        return -(-self.global_batch // self.order.micro_batches)

    @property
    def shares(self) -> tuple[float, ...]:
        """The size of each micro-batch as a share of the largest."""
        whole, more = divmod(self.global_batch, self.order.micro_batches)
        return (1.0,) * more + (whole / self.rows,) * (self.order.micro_batches - more)

    def __str__(self) -> str:
        return f"{self.order.label}, {self.order.micro_batches} micro-batches of {self.rows} rows"

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"order": self.order.to_json(), "global_batch": self.global_batch}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Candidate:
        """From what ``to_json`` gave."""
        return cls(order=Order.from_json(data["order"]), global_batch=data["global_batch"])
