"""A segment's content piece by piece, for those who pass it on and need not have it whole."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial

from plait.errors import UsageError
from plait.spill.admission import Admission, no_content
from plait.spill.claim import Claim, Lease
from plait.spill.disk import blocks
from plait.spill.guard import Guard
from plait.spill.holding import Holding
from plait.spill.movement import Movement
from plait.spill.segment import Segment


class Streaming:
    """Streams of a store's segments."""

    def __init__(self, guard: Guard, movement: Movement, admission: Admission) -> None:
        self._guard = guard
        self._movement = movement
        self._admission = admission

    def stream(self, holding: Holding) -> Iterator[memoryview]:
        """From memory where it is there, else from the disk."""
        key = holding.segment.key
        with self._guard.changing():
            self._guard.wait(lambda: holding.state in ("absent", "present") or holding.doomed)
            if holding.writer or holding.doomed:
                why = "was dropped" if holding.doomed else "is being changed"
                raise UsageError(f"{key} {why}", setting="key", works="a segment that nobody changes")
            if not holding.filled:
                raise no_content([holding])
            in_memory = holding.state == "present"
            holding.holders += in_memory
            holding.streams += 1
        try:
            yield from self._in_memory(holding) if in_memory else self._on_disk(holding)
        finally:
            with self._guard.changing(check=False):
                holding.holders -= in_memory
                holding.streams -= 1

    def _in_memory(self, holding: Holding) -> Iterator[memoryview]:
        for offset, size in blocks(holding.segment.nbytes):
            at = holding.place + offset
            yield self._movement.arena.memory[at : at + size]

    def _on_disk(self, holding: Holding) -> Iterator[memoryview]:
        """Through a buffer for one block, which is a segment that only its claim knows."""
        nbytes, copy = holding.segment.nbytes, holding.current
        assert copy is not None
        _, size = next(blocks(nbytes))
        segment = Segment(key=f"{holding.segment.key} (stream)", nbytes=size, persistent=False)
        buffer = Holding(segment=segment, file=holding.file, slots=[])
        future: Future[Lease] = Future()
        claim = Claim(wants={buffer: "write"}, future=future, release=self._admission.release)
        # The store may be closed before the stream ends.
        file, disk = holding.file.duplicate(), holding.slots[copy.slot]
        moved = 0
        try:
            with self._guard.changing():
                self._admission.add(claim)
            place = future.result().places[segment.key]
            for (offset, size), checksum in zip(blocks(nbytes), copy.checksums, strict=True):
                block = self._movement.arena.memory[place : place + size]
                read = partial(file.read, disk + offset, block, checksum)
                moved += self._movement.timed("disk read", holding.segment.key, size, read)
                yield block
        finally:
            file.close()
            with self._guard.changing(check=False):
                self._movement.read_bytes += moved
                self._admission.withdraw(claim)
                self._movement.drop(buffer)
