"""A device as the alternator sees it: what it computes, and what it computes next."""

from __future__ import annotations

from dataclasses import dataclass, field

from plait.spill.claim import Lease
from plait.spill.device import Call, Device
from plait.spill.task import Task
from plait.spill.units import Unit


@dataclass(kw_only=True, eq=False)
class Turn:
    """A unit for which segments have been requested, and later that is being computed."""

    task: Task
    unit: Unit
    lease: Lease | None = None
    withdrawn: bool = False


@dataclass(kw_only=True, eq=False)
class Slot:
    """One device, what it computes, and what it computes next."""

    device: Device
    running: Turn | None = None
    next: Turn | None = None
    adopted: dict[str, Call] = field(default_factory=dict)
    """The tasks that it knows, and the calls by which it came to."""

    @property
    def index(self) -> int:
        """The device's number."""
        return self.device.index
