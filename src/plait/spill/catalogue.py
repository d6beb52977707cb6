"""Which segments there are, and the room that they have on the disk."""

from __future__ import annotations

from collections.abc import Iterable

from plait.errors import FileError, UsageError
from plait.spill.disk import Disk
from plait.spill.group import Group
from plait.spill.holding import Holding
from plait.spill.segment import Mode, Request, Segment


class Catalogue:
    """All segments and groups of a store; called with its lock held."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.holdings: dict[str, Holding] = {}
        self.groups: dict[str, Group] = {}
        self.damaged: dict[str, FileError] = {}
        """Groups that a directory holds and that cannot be read, with the reasons."""
        self.vanishing: set[Holding] = set()
        """Dropped, with a transfer under way."""
        self._scratch_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        """The room that segments have been given on the disk, whether they are there yet or not."""
        files = (group.file for group in self.groups.values())
        return self._scratch_bytes + sum(file.reserved_bytes for file in files if file is not None)

    def __getitem__(self, key: str) -> Holding:
        holding = self.holdings.get(key)
        if holding is None:
            raise UsageError(
                f"there is no segment {key}; {len(self.holdings)} others are defined",
                setting="key",
                works=next(iter(self.holdings), "one that was defined"),
            )
        return holding

    def of(self, group: Group) -> list[Holding]:
        """The segments of a group."""
        return [h for h in self.holdings.values() if h.segment.group == group.name]

    def wanted(self, requests: Iterable[Request]) -> dict[Holding, Mode]:
        """What requests ask for, each segment once."""
        modes: dict[str, Mode] = {}
        for request in requests:
            if modes.setdefault(request.key, request.mode) != request.mode:
                modes[request.key] = "change"
        wants = {self[key]: mode for key, mode in modes.items()}
        fixed = [holding.segment.key for holding, mode in wants.items() if mode != "read" and holding.fixed]
        if fixed:
            raise UsageError(
                f"{', '.join(fixed[:3])} is constant, and was committed",
                setting="mode",
                works="read, or define it as one that changes",
            )
        return wants

    def missing_bytes(self, requests: Iterable[Request]) -> int:
        """How much of what these ask for is not in memory."""
        held = (self.holdings.get(key) for key in {r.key for r in requests if r.mode != "write"})
        return sum(h.segment.nbytes for h in held if h is not None and h.state in ("absent", "leaving"))

    def check_room(self, nbytes: int, *, what: str) -> None:
        """Raise unless the disk has so much room, beside what it was promised for already."""
        on_disk = (g.scratch.held_bytes for g in self.groups.values() if g.scratch is not None)
        self._disk.check_room(
            nbytes,
            reserved_bytes=self.reserved_bytes,
            promised_bytes=max(0, self._scratch_bytes - sum(on_disk)),
            what=what,
        )

    def define(self, segment: Segment, *, slots: int) -> None:
        """A segment that is new, or known as it is; one that is part of commits gets its room on the disk."""
        known = self.holdings.get(segment.key)
        if known is None:
            self._add(segment, slots=slots)
        elif known.segment != segment:
            raise UsageError(
                f"segment {segment.key} is known with {known.segment.nbytes} bytes and"
                f" {len(known.segment.entries)} tensors, not with these {segment.nbytes} bytes and"
                f" {len(segment.entries)} tensors",
                setting="segment",
                works="the one it was defined as, or drop it first",
            )

    def _add(self, segment: Segment, *, slots: int) -> None:
        nbytes = segment.nbytes * (slots if segment.persistent else 1)
        self.check_room(nbytes, what=f"segment {segment.key}")
        new = segment.group not in self.groups
        group = self.groups.get(segment.group) or Group(segment.group, self._disk)
        places: list[int] = []
        try:
            file = group.file_for(persistent=segment.persistent)
            while segment.persistent and len(places) < slots:
                places.append(file.reserve(segment.nbytes))
        except BaseException:
            for place in places:
                file.release(place, segment.nbytes)
            if new:
                group.close(keep=False)
            raise
        self.groups[segment.group] = group
        self.holdings[segment.key] = Holding(segment=segment, file=file, slots=places)
        self._scratch_bytes += 0 if segment.persistent else segment.nbytes

    def restore(self, name: str) -> None:
        """The segments of a group, as of its last commit."""
        group = self.groups.get(name) or Group(name, self._disk)
        try:
            restored = group.restore()
        except BaseException:
            if name not in self.groups and group.file is not None:
                group.file.close()
            raise
        self.groups[name] = group
        self.holdings |= {holding.segment.key: holding for holding in restored}

    def remove(self, holding: Holding, *, keep_room: bool) -> None:
        """It is not to be found any more; its room is free when it has vanished, unless that is to stay."""
        del self.holdings[holding.segment.key]
        self.vanishing.add(holding)
        self._scratch_bytes -= 0 if holding.segment.persistent else holding.segment.nbytes
        if keep_room:
            holding.slots = []

    def vanished(self, holding: Holding) -> None:
        """Nothing of it moves any more."""
        self.vanishing.discard(holding)
        for slot, offset in enumerate(holding.slots):
            if holding.committed is not None and slot == holding.committed.slot:
                self.groups[holding.segment.group].graves.append((offset, holding.segment.nbytes))
            else:
                holding.file.release(offset, holding.segment.nbytes)

    def close(self, *, keep: bool) -> None:
        """Close all files; only what is committed stays, and that only where it is to be kept."""
        for group in self.groups.values():
            group.close(keep=keep)
        self.groups.clear()
