"""An operation that checks the one before it: do all workers have the same bits?"""

from __future__ import annotations

import struct

from torch import Tensor

from plait import native
from plait.compress.arena import Buffer
from plait.compress.mesh import Mesh
from plait.compress.operation import Label, Operation
from plait.compress.work import Work
from plait.errors import WorkerError

_CHECKSUM = struct.Struct("<I")


class Verification(Operation):
    """Every worker tells every other the checksum of its result."""

    def __init__(self, mesh: Mesh, result: Tensor, after: Work, *, timeout_s: float) -> None:
        super().__init__(mesh, fingerprint={"operation": "verification"}, timeout_s=timeout_s)
        self._result = result
        self._after = after
        self.work.report = after.report  # whoever waits for both wants to know of what was checked
        self._mine: int | None = None
        self._theirs: dict[int, int] = {}

    def start(self) -> None:
        """Note what will arrive and what will be sent."""
        for position in self.mesh.links:
            self.expect(position, 0, 0, 0, _CHECKSUM.size)
        self.owe(len(self.mesh.links))

    def arrived(self, label: Label, buffer: Buffer) -> None:
        """Keep a checksum until ours is known."""
        self._theirs[label[0]] = _CHECKSUM.unpack(buffer.view)[0]
        buffer.drop()

    def step(self) -> bool:
        """Send our checksum once there is a result; compare those that have come."""
        if self._mine is None and self._after.is_completed():
            self._mine = native.checksum(self._result.detach().cpu().contiguous())
            for position in self.mesh.links:
                buffer = self.mesh.arena.take(_CHECKSUM.size)
                buffer.view[:] = _CHECKSUM.pack(self._mine)
                self.send(position, 0, 0, 0, buffer)
                buffer.drop()
            return True
        if self._mine is None or not self._theirs:
            return False
        position, theirs = self._theirs.popitem()
        if theirs != self._mine:
            raise WorkerError(
                f"the result of operation {self.sequence - 1} is not the same on ranks {self.mesh.rank} and "
                f"{self.mesh.ranks[position]}: checksums {self._mine:08x} and {theirs:08x}"
            )
        return True

    @property
    def idle(self) -> bool:
        """Whether all that came has been compared."""
        return self._mine is not None and not self._theirs
