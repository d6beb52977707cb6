"""A ring, compressed hop by hop.

Every worker sends to the one after it only (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
for clusters of workstations", 2009). Share k starts at worker k+1, which sends its part on; each worker adds
its own and packs the sum again, until it comes to worker k, who owns it. Then the sums go around the same
way, as the bytes that the owner packed, so all end with the same bits.

    W = 4        0 -> 1     1 -> 2     2 -> 3     3 -> 0
    step 1       share 3    share 0    share 1    share 2
    step 2       share 2    share 3    share 0    share 1
    step 3       share 1    share 2    share 3    share 0     the owners have their sums
    then         share 0    share 1    share 2    share 3     and pass them on, two steps more

A value is quantized at each of W-1 hops and once at the owner, so the error grows faster than with
scatter-reduce-allgather (scatter.py), which sends as many bytes. What a ring has for it is two
connections a worker, whatever the world's size.
"""

from __future__ import annotations

from functools import partial

from plait.compress.arena import Buffer
from plait.compress.exchange import PARTIAL, TOTAL, Exchange
from plait.compress.layout import Chunk
from plait.compress.operation import Label


class Ring(Exchange):
    """A ring over all workers of the mesh, in the order of their positions."""

    def start(self) -> None:
        """Note what will arrive and what will be sent."""
        me, world = self.mesh.position, self.mesh.world
        self._me, self._left, self._right = me, (me - 1) % world, (me + 1) % world
        for share, chunks in enumerate(self.task.layout.shares):
            for chunk in chunks:
                if self.task.reduce and share != me:
                    self.owe(1)
                    if share == self._left:
                        self.pack_for(self._right, PARTIAL, chunk)
                if self.task.reduce and share != self._left:
                    self.expect(self._left, PARTIAL, share, chunk.number, chunk.bytes)
                if self.task.gather and share != self._right:
                    self.owe(1)
                if self.task.gather and share != me:
                    self.expect(self._left, TOTAL, share, chunk.number, chunk.bytes)
                if share == me and not self.task.reduce:
                    self.later(partial(self.complete, chunk, [self._right]))

    def chunk(self, phase: int, share: int, number: int) -> Chunk:
        """A chunk travels in the same form everywhere."""
        return self.task.layout.shares[share][number]

    def owns(self, share: int) -> bool:
        """Whether this worker adds the share up."""
        return share == self.mesh.position

    def arrived(self, label: Label, buffer: Buffer) -> None:
        """Take a message that was expected."""
        if label[1] == PARTIAL:
            self.later(partial(self._add, label, buffer))
        else:
            forward = [self._right] if label[2] != self._right else []
            self.later(partial(self.total, label, buffer, forward))

    def _add(self, label: Label, buffer: Buffer) -> None:
        chunk = self.chunk(*label[1:])
        self.unpack(chunk, buffer, add=True)
        buffer.drop()
        if chunk.share == self._me:
            self.complete(chunk, [self._right])
        else:
            self.pack_for(self._right, PARTIAL, chunk)
