"""How segments come into memory and leave it; which ones do is decided elsewhere.

Everything here is called with the store's lock held, and the ends of transfers take it first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial

from plait.errors import PlaitError
from plait.spill.arena import Arena, without
from plait.spill.disk import SegmentFile, blocks
from plait.spill.holding import Holding
from plait.spill.manifest import Copy
from plait.spill.placement import Plan
from plait.spill.traffic import Pool, Transfer
from plait.timeline import Timeline

DEMAND, COMMIT, AHEAD, BEHIND = range(4)
"""What goes first: what is waited for, commits, reading ahead, writing behind."""
READERS, WRITERS = 2, 2
"""Two requests of 16 MiB in flight keep a disk busy while the checksum of a third is taken."""


class Movement:
    """The arena, the threads, and the transfers between them."""

    def __init__(
        self,
        arena: Arena,
        *,
        landing: Callable[[], AbstractContextManager[None]],
        failed: Callable[[Holding, BaseException], None],
        saved: Callable[[Holding, BaseException | None], None],
        vanished: Callable[[Holding], None],
        timeline: Timeline | None,
    ) -> None:
        """``failed``: it cannot be brought in; ``saved``: it was written, or not; ``vanished``: dropped."""
        self.arena = arena
        self.readers, self.writers = Pool(READERS, "reader"), Pool(WRITERS, "writer")
        self._landing = landing
        self._failed, self._saved, self._vanished = failed, saved, vanished
        self._timeline = timeline
        self.read_bytes = self.written_bytes = self.evictions = 0

    def bring(self, plan: Plan[Holding], *, blank: Mapping[Holding, bool], priority: int) -> None:
        """Follow a plan: those leaving leave, the others come, with their content unless ``blank``."""
        for victim in plan.leaving:
            self.evict(victim, priority)
        leaving = [victim for victim in plan.leaving if victim.state == "leaving"]
        for holding, place in plan.places.items():
            holding.place, holding.state = place, "reserved"
            holding.wants_content = not blank[holding]
            start, end = holding.range
            holding.waits_for = {v for v in leaving if v.range[0] < end and start < v.range[1]}
            for victim in holding.waits_for:
                victim.heirs.add(holding)
            self._take_around(holding)
            self._arrive(holding, priority)

    def _take_around(self, holding: Holding) -> None:
        for start, end in without(holding.range, [victim.range for victim in holding.waits_for]):
            self.arena.take(start, end - start)

    def _arrive(self, holding: Holding, priority: int) -> None:
        """All of its place is its own, or nothing happens."""
        if holding.waits_for:
            return
        if holding.wants_content:
            self._load(holding, priority)
        else:
            holding.state = "blank"

    def evict(self, holding: Holding, priority: int) -> None:
        """Let it go: at once where the disk has it, else once it is written."""
        assert holding.state == "present", f"{holding.segment.key} is {holding.state}"
        assert not holding.holders, f"{holding.segment.key} is in use"
        self.evictions += 1
        if holding.dirty:
            holding.state = "leaving"
            self.save(holding, priority)
        else:
            self._free(holding)

    def _free(self, holding: Holding) -> None:
        """Its memory is free, and its heirs get what they were waiting for."""
        start, end = holding.range
        self.arena.space.free(start, end - start)
        for heir in holding.heirs:
            first, last = max(start, heir.range[0]), min(end, heir.range[1])
            self.arena.take(first, last - first)
            heir.waits_for.discard(holding)
        heirs, holding.heirs = holding.heirs, set()
        holding.state, holding.place = "absent", -1
        for heir in sorted(heirs, key=lambda heir: heir.place):
            self._arrive(heir, DEMAND if heir.holders else AHEAD)

    def give_up(self, holding: Holding) -> None:
        """Take back a reservation, or a place that nothing was written to."""
        if holding.state == "blank":
            self._free(holding)
            return
        assert holding.state == "reserved"
        for start, end in without(holding.range, [victim.range for victim in holding.waits_for]):
            self.arena.space.free(start, end - start)
        for victim in holding.waits_for:
            victim.heirs.discard(holding)
        holding.waits_for = set()
        holding.state, holding.place = "absent", -1

    def hurry(self, holding: Holding, priority: int) -> None:
        """Somebody waits for it now: it, and what leaves for it, go first."""
        for other in (holding, *holding.waits_for):
            if other.transfer is not None:
                other.transfer.priority = min(other.transfer.priority, priority)

    def _load(self, holding: Holding, priority: int) -> None:
        copy = holding.current
        assert copy is not None, f"{holding.segment.key} has no content on the disk"
        holding.state, holding.saving, holding.trouble = "loading", False, None
        disk, file = holding.slots[copy.slot], holding.file
        pieces = []
        for (offset, size), checksum in zip(blocks(holding.segment.nbytes), copy.checksums, strict=True):
            at = holding.place + offset
            block = self.arena.memory[at : at + size]
            work = partial(file.read, disk + offset, block, checksum)
            pieces.append(partial(self.timed, "disk read", holding.segment.key, size, work))
        holding.transfer = Transfer(pieces, partial(self._loaded, holding), priority=priority)
        self.readers.submit(holding.transfer)

    def _loaded(self, holding: Holding, transfer: Transfer) -> None:
        with self._landing():
            holding.transfer = None
            self.read_bytes += transfer.moved_bytes
            if holding.doomed:
                self._vanish(holding)
            elif transfer.error is not None:
                self._free(holding)
                holding.trouble = transfer.error
                self._failed(holding, transfer.error)
            else:
                holding.state = "present"

    def save(self, holding: Holding, priority: int) -> None:
        """Write it to the disk, into a slot that no commit needs; where there is none yet, ask again."""
        assert holding.dirty, f"{holding.segment.key} is on the disk already"
        assert not holding.writer, f"{holding.segment.key} is being changed"
        if holding.transfer is not None:
            holding.transfer.priority = min(holding.transfer.priority, priority)
            return
        size_bytes = holding.segment.nbytes
        slot: int | None = 0
        pieces: list[Callable[[], int]] = []
        checksums = [0] * len(list(blocks(size_bytes)))
        try:
            if holding.file.failed is not None:
                raise holding.file.failed
            if holding.segment.persistent:
                slot = holding.free_slot
            elif not holding.slots:
                holding.slots.append(holding.file.reserve(size_bytes))
        except PlaitError as error:
            pieces.append(partial(_raise, error))
        else:
            if slot is None:
                return
            for number, (offset, size) in enumerate(blocks(size_bytes)):
                at = holding.place + offset
                block, disk = self.arena.memory[at : at + size], holding.slots[slot] + offset
                work = partial(_write, holding.file, disk, block, checksums, number)
                pieces.append(partial(self.timed, "disk write", holding.segment.key, size, work))
        holding.current, holding.saving, holding.trouble = None, True, None
        done = partial(self._written, holding, slot or 0, checksums)
        holding.transfer = Transfer(pieces, done, priority=priority)
        self.writers.submit(holding.transfer)

    def timed(self, track: str, key: str, size: int, work: Callable[[], None]) -> int:
        """Do some work on a segment, which the timeline shows; returns the bytes given."""
        if self._timeline is None:
            work()
        else:
            with self._timeline.span(track, "/".join(key.split("/")[:2]), key=key, bytes=size):
                work()
        return size

    def _written(self, holding: Holding, slot: int, checksums: list[int], transfer: Transfer) -> None:
        with self._landing():
            holding.transfer, holding.saving = None, False
            self.written_bytes += transfer.moved_bytes
            if holding.doomed:
                self._vanish(holding)
            elif transfer.error is not None:
                self._keep(holding, transfer.error)
                self._saved(holding, transfer.error)
            elif not transfer.cancelled:
                holding.current, holding.dirty = Copy(slot, tuple(checksums)), False
                if holding.state == "leaving":
                    self._free(holding)
                self._saved(holding, None)

    def _keep(self, holding: Holding, error: BaseException) -> None:
        """It could not be written, so it stays, and who was to have its room does without."""
        holding.trouble = error
        if holding.state == "leaving":
            holding.state = "present"
            for heir in list(holding.heirs):
                self.give_up(heir)
                self._failed(heir, error)

    def drop(self, holding: Holding) -> None:
        """Forget it, in memory and on the disk; ``vanished`` says when."""
        assert not holding.holders, f"{holding.segment.key} is in use"
        holding.doomed = True
        if holding.transfer is not None:
            (self.writers if holding.saving else self.readers).cancel(holding.transfer)
        else:
            self._vanish(holding)

    def _vanish(self, holding: Holding) -> None:
        if holding.state == "reserved":
            self.give_up(holding)
        elif holding.state != "absent":
            self._free(holding)
        self._vanished(holding)

    def close(self) -> None:
        """End the threads; without the lock."""
        self.readers.close()
        self.writers.close()


def _raise(error: Exception) -> int:
    raise error


def _write(file: SegmentFile, offset: int, block: memoryview, checksums: list[int], number: int) -> None:
    checksums[number] = file.write(offset, block)
