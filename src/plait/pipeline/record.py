"""What one step took on one rank: computations, and arrivals of messages."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from plait.pipeline.orders import Kind

if TYPE_CHECKING:
    from plait.pipeline.inbox import Parcel


@dataclass(frozen=True)
class Computation:
    """A forward or backward of one micro-batch; times in nanoseconds of this rank's clock."""

    kind: Kind
    micro_batch: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Receipt:
    """A message that came; times of the sender's clock (sent) and this rank's (the others)."""

    peer: int
    what: str
    number: int
    bytes: int
    sent_ns: int
    posted_ns: int
    head_ns: int
    arrived_ns: int
    queued_bytes: int


@dataclass
class StepRecord:
    """A step, as one rank saw it."""

    begun_ns: int = field(default_factory=time.perf_counter_ns)
    end_ns: int = 0
    computations: list[Computation] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)

    @property
    def step_ms(self) -> float:
        """How long it took."""
        return (self.end_ns - self.begun_ns) / 1e6

    def computed(self, kind: Kind, micro_batch: int, start_ns: int, end_ns: int) -> None:
        """Note a forward or backward."""
        self.computations.append(Computation(kind, micro_batch, start_ns, end_ns))

    def heard(self, peer: int, parcel: Parcel) -> None:
        """Note a message that came."""
        head = parcel.head
        assert head is not None, "it has arrived"
        self.receipts.append(
            Receipt(
                peer=peer,
                what=parcel.what,
                number=parcel.number,
                bytes=head.tensor_bytes,
                sent_ns=head.sent_ns,
                posted_ns=parcel.posted_ns,
                head_ns=parcel.head_ns,
                arrived_ns=parcel.arrived_ns,
                queued_bytes=head.queued_bytes,
            )
        )
