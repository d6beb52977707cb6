"""A group of segments: its files, and what of it is committed."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from plait.errors import FileError
from plait.spill.disk import ENDING, Disk, SegmentFile, damaged
from plait.spill.holding import Holding
from plait.spill.manifest import FILE_ENDING, PARTIAL_ENDING, Committed, Manifest, name_of


@dataclass(eq=False, kw_only=True)
class Commit:
    """A commit under way: first what is dirty is written, then the file is flushed, then the manifest."""

    note: dict[str, Any]
    future: Future[None]
    holdings: list[Holding]
    due: set[Holding] = field(default_factory=set)
    """Still to be written."""


class Group:
    """Segments that are committed together: a job's, or what several jobs share."""

    def __init__(self, name: str, disk: Disk) -> None:
        self.name = name
        self._disk = disk
        self._stem = name_of(name)
        self.file: SegmentFile | None = None
        """Of segments that are part of commits."""
        self.scratch: SegmentFile | None = None
        """Of the others; it has no name, and goes with the process."""
        self.manifest: Manifest | None = None
        self.commit: Commit | None = None
        self.graves: list[tuple[int, int]] = []
        """(offset, size) in the file of what was dropped, but is in the last commit."""

    def _path(self, ending: str) -> Path:
        return self._disk.directory / (self._stem + ending)

    def file_for(self, *, persistent: bool) -> SegmentFile:
        """The file that such a segment is in."""
        direct = self._disk.direct
        if not persistent:
            if self.scratch is None:
                path = self._path(" (scratch)")
                self.scratch = SegmentFile(path, direct=direct, named=False)
            return self.scratch
        if self.file is None:
            self.file = SegmentFile(self._path(FILE_ENDING), direct=direct)
            self._disk.sync()
        return self.file

    def restore(self) -> list[Holding]:
        """The segments as the last commit has them, which is read from the disk; all else is forgotten."""
        path = self._path(FILE_ENDING)
        self.manifest = Manifest.load(self._path(ENDING))
        if self.file is None:
            if not path.exists() and self.manifest.segments:
                what = f"{path}, which holds the segments of group {self.name!r}, is missing"
                raise damaged(what, path)
            self.file = SegmentFile(path, direct=self._disk.direct)
        self.file.forget()
        self.graves = []
        holdings = []
        for of in self.manifest.segments:
            self.file.check_size(max(of.slots) + of.segment.nbytes)
            for slot in of.slots:
                self.file.claim(slot, of.segment.nbytes)
            holdings.append(
                Holding(
                    segment=of.segment,
                    file=self.file,
                    slots=list(of.slots),
                    filled=of.copy is not None,
                    current=of.copy,
                    committed=of.copy,
                )
            )
        return holdings

    def conclude(self, manifest: Manifest) -> int:
        """Make a manifest the group's, once all that it speaks of is on the disk for good."""
        if self.file is not None:
            self.file.sync()
        partial = manifest.save(self._disk.directory)
        try:
            partial.replace(self._path(ENDING))
            self._disk.sync()
        except OSError as error:
            failure = FileError(
                f"{self._path(ENDING)} cannot be replaced: {error.strerror}; the last commit or the one"
                " before it is whole",
                setting="directory",
                works="a disk that takes what it is given; then resume",
            )
            if self.file is not None:
                self.file.failed = failure
            raise failure from None
        return 0

    def next_manifest(self, commit: Commit) -> Manifest:
        """What a commit whose segments are written will make the group's."""
        segments = tuple(
            Committed(segment=holding.segment, slots=tuple(holding.slots), copy=holding.pending)
            for holding in commit.holdings
        )
        number = 1 if self.manifest is None else self.manifest.number + 1
        return Manifest(group=self.name, number=number, note=commit.note, segments=segments)

    def release_graves(self) -> None:
        """Give back what only the commit before the last needed."""
        for offset, size in self.graves:
            assert self.file is not None
            self.file.release(offset, size)
        self.graves = []

    def close(self, *, keep: bool) -> None:
        """Close the files; they go unless what is committed is to be kept."""
        if self.scratch is not None:
            self.scratch.remove()
        if keep and self.manifest is not None:
            if self.file is not None:
                self.file.close()
            return
        # The manifest first: a file of segments without one is nobody's, and is cleared away.
        self._path(ENDING).unlink(missing_ok=True)
        self._disk.sync()
        if self.file is not None:
            self.file.remove()


def committed_groups(directory: Path) -> list[str]:
    """The groups that have a commit in a directory, by their manifests."""
    return sorted(unquote(path.stem) for path in directory.glob(f"*{ENDING}"))


def clear_leftovers(directory: Path) -> None:
    """Remove what killed runs left behind: files that no manifest speaks of, and half-written ones."""
    for path in directory.glob(f"*{FILE_ENDING}"):
        if not path.with_suffix(ENDING).exists():
            path.unlink()
    for pattern in (f"*{ENDING}{PARTIAL_ENDING}", f".scratch-*{PARTIAL_ENDING}"):
        for path in directory.glob(pattern):
            path.unlink()
