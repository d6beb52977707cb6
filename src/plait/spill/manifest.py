"""What a group has committed: which segments, where in its file, with which checksums, and a note.

The manifest is replaced as a whole (written beside its place, flushed, renamed), so a crash at any moment
leaves the old one or the new one; its own checksum tells a damaged one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from plait import native
from plait.errors import FileError, UsageError
from plait.spill.disk import BLOCK_BYTES, ENDING, damaged
from plait.spill.segment import Entry, Segment

FORMAT = "plait.spill.manifest/1"
FILE_ENDING = ".segments"
PARTIAL_ENDING = ".partial"
_LONGEST_NAME = 200


@dataclass(frozen=True)
class Copy:
    """A segment's content on the disk."""

    slot: int
    """Which of the segment's slots it is in."""
    checksums: tuple[int, ...]
    """CRC-32C of each block."""


@dataclass(frozen=True, kw_only=True)
class Committed:
    """A segment as a manifest knows it."""

    segment: Segment
    slots: tuple[int, ...]
    """Where each of its slots begins in the file."""
    copy: Copy | None
    """None where it had no content yet."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The committed state of a group."""

    group: str
    number: int
    """How many commits the group has had."""
    note: Mapping[str, Any]
    segments: tuple[Committed, ...]

    def save(self, directory: Path) -> Path:
        """Write it beside its place and wait until the disk has it; returns the file for ``replace``."""
        content = json.dumps(_content(self), separators=(",", ":"), sort_keys=True)
        head = json.dumps({"format": FORMAT, "checksum": _checksum(content)})
        partial = directory / (name_of(self.group) + ENDING + PARTIAL_ENDING)
        try:
            with partial.open("w", encoding="ascii") as file:
                file.write(f'{head[:-1]}, "content": {content}}}\n')
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise FileError(
                f"{partial} cannot be written: {error.strerror}; the commit before it is untouched",
                setting="directory",
                works="free room on that disk, and commit again",
            ) from None
        return partial

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """Read one back; what is wrong with a damaged one is said."""
        try:
            data = json.loads(path.read_bytes())
            found, checksum, content = data["format"], data["checksum"], data["content"]
        except OSError as error:
            raise damaged(f"manifest {path} cannot be read: {error.strerror}", path) from None
        except (ValueError, TypeError, KeyError) as error:
            raise damaged(f"{path} is not a manifest: {type(error).__name__}: {error}", path) from None
        if found != FORMAT:
            raise FileError(
                f"manifest {path} has the format {found!r}", setting="directory", works=f"one of {FORMAT}"
            )
        text = json.dumps(content, separators=(",", ":"), sort_keys=True)
        if _checksum(text) != checksum:
            raise damaged(
                f"manifest {path} is damaged: its checksum is {_checksum(text)!r}, not {checksum!r}", path
            )
        try:
            manifest = _manifest(content)
        except (ValueError, TypeError, KeyError) as error:
            raise damaged(f"manifest {path} lacks something: {type(error).__name__}: {error}", path) from None
        if content["block_bytes"] != BLOCK_BYTES or path.name != name_of(manifest.group) + ENDING:
            raise damaged(
                f"manifest {path} is of group {manifest.group!r} with blocks of {content['block_bytes']}"
                f" bytes, not {BLOCK_BYTES}, or was renamed",
                path,
            )
        return manifest


def name_of(group: str) -> str:
    """What a group's files are called, without their endings."""
    name = quote(group, safe="")
    if not group or len(name) > _LONGEST_NAME:
        raise UsageError(
            f"a group's name cannot be {group[:80]!r}, {len(name)} characters in a file's name",
            setting="key",
            works=f"1 to {_LONGEST_NAME} characters before the first '/'",
        )
    return name


def check_note(note: Mapping[str, Any]) -> dict[str, Any]:
    """The note as it will be read back, or why it cannot be written."""
    try:
        copied = json.loads(json.dumps(note))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the note of a commit is not plain data: {error}",
            setting="note",
            works="text, numbers, lists and dictionaries with text as keys",
        ) from None
    assert isinstance(copied, dict), "a note is a dictionary"
    return copied


def _checksum(text: str) -> str:
    return f"{native.checksum(text.encode()):08x}"


def _content(manifest: Manifest) -> dict[str, Any]:
    return {
        "group": manifest.group,
        "number": manifest.number,
        "block_bytes": BLOCK_BYTES,
        "note": manifest.note,
        "segments": [
            {
                "key": of.segment.key,
                "nbytes": of.segment.nbytes,
                "entries": [[e.name, list(e.shape), e.dtype, e.offset] for e in of.segment.entries],
                "slots": list(of.slots),
                "copy": None if of.copy is None else [of.copy.slot, list(of.copy.checksums)],
            }
            for of in manifest.segments
        ],
    }


def _manifest(content: dict[str, Any]) -> Manifest:
    segments = []
    for data in content["segments"]:
        entries = tuple(
            Entry(name=name, shape=tuple(shape), dtype=dtype, offset=offset)
            for name, shape, dtype, offset in data["entries"]
        )
        segment = Segment(key=data["key"], nbytes=data["nbytes"], entries=entries, persistent=True)
        copy = None if data["copy"] is None else Copy(data["copy"][0], tuple(data["copy"][1]))
        segments.append(Committed(segment=segment, slots=tuple(data["slots"]), copy=copy))
    return Manifest(
        group=content["group"], number=content["number"], note=content["note"], segments=tuple(segments)
    )
