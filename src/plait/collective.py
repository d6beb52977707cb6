"""What a collective is, so that whoever needs one can be given any: torch's own, or a compressed one.

It reduces a tensor over the workers of a group, in place, and can say beforehand what that will cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

from plait.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

Reduction = Literal["sum", "average"]


@runtime_checkable
class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Return when the tensor holds the result."""


class Link(Protocol):
    """What an estimate needs to know of the wire between neighbours."""

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Bytes a second in each direction."""

    @property
    def latency_ms(self) -> float:
        """Milliseconds until the first byte arrives."""


@runtime_checkable
class Collective(Protocol):
    """Reduces a tensor over a group of workers."""

    def all_reduce(self, tensor: Tensor, group: Any = None) -> Work:
        """Start reducing the tensor over the group (None: everyone), in place, on every rank of it."""

    def estimate_ms(self, bytes: int, world: int, link: Link) -> float:
        """How long ``all_reduce`` of so many bytes takes over ``world`` workers joined by such links."""


@runtime_checkable
class Keyed(Collective, Protocol):
    """A collective that draws random numbers, and can be told by what."""

    def at(self, step: int, part: str) -> Collective:
        """The same for one call, ``part`` of a step: it draws the same numbers in a run that is resumed."""


def ring_bytes(bytes: int, world: int) -> int:
    """What each worker sends in a ring all-reduce, as gloo and NCCL do it: 2(W-1)/W of the tensor."""
    return 2 * (world - 1) * bytes // world


def ring_ms(bytes: float, world: int, link: Link) -> float:
    """Milliseconds of a ring all-reduce.

    Each worker sends 2(W-1) messages of 1/W of the tensor, and all do so at once (Patarasuk and Yuan,
    "Bandwidth optimal all-reduce algorithms", 2009):  2(W-1) * (bytes / W / bandwidth + latency).
    """
    if world < 1:
        raise UsageError(f"a world of {world} workers", setting="world", works="1 or more")
    if not bytes >= 0:
        raise UsageError(f"a tensor of {bytes} bytes", setting="bytes", works="0 or more")
    if not (link.bandwidth_bytes_per_s > 0 and link.latency_ms >= 0):
        raise UsageError(
            f"a link of {link.bandwidth_bytes_per_s} bytes/s and {link.latency_ms} ms",
            setting="link",
            works="a bandwidth above 0 and a latency of 0 or more",
        )
    messages = 2 * (world - 1)
    return messages * (bytes / world / link.bandwidth_bytes_per_s * 1e3 + link.latency_ms)


@dataclass(frozen=True, kw_only=True)
class TorchCollective:
    """The collectives of torch.distributed, as its backend (gloo, NCCL) implements them."""

    reduction: Reduction = "sum"
    """Add the workers' tensors up, or take their average."""

    def __post_init__(self) -> None:
        if self.reduction not in get_args(Reduction):
            raise UsageError(
                f"there is no reduction {self.reduction!r}", setting="reduction", works="sum, average"
            )

    def all_reduce(self, tensor: Tensor, group: Any = None) -> Work:
        """Start reducing the tensor over the group (None: everyone), in place, on every rank of it."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise UsageError(
                "there is no process group to reduce over",
                setting="group",
                works="torch.distributed.init_process_group() first, under torchrun",
            )
        operation = dist.ReduceOp.SUM if self.reduction == "sum" else dist.ReduceOp.AVG
        work: Work | None = dist.all_reduce(tensor, op=operation, group=group, async_op=True)
        if work is None:
            raise UsageError(
                f"rank {dist.get_rank()} is not in the group", setting="group", works="a group with this rank"
            )
        return work

    def estimate_ms(self, bytes: int, world: int, link: Link) -> float:
        """How long ``all_reduce`` takes: gloo and NCCL use a ring for tensors of this kind."""
        return ring_ms(bytes, world, link)
