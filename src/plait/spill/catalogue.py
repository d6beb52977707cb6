"""Which segments there are, and the room that they have on the disk."""

from __future__ import annotations

from plait.errors import UsageError
from plait.spill.disk import Disk
from plait.spill.group import Group
from plait.spill.holding import Holding
from plait.spill.segment import Segment


class Catalogue:
    """All segments and groups of a store; called with its lock held."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.holdings: dict[str, Holding] = {}
        self.groups: dict[str, Group] = {}
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

    def add(self, segment: Segment, *, slots: int) -> None:
        """A new segment; one that is part of commits gets its room on the disk now."""
        on_disk = (g.scratch.held_bytes for g in self.groups.values() if g.scratch is not None)
        self._disk.check_room(
            segment.nbytes * (slots if segment.persistent else 1),
            reserved_bytes=self.reserved_bytes,
            promised_bytes=max(0, self._scratch_bytes - sum(on_disk)),
            what=f"segment {segment.key}",
        )
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
