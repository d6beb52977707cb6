"""A segment as the store has it: where it is in memory and on the disk, and who needs it there.

::

               place found          room is free, content to be read           read
      absent ──────────────> reserved ──────────────────────────> loading ─────────────> present
        ^                        │  room is free, nothing to be read                      ^   │
        │                        └───────────────────────> blank ─────────────────────────┘   │
        │                                                         its writer has the lease     │
        └───────────────────────────────────────── leaving <──────────────────────────────────┘
                     the disk has it                           another one needs its room

What protects the content: memory is newer than the disk as long as ``dirty``, and a dirty segment leaves
only when a write that began after the last change has ended; nobody gets it for change while it is being
written; the slots of the last commit, and of one under way, are never written; room on the disk is given
to another segment only when no write to it is under way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from plait.spill.arena import Range
from plait.spill.disk import SegmentFile
from plait.spill.manifest import Copy
from plait.spill.segment import Segment
from plait.spill.traffic import Transfer

State = Literal["absent", "reserved", "loading", "blank", "present", "leaving"]


@dataclass(eq=False, kw_only=True)
class Holding:
    """See the drawing above; all of it changes under the store's lock alone."""

    segment: Segment
    file: SegmentFile
    slots: list[int]
    """Where in the file; a scratch segment has none until it is first written out."""
    state: State = "absent"
    place: int = -1
    """Where in the arena, unless absent."""
    filled: bool = False
    """It has content, in memory or on the disk."""
    dirty: bool = False
    """What is in memory is on no disk."""
    current: Copy | None = None
    """The content on the disk, where it is not dirty."""
    committed: Copy | None = None
    pending: Copy | None = None
    """What the commit under way will make the committed one."""
    due: bool = False
    """A commit waits for it to be written: it must not change before."""
    holders: int = 0
    """How many need it in memory where it is."""
    writer: bool = False
    """Its one holder changes it."""
    streams: int = 0
    """How many read it from the disk."""
    transfer: Transfer | None = None
    """What is under way between its memory and the disk."""
    saving: bool = False
    """The transfer is to the disk."""
    doomed: bool = False
    """Dropped; its memory and disk are free once the transfer has ended."""
    trouble: BaseException | None = None
    """Why it could not be moved when that was last tried."""
    waits_for: set[Holding] = field(default_factory=set)
    """Those leaving that its place is still taken by."""
    heirs: set[Holding] = field(default_factory=set)
    """Those that get its room when it has left."""
    wants_content: bool = False
    """It is to be loaded once its room is free."""
    ahead: bool = False
    """It was read before anybody asked for it, and nobody has had it since."""
    used_at: int = 0
    """Counts releases: the larger, the later it was last used."""

    @property
    def range(self) -> Range:
        """Its bytes in the arena."""
        return self.place, self.place + self.segment.nbytes

    @property
    def fixed(self) -> bool:
        """It has but one slot, and that is committed, or about to be."""
        return self.segment.persistent and len(self.slots) == 1 and self.free_slot is None

    @property
    def free_slot(self) -> int | None:
        """A slot that may be written."""
        kept = {copy.slot for copy in (self.committed, self.pending) if copy is not None}
        return next((slot for slot in range(len(self.slots)) if slot not in kept), None)
