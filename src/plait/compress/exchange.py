"""An operation on a buffer that is cut into chunks: packing, unpacking, and which of them comes first."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from plait.compress.arena import Buffer, borrowed
from plait.compress.codec import Codec, Exact
from plait.compress.feedback import Feedback, merged
from plait.compress.layout import Chunk, Layout, Piece, Segment, aligned
from plait.compress.operation import Label, Operation
from plait.compress.workspace import Workspace

if TYPE_CHECKING:
    from plait.compress.mesh import Mesh
    from plait.timeline import Timeline

LOCAL: Final = 0
"""A worker's own numbers, to another on its host."""
PARTIAL: Final = 1
"""A sum of some, on its way to the owner."""
TOTAL: Final = 2
"""The sum of all, on its way back."""
AHEAD: Final = 2
"""So many chunks may wait for the wire on one link; more would only take memory."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What an exchange is to do with its buffer."""

    layout: Layout
    key: Callable[[int, str | int], int]
    """The key of the rounding, from the phase and a piece's name."""
    fingerprint: Mapping[str, object]
    """What the workers must agree on, as they compare it."""
    timeout_s: float
    reduce: bool = True
    """Add the workers' buffers up; without it, each worker's own share is the sum."""
    gather: bool = True
    """Give everyone all shares; without it, each worker ends with its own share, exact."""
    divisor: int = 1
    """What the sum is divided by."""
    feedback: Feedback | None = None
    timeline: Timeline | None = None


class Exchange(Operation):
    """The part that all algorithms share."""

    def __init__(self, mesh: Mesh, workspace: Workspace, task: Task) -> None:
        super().__init__(mesh, fingerprint=task.fingerprint, timeout_s=task.timeout_s)
        self.task = task
        self._workspace = workspace
        self._numbers: Tensor | None = None
        self._todo: deque[Callable[[], None]] = deque()
        self._jobs: dict[int, deque[tuple[int, Chunk]]] = {}
        self._packed: dict[int, int] = {}
        self._held: deque[tuple[int, Chunk, Buffer]] = deque()
        self._borrowed = 0
        self._direct: set[Label] = set()

    @abstractmethod
    def chunk(self, phase: int, share: int, number: int) -> Chunk:
        """A chunk, in the form in which it travels in a phase."""

    @abstractmethod
    def owns(self, share: int) -> bool:
        """Whether this worker adds the share up."""

    def begin(self) -> None:
        """Take the numbers in, and start."""
        self._numbers = self._workspace.open(self.mesh.arena)
        self.report.elements = self._numbers.numel()
        if self.task.feedback is not None:
            owned = [chunks for share, chunks in enumerate(self.task.layout.shares) if self.owns(share)]
            segments = (segment for chunks in owned for chunk in chunks for segment in chunk.segments)
            stretches = [(segment.start, segment.start + segment.count) for segment in segments]
            self.task.feedback.settle(stretches, self.task.divisor)
        super().begin()

    def finish(self) -> None:
        """Hand the result over."""
        self._workspace.close()
        self._numbers = None

    # The order of work. A link that has nothing to send is served first, so that the wire is never idle for
    # want of packing; then what has arrived is unpacked; then more is packed, up to a bound. Sums wait until
    # all that others still need for theirs is gone: on a shared wire they would only hold it up.

    def step(self) -> bool:
        """Do one piece of work; whether there was one."""
        if self._held and self._first_things_done():
            position, chunk, buffer = self._held.popleft()
            self.post(position, TOTAL, chunk, buffer)
            buffer.drop()
            return True
        job = self._job(0)
        if job is None and self._todo:
            self._todo.popleft()()
            return True
        job = job or self._job(AHEAD - 1)
        if job is None:
            return False
        position, (phase, chunk) = job
        buffer = self.pack(phase, chunk, shared=self.mesh.links[position].shared)
        self._packed[position] = self.post(position, phase, chunk, buffer)
        buffer.drop()
        return True

    def _first_things_done(self) -> bool:
        links = self.mesh.links
        return not any(self._jobs.values()) and all(links[p].taken(mark) for p, mark in self._packed.items())

    def _job(self, pending: int) -> tuple[int, tuple[int, Chunk]] | None:
        """The next chunk to pack, for a link that has no more than so many pending.

        Links that share a wire go in step, the one that is furthest behind first: a sum needs everyone's
        chunk, and TCP, left to itself, serves the connection that started first. Links through memory go
        each by itself; waiting for one there could be waiting for oneself.
        """
        links, behind = self.mesh.links, None
        for position, jobs in self._jobs.items():
            if jobs and links[position].shared:
                if links[position].pending <= pending:
                    return position, jobs.popleft()
            elif jobs and (behind is None or len(jobs) > len(self._jobs[behind])):
                behind = position
        if behind is None or links[behind].pending > pending:
            return None
        return behind, self._jobs[behind].popleft()

    @property
    def idle(self) -> bool:
        """Whether there is no work, until further messages come."""
        return not (self._todo or self._held or self._borrowed or any(self._jobs.values()))

    def stuck_on(self) -> set[int]:
        """Also those for whom chunks wait to be packed."""
        return super().stuck_on() | {position for position, jobs in self._jobs.items() if jobs}

    def later(self, work: Callable[[], None]) -> None:
        """Do some work at a later step, in the order of asking."""
        self._todo.append(work)

    def pack_for(self, position: int, phase: int, chunk: Chunk) -> None:
        """Pack and send a chunk when the link has room for it."""
        self._jobs.setdefault(position, deque()).append((phase, chunk))

    def post(self, position: int, phase: int, chunk: Chunk, buffer: Buffer) -> int:
        """Send a chunk that was owed; returns the link's mark."""
        self.report.plain_bytes += 4 * chunk.count
        return self.send(position, phase, chunk.share, chunk.number, buffer)

    # Packing and unpacking.

    @property
    def numbers(self) -> Tensor:
        """The whole buffer, from begin to finish."""
        assert self._numbers is not None, "an exchange has numbers while it is under way"
        return self._numbers

    def part(self, segment: Segment) -> Tensor:
        """The segment's numbers."""
        return self.numbers[segment.start : segment.start + segment.count]

    def pack(self, phase: int, chunk: Chunk, *, shared: bool) -> Buffer:
        """The chunk's numbers as a message; of numbers that travel as they are no copy is made."""
        begun_ns = time.perf_counter_ns()
        feedback = self.task.feedback
        if feedback is not None:
            for segment in chunk.segments:
                feedback.add_to(self.part(segment), segment.start)
        if plain(chunk):
            buffer = self._as_it_is(self.part(chunk.segments[0]), shared)
            if feedback is not None:
                feedback.forget(chunk.segments[0].start, chunk.count)
        else:
            buffer = self.mesh.arena.take(chunk.bytes)
            for segment in chunk.segments:
                compress = feedback.compress if feedback is not None else _compress
                compress(
                    segment.piece.codec,
                    self.part(segment),
                    buffer.tensor[segment.offset : segment.offset + segment.bytes],
                    key=self.task.key(phase, segment.piece.name),
                    first=segment.first,
                    start=segment.start,
                )
        self.report.pack_s += self._took("pack", begun_ns, chunk)
        return buffer

    def _as_it_is(self, part: Tensor, shared: bool) -> Buffer:
        if not shared:
            self._borrowed += 1
            return borrowed(part, self._returned)
        buffer = self.mesh.arena.take(4 * part.numel())
        buffer.tensor.view(torch.float32).copy_(part)
        return buffer

    def unpack(self, chunk: Chunk, buffer: Buffer, *, add: bool) -> None:
        """Write a message's numbers over the chunk's, or add them."""
        begun_ns = time.perf_counter_ns()
        if plain(chunk):
            part, numbers = self.part(chunk.segments[0]), buffer.tensor.view(torch.float32)
            part.add_(numbers) if add else part.copy_(numbers)
        else:
            for segment in chunk.segments:
                payload = buffer.tensor[segment.offset : segment.offset + segment.bytes]
                segment.piece.codec.extract(payload, self.part(segment), add=add)
        self.report.unpack_s += self._took("unpack", begun_ns, chunk)

    def complete(self, chunk: Chunk, targets: Iterable[int]) -> None:
        """The chunk's sum is there: divide it and, where that is asked for, send it to all."""
        if self.task.divisor > 1:
            for segment in chunk.segments:
                self.part(segment).div_(self.task.divisor)
        if not self.task.gather:
            return
        positions = list(targets)
        shared = any(self.mesh.links[position].shared for position in positions)
        buffer = self.pack(TOTAL, chunk, shared=shared)
        for position in positions:
            self._held.append((position, chunk, buffer.hold()))
        if not plain(chunk):
            self.unpack(chunk, buffer, add=False)
        buffer.drop()

    def total(self, label: Label, buffer: Buffer, forward: Iterable[int]) -> None:
        """Take a sum that has come from its owner, and pass it on."""
        chunk = self.chunk(*label[1:])
        for position in forward:
            self.post(position, TOTAL, chunk, buffer)
        if label in self._direct:
            self._direct.discard(label)
        else:
            self.unpack(chunk, buffer, add=False)
        buffer.drop()

    def destination(self, label: Label) -> Buffer | None:
        """A sum that travels as it is can be received where it belongs."""
        if label[1] != TOTAL:
            return None
        chunk = self.chunk(*label[1:])
        if not plain(chunk):
            return None
        self._direct.add(label)
        self._borrowed += 1
        return borrowed(self.part(chunk.segments[0]), self._returned)

    def _returned(self) -> None:
        self._borrowed -= 1

    def _took(self, name: str, begun_ns: int, chunk: Chunk) -> float:
        now_ns = time.perf_counter_ns()
        if self.task.timeline is not None:
            info = {"operation": self.sequence, "share": chunk.share, "chunk": chunk.number}
            self.task.timeline.record("compress", name, begun_ns, now_ns, **info)
        return (now_ns - begun_ns) / 1e9


def plain(chunk: Chunk) -> bool:
    """Whether the chunk travels as it lies in memory."""
    return len(chunk.segments) == 1 and isinstance(chunk.segments[0].piece.codec, Exact)


def as_plain(chunk: Chunk) -> Chunk:
    """The same chunk, uncompressed."""
    segments: list[Segment] = []
    for start, stop in merged((s.start, s.start + s.count) for s in chunk.segments):
        piece = Piece(name="", count=stop - start, codec=Exact())
        offset = aligned(segments[-1].offset + segments[-1].bytes) if segments else 0
        segments.append(Segment(piece, start, piece.count, 0, offset, 4 * piece.count))
    return Chunk(chunk.share, chunk.number, tuple(segments))


def _compress(codec: Codec, numbers: Tensor, payload: Tensor, *, key: int, first: int, start: int) -> None:
    codec.compress(numbers, payload, key=key, first=first)
