"""Scatter-reduce-allgather, flat or in two levels.

The idea is that of CGX (Markov, Ramezanikebrya, Alistarh, "CGX: Adaptive System Support for Communication-
Efficient Deep Learning", Middleware 2022): every worker owns a share of the buffer, the others send it
their compressed part of that share, and it sends the compressed sum back. Values are thus quantized
twice, however many workers there are, where a ring would do so at every hop.

Steps for one chunk of a share (topology.py says who is who):

    1. to the deputy       workers of a host send it the chunk, uncompressed unless asked otherwise
    2. across hosts        the deputy adds these up and sends the sum, compressed, to the owner
    3. at the owner        it adds, to its own exact numbers, those of its host in rank order, then those of
                           the other hosts in their order; for an average it divides; it compresses the sum
    4. back                to the deputies and to its own host; deputies pass the bytes on to theirs

Every worker, the owner too, decodes the same bytes, so all end with the same bits. Where each worker is a
host of its own, step 1 is empty. A reduce-scatter stops at step 3, before the sum is compressed; an
all-gather starts there.

With W workers, each sends 2(W-1)/W of the compressed buffer, as much as a ring. Chunks of all steps are
under way at once: while one is on the wire, others are packed or unpacked.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from plait.compress.arena import Buffer
from plait.compress.exchange import LOCAL, PARTIAL, TOTAL, Exchange, Task, as_plain
from plait.compress.layout import Chunk
from plait.compress.operation import Label
from plait.compress.topology import Topology
from plait.compress.workspace import Workspace

if TYPE_CHECKING:
    from plait.compress.mesh import Mesh


@dataclass
class _Sum:
    """A chunk that is being added up here."""

    chunk: Chunk
    order: list[tuple[int, int]]
    """(phase, position) of what is still to be added, the next one first."""
    arrived: dict[tuple[int, int], Buffer] = field(default_factory=dict)


class Scatter(Exchange):
    """Scatter-reduce-allgather over a topology."""

    def __init__(
        self, mesh: Mesh, workspace: Workspace, task: Task, *, topology: Topology, inner_exact: bool = True
    ) -> None:
        super().__init__(mesh, workspace, task)
        self._topology = topology
        self._me = self.mesh.position
        self._sums: dict[tuple[int, int], _Sum] = {}
        self._exact: dict[tuple[int, int], Chunk] | None = {} if inner_exact else None
        # Each starts with the worker after it, so that not all send to worker 0 first.
        for step in range(1, topology.world):
            self._jobs[(self._me + step) % topology.world] = deque()

    def start(self) -> None:
        """Note what will arrive and what will be sent."""
        for share, owner in enumerate(self._topology.owners):
            deputy = self._topology.deputy(self._me, owner)
            for chunk in self.task.layout.shares[share]:
                if self.task.gather:
                    self._expect_total(chunk, owner, deputy)
                if self.task.reduce:
                    self._start_sum(chunk, owner, deputy)
                elif owner == self._me:
                    self.later(partial(self.complete, chunk, self._targets(owner)))

    def _start_sum(self, chunk: Chunk, owner: int, deputy: int) -> None:
        if deputy != self._me:
            self.owe(1)
            self.pack_for(deputy, LOCAL, self.chunk(LOCAL, chunk.share, chunk.number))
            return
        order = [(LOCAL, position) for position in self._topology.host(self._me) if position != self._me]
        if owner == self._me:
            order += [(PARTIAL, position) for position in self._topology.lane(owner) if position != self._me]
        else:
            self.owe(1)
        for phase, position in order:
            size = self.chunk(phase, chunk.share, chunk.number).bytes
            self.expect(position, phase, chunk.share, chunk.number, size)
        self._sums[(chunk.share, chunk.number)] = _Sum(chunk, order)
        if not order:
            self._summed(chunk)

    def _expect_total(self, chunk: Chunk, owner: int, deputy: int) -> None:
        if owner == self._me:
            self.owe(len(self._targets(owner)))
        else:
            sender = owner if deputy == self._me else deputy
            self.expect(sender, TOTAL, chunk.share, chunk.number, chunk.bytes)
            self.owe(len(self._forward(owner)))

    def _targets(self, owner: int) -> list[int]:
        """To whom the owner sends its sum."""
        reached = (*self._topology.lane(owner), *self._topology.host(owner))
        return [position for position in reached if position != owner]

    def _forward(self, owner: int) -> list[int]:
        """To whom this worker, if it is a deputy, passes on the sum of an owner elsewhere."""
        if self._topology.deputy(self._me, owner) != self._me:
            return []
        return [position for position in self._topology.host(self._me) if position != self._me]

    def chunk(self, phase: int, share: int, number: int) -> Chunk:
        """A chunk, in the form in which it travels in a phase."""
        chunk = self.task.layout.shares[share][number]
        if phase != LOCAL or self._exact is None:
            return chunk
        if (share, number) not in self._exact:
            self._exact[(share, number)] = as_plain(chunk)
        return self._exact[(share, number)]

    def owns(self, share: int) -> bool:
        """Whether this worker adds the share up."""
        return self._topology.owners[share] == self._me

    def arrived(self, label: Label, buffer: Buffer) -> None:
        """Take a message that was expected."""
        position, phase, share, number = label
        if phase == TOTAL:
            owner = self._topology.owners[share]
            self.later(partial(self.total, label, buffer, self._forward(owner)))
            return
        added = self._sums[(share, number)]
        added.arrived[(phase, position)] = buffer
        if added.order[0] == (phase, position):
            self.later(partial(self._add, added))

    def _add(self, added: _Sum) -> None:
        source = added.order.pop(0)
        buffer = added.arrived.pop(source)
        chunk = added.chunk
        self.unpack(self.chunk(source[0], chunk.share, chunk.number), buffer, add=True)
        buffer.drop()
        if not added.order:
            self._summed(chunk)
        elif added.order[0] in added.arrived:
            self.later(partial(self._add, added))

    def _summed(self, chunk: Chunk) -> None:
        """All that comes together here is added up."""
        del self._sums[(chunk.share, chunk.number)]
        owner = self._topology.owners[chunk.share]
        if owner == self._me:
            self.later(partial(self.complete, chunk, self._targets(owner)))
        else:
            self.pack_for(owner, PARTIAL, chunk)
