"""The store: named segments in a fixed amount of memory, with the disk below it.

Segments come into memory when they are requested, or before, where it is known what comes next, and leave it
when others need the room. A commit makes a group's segments, as they are then, survive whatever happens
afterwards. All of it is safe to call from any thread; what has to wait gives a future.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from plait.cluster.machine import memory_limit_bytes, memory_total_bytes
from plait.errors import FileError, UsageError
from plait.spill.admission import Admission
from plait.spill.arena import Arena
from plait.spill.catalogue import Catalogue
from plait.spill.claim import Claim, Lease
from plait.spill.committing import Committing
from plait.spill.disk import Disk
from plait.spill.group import Group, clear_leftovers, committed_groups
from plait.spill.guard import Guard, closed
from plait.spill.holding import Holding
from plait.spill.manifest import check_note
from plait.spill.movement import Movement
from plait.spill.segment import PAGE_BYTES, Request, Segment
from plait.spill.statistics import Statistics
from plait.spill.stream import Streaming
from plait.timeline import Timeline
from plait.units import format_bytes, parse_whole

__all__ = ["Lease", "Statistics", "Store"]


class Store:
    """Segments in memory and on disk; made with ``create`` or ``open``, ended with ``close``."""

    def __init__(self, disk: Disk, memory_bytes: int, timeline: Timeline | None) -> None:
        self._disk = disk
        self._guard = Guard()
        self._arena = Arena(memory_bytes)
        self._catalogue = Catalogue(disk)
        self._movement = Movement(
            self._arena,
            landing=self._guard.landing,
            failed=lambda holding, error: self._admission.failed(holding, error),
            saved=self._saved,
            vanished=self._catalogue.vanished,
            timeline=timeline,
        )
        self._admission = Admission(self._movement, self._catalogue.holdings, self._guard.answer)
        self._committing = Committing(self._movement.writers, self._guard)
        self._streaming = Streaming(self._guard, self._movement, self._admission)
        self._clearing: set[str] = set()
        """Groups that are being dropped or reverted."""
        self._guard.settle = self._admission.settle
        self._guard.unanswered = self._unanswered

    @classmethod
    def create(
        cls,
        directory: str | Path,
        *,
        memory_bytes: int,
        disk_bytes: int | None = None,
        timeline: Timeline | None = None,
    ) -> Store:
        """A new store in a directory that holds none; without ``disk_bytes`` it may fill the disk."""
        store = cls._made(Path(directory), memory_bytes, disk_bytes, timeline)
        try:
            found = committed_groups(store._disk.directory)
            if found:
                raise FileError(
                    f"{directory} holds committed state of {', '.join(found[:5])}, which would be lost",
                    setting="directory",
                    works="resume from it, or an empty directory",
                )
        except BaseException:
            store.close(keep=True)
            raise
        return store

    @classmethod
    def open(
        cls,
        directory: str | Path,
        *,
        memory_bytes: int,
        disk_bytes: int | None = None,
        timeline: Timeline | None = None,
        skip_damaged: bool = False,
    ) -> Store:
        """The store that a directory holds, every group as of its last commit; there may be none yet.

        ``skip_damaged`` leaves groups that cannot be read as they are: ``damaged`` says why.
        """
        store = cls._made(Path(directory), memory_bytes, disk_bytes, timeline)
        try:
            for name in committed_groups(store._disk.directory):
                try:
                    store._catalogue.restore(name)
                except FileError as error:
                    if not skip_damaged:
                        raise
                    store.damaged[name] = error
            taken = store._catalogue.reserved_bytes
            if disk_bytes is not None and taken > disk_bytes:
                raise UsageError(
                    f"{directory} holds {format_bytes(taken)}, and the budget is {format_bytes(disk_bytes)}",
                    setting="disk_bytes",
                    works=f"{taken} or more",
                )
        except BaseException:
            store.close(keep=True)
            raise
        return store

    @classmethod
    def _made(
        cls, directory: Path, memory_bytes: int, disk_bytes: int | None, timeline: Timeline | None
    ) -> Store:
        parse_whole(memory_bytes, setting="memory_bytes")
        if disk_bytes is not None:
            parse_whole(disk_bytes, setting="disk_bytes")
        limit = memory_limit_bytes() or memory_total_bytes()
        if memory_bytes > limit:
            raise UsageError(
                f"{format_bytes(memory_bytes)} of memory are asked for, and there are {format_bytes(limit)}",
                setting="memory_bytes",
                works=f"less than {limit}",
            )
        disk = Disk(directory, budget_bytes=disk_bytes)
        try:
            clear_leftovers(directory)
            return cls(disk, memory_bytes, timeline)
        except BaseException:
            disk.close()
            raise

    @property
    def damaged(self) -> dict[str, FileError]:
        """Groups that the directory holds and that cannot be read, with the reasons."""
        return self._catalogue.damaged

    @property
    def arena_fd(self) -> int:
        """The descriptor by which other processes map the memory."""
        return self._arena.fd

    @property
    def arena_bytes(self) -> int:
        """How much memory there is."""
        return self._arena.space.nbytes

    @property
    def memory(self) -> memoryview:
        """The memory itself; a lease says where in it a segment is."""
        return self._arena.memory

    def define(self, segment: Segment, *, constant: bool = False) -> None:
        """Make a segment known and reserve its room on the disk; one that is known already stays as it is.

        ``constant`` says that it never changes after the first commit that it is in: it then takes half the
        room, a single slot.
        """
        nbytes = segment.nbytes
        if nbytes <= 0 or nbytes % PAGE_BYTES or nbytes > self.arena_bytes:
            raise UsageError(
                f"segment {segment.key} has {nbytes} bytes, and the memory {self.arena_bytes}",
                setting="segment",
                works=f"whole pages of {PAGE_BYTES} bytes, no more than the memory",
            )
        with self._guard.changing():
            self._guard.wait(lambda: segment.group not in self._clearing)
            if segment.group in self.damaged:
                raise self.damaged[segment.group]
            self._catalogue.define(segment, slots=1 if constant else 2)

    def check_room(self, nbytes: int, *, what: str) -> None:
        """Raise unless the disk has room for so much more; ``what`` needs it."""
        with self._guard.changing():
            self._catalogue.check_room(nbytes, what=what)

    def request(self, requests: Iterable[Request]) -> Future[Lease]:
        """Ask for segments to be in memory, all of them or none; the future gives the lease.

        Who writes or changes a segment has it alone; who reads it shares it with others who do. The
        future's callbacks must not wait for the store: they run in the threads that it needs.
        """
        future: Future[Lease] = Future()
        with self._guard.changing():
            wants = self._catalogue.wanted(requests)
            need = sum(holding.segment.nbytes for holding in wants)
            if need > self.arena_bytes:
                raise UsageError(
                    f"{len(wants)} segments with {format_bytes(need)} are needed at once, and the memory is"
                    f" {format_bytes(self.arena_bytes)}",
                    setting="memory_bytes",
                    works=f"{need} or more",
                )
            self._admission.add(Claim(wants=wants, future=future, release=self._release))
        future.add_done_callback(self._cancelled)
        return future

    def _cancelled(self, future: Future[Lease]) -> None:
        if future.cancelled():  # others may have waited behind it
            with self._guard.changing(check=False):
                pass

    def _release(self, claim: Claim) -> None:
        with self._guard.changing(check=False):
            self._admission.release(claim)

    def missing_bytes(self, requests: Iterable[Request]) -> int:
        """How much of what these ask for would have to be read from the disk now; unknown keys count 0."""
        with self._guard.reading():
            return self._catalogue.missing_bytes(requests)

    def expect(self, upcoming: Sequence[Sequence[Request]]) -> None:
        """Say what will be requested, in which order; it replaces what was said before.

        Keys that are not known, or not yet, are allowed; where their size is told, room is left for them.
        """
        with self._guard.changing():
            self._admission.expect(upcoming)

    def drop(self, key: str) -> None:
        """Forget a segment; its memory and disk are free at once, except what the last commit needs of it.

        Requests for it that were not granted fail. Waits for a commit of its group.
        """
        with self._guard.changing():
            self._quiet(self._catalogue[key].segment.group)
            self._drop([self._catalogue[key]])

    def drop_group(self, group: str) -> None:
        """Forget all of a group, its commits too; a group that is not known needs no forgetting."""
        with self._guard.changing(), self._cleared(group) as known:
            if known is not None:
                self._catalogue.groups.pop(group).close(keep=False)

    def revert(self, group: str) -> None:
        """Go back to the group's last commit, as ``open`` does; without one, nothing of it is left."""
        with self._guard.changing(), self._cleared(group) as known:
            if known is not None and known.manifest is not None:
                self._catalogue.restore(group)
            elif known is not None:
                self._catalogue.groups.pop(group).close(keep=False)

    def _quiet(self, group: str) -> Group | None:
        """The group, when nobody commits or clears it."""
        groups = self._catalogue.groups
        self._guard.wait(
            lambda: group not in self._clearing and (group not in groups or groups[group].commit is None)
        )
        return groups.get(group)

    @contextmanager
    def _cleared(self, name: str) -> Iterator[Group | None]:
        """The group without its segments, but with their room, when nothing of it moves any more."""
        group = self._quiet(name)
        if group is not None:
            self._drop(self._catalogue.of(group), keep_room=True)
            vanishing = self._catalogue.vanishing
            self._clearing.add(name)
            try:
                self._guard.wait(lambda: not any(h.segment.group == name for h in vanishing))
            finally:
                self._clearing.remove(name)
        yield group

    def _drop(self, holdings: list[Holding], *, keep_room: bool = False) -> None:
        dropped = set(holdings)
        claims = [claim for claim in self._admission.claims if not dropped.isdisjoint(claim.wants)]
        leased = {h for claim in self._admission.granted for h in claim.wants}
        in_use = [h.segment.key for h in holdings if h in leased or h.streams]
        if in_use:
            raise UsageError(
                f"{', '.join(in_use[:3])} cannot be dropped while in use",
                setting="key",
                works="release first",
            )
        names = ", ".join(h.segment.key for h in holdings[:3])
        self._admission.fail(
            claims, UsageError(f"{names} was dropped", setting="key", works="a segment that is defined")
        )
        for holding in holdings:
            self._catalogue.remove(holding, keep_room=keep_room)
            self._movement.drop(holding)

    def commit(self, group: str, note: Mapping[str, Any]) -> Future[None]:
        """Make the group's segments as they are now, and a note, what survives; all of it or nothing.

        Nobody may be changing segments of the group, or have asked to; from the call on they may, and wait
        where they must.
        """
        plain = check_note(note)
        future: Future[None] = Future()
        with self._guard.changing():
            self._guard.wait(lambda: group not in self._clearing)
            known = self._catalogue.groups.get(group)
            if known is None:
                names = ", ".join(sorted(self._catalogue.groups)[:5])
                raise UsageError(f"there is no group {group}", setting="group", works=names or "define first")
            if changing := self._admission.changing(group):
                raise UsageError(
                    f"{group} cannot be committed while {', '.join(changing[:3])} is being changed",
                    setting="group",
                    works="release it first",
                )
            holdings = [h for h in self._catalogue.of(known) if h.segment.persistent]
            self._committing.begin(known, plain, holdings, future)
        return future

    def _saved(self, holding: Holding, error: BaseException | None) -> None:
        self._committing.saved(self._catalogue.groups[holding.segment.group], holding, error)

    def committed(self, group: str) -> dict[str, Any] | None:
        """The note of the group's last commit, or None without one."""
        with self._guard.reading():
            known = self._catalogue.groups.get(group)
            return None if known is None or known.manifest is None else check_note(known.manifest.note)

    def groups(self) -> tuple[str, ...]:
        """All groups that have a commit or segments."""
        with self._guard.reading():
            return tuple(sorted(self._catalogue.groups))

    def segments(self, group: str) -> tuple[Segment, ...]:
        """The segments of a group."""
        with self._guard.reading():
            known = self._catalogue.groups.get(group)
            return () if known is None else tuple(h.segment for h in self._catalogue.of(known))

    def stream(self, key: str) -> Iterator[memoryview]:
        """A segment's content, piece by piece, each good until the next: it need not come into memory whole.

        Where it is on the disk, memory for one block is taken while it lasts. Nobody can change the segment
        meanwhile.
        """
        with self._guard.reading():
            holding = self._catalogue[key]
        return self._streaming.stream(holding)

    def statistics(self) -> Statistics:
        """What was done so far."""
        with self._guard.reading():
            return Statistics(
                read_bytes=self._movement.read_bytes,
                written_bytes=self._movement.written_bytes,
                peak_bytes=self._arena.peak_bytes,
                disk_bytes=self._catalogue.reserved_bytes,
                requests=self._admission.requests,
                waits=self._admission.waits,
                waited_s=self._admission.waited_s,
                evictions=self._movement.evictions,
                commits=self._committing.count,
            )

    def close(self, *, keep: bool) -> None:
        """End: with ``keep`` what is committed stays on the disk, without it nothing does.

        Commits under way are finished first; requests that were not granted fail.
        """
        with self._guard.changing(check=False):
            groups, vanishing = self._catalogue.groups.values(), self._catalogue.vanishing
            self._guard.wait(lambda: all(group.commit is None for group in groups), check=False)
            if not self._guard.close():
                return
            self._admission.fail(self._admission.claims, closed())
            for holding in list(self._catalogue.holdings.values()):
                holding.holders = holding.streams = 0
                self._catalogue.remove(holding, keep_room=True)
                self._movement.drop(holding)
            self._guard.wait(lambda: not vanishing, check=False)
        self._movement.close()
        self._catalogue.close(keep=keep)
        self._disk.close()
        self._arena.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(keep=True)

    def _unanswered(self) -> list[Future[Any]]:
        granted = self._admission.granted
        commits = (group.commit for group in self._catalogue.groups.values())
        return [
            *(claim.future for claim in self._admission.claims if claim not in granted),
            *(commit.future for commit in commits if commit is not None),
        ]
