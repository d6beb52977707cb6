"""Where everything lies in a flat buffer, and who adds up which part of it: pure arithmetic, no torch.

    buffer   | piece 0                | piece 1 | piece 2                          |
    buckets  |    |    |    |    |    ||  |  |  ||      |      |      |      |     |
    shares   | 0       | 1       | 2  | 1       | 0           | 1           | 2    |

A *piece* is a parameter (or a part of one) with the codec it travels in. A *share* is what one worker adds
up, and a *chunk* is what is packed, sent and unpacked as one message. Both are cut at the boundaries of
quantization buckets, so that a cut changes none of the bytes: a codec is keyed by the parameter's name and
the element's index in it.

Each large piece is divided among all workers equally, and a small one is given to a worker by its name. So
who adds up an element does not depend on what else is in the buffer, and neither does the result: DDP may
put parameters together in another way after its first step, or in a run that is resumed.

Every worker computes the layout by itself from the same pieces, and so arrives at the same one.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from plait.errors import UsageError
from plait.units import parse_whole

if TYPE_CHECKING:
    from plait.compress.codec import Codec

ALIGNMENT_BYTES = 16
"""Each segment's bytes start at a multiple of this within a message."""
_LEAST_CHUNKS, _LEAST_CHUNK_BYTES = 6, 64 << 10
"""A share that would be few chunks is cut into so many, down to that size: they are to overlap."""
_FREE_GRAIN = 64
"""Where a codec that has no buckets may be cut: a line of the cache holds 16 elements."""
_LEAST_DIVIDED_BYTES = 4 << 10
"""A piece with fewer bytes than this for each worker is not divided."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A parameter, or a part of one, as it lies in the buffer after the piece before it."""

    name: str | int
    """What tells its parameter from others; enters the rounding, so it stays the same from step to step."""
    count: int
    """Elements."""
    codec: Codec
    """What it travels in."""
    first: int = 0
    """The index, within its parameter, of its first element: a multiple of the codec's bucket."""

    def __post_init__(self) -> None:
        parse_whole(self.count, setting="count", least=0)
        parse_whole(self.first, setting="first", least=0)
        if self.first % bucket_of(self.codec):
            raise UsageError(
                f"piece {self.name!r} starts at element {self.first} of its parameter, "
                f"inside a bucket of {bucket_of(self.codec)}",
                setting="first",
                works=str(self.first // bucket_of(self.codec) * bucket_of(self.codec)),
            )

    @property
    def grain(self) -> int:
        """It may be cut at every multiple of so many elements."""
        bucket = bucket_of(self.codec)
        return bucket if bucket > 1 else _FREE_GRAIN


def aligned(offset: int) -> int:
    """Where the next segment's bytes may start."""
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def bucket_of(codec: Codec) -> int:
    """How many elements the codec treats as one; 1 where each stands for itself."""
    return int(getattr(codec, "bucket", 1))


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one piece that lies in one chunk: one call of its codec."""

    piece: Piece
    start: int
    """Its first element, counted in the buffer."""
    count: int
    first: int
    """Its first element, counted in the parameter."""
    offset: int
    """Its first byte in the message."""
    bytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Parts of the buffer that travel as one message."""

    share: int
    number: int
    """Its place in its share."""
    segments: tuple[Segment, ...]

    @property
    def count(self) -> int:
        """Elements."""
        return sum(segment.count for segment in self.segments)

    @property
    def bytes(self) -> int:
        """The size of its message."""
        return self.segments[-1].offset + self.segments[-1].bytes


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Pieces in a buffer, shares and chunks. Made by :meth:`balanced` or :meth:`given`."""

    pieces: tuple[Piece, ...]
    shares: tuple[tuple[Chunk, ...], ...]
    """The chunks of each share; a share may be empty."""

    @property
    def count(self) -> int:
        """Elements in the buffer."""
        return sum(piece.count for piece in self.pieces)

    @property
    def bytes(self) -> int:
        """What the whole buffer takes once compressed."""
        return sum(chunk.bytes for share in self.shares for chunk in share)

    @classmethod
    def balanced(cls, pieces: Sequence[Piece], shares: int, *, chunk_bytes: int) -> Layout:
        """Shares of every piece that are as equal as bucket boundaries allow."""
        parse_whole(shares, setting="shares")
        parse_whole(chunk_bytes, setting="chunk_bytes")
        return _balanced(tuple(pieces), shares, chunk_bytes)

    @classmethod
    def given(cls, shares: Sequence[Sequence[Piece]], *, chunk_bytes: int) -> Layout:
        """Shares that are given, one after the other in the buffer: each is a sequence of pieces."""
        parse_whole(chunk_bytes, setting="chunk_bytes")
        return _given(tuple(tuple(share) for share in shares), chunk_bytes)


@functools.lru_cache(maxsize=256)
def _balanced(pieces: tuple[Piece, ...], shares: int, chunk_bytes: int) -> Layout:
    stretches: list[list[_Stretch]] = [[] for _ in range(shares)]
    start = 0
    for piece in pieces:
        for share, low, high in _divided(piece, shares):
            stretches[share].append(_Stretch(piece, start + low, low, high - low))
        start += piece.count
    return Layout(
        pieces=pieces,
        shares=tuple(_chunks(share, each, chunk_bytes) for share, each in enumerate(stretches)),
    )


@functools.lru_cache(maxsize=256)
def _given(shares: tuple[tuple[Piece, ...], ...], chunk_bytes: int) -> Layout:
    found, start = [], 0
    for share, pieces in enumerate(shares):
        stretches = []
        for piece in pieces:
            stretches.append(_Stretch(piece, start, 0, piece.count))
            start += piece.count
        found.append(_chunks(share, [each for each in stretches if each.count], chunk_bytes))
    return Layout(pieces=tuple(piece for share in shares for piece in share), shares=tuple(found))


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A part of a piece that is one worker's to add up, or a part of that."""

    piece: Piece
    start: int
    """Its first element, counted in the buffer."""
    first: int
    """Its first element, counted in the piece; on a boundary of buckets."""
    count: int

    @property
    def bytes(self) -> int:
        return self.piece.codec.payload_bytes(self.count)

    def split(self, room: int) -> tuple[_Stretch, _Stretch | None]:
        """As much as has so many bytes, in whole buckets, and what is left."""
        grain = self.piece.grain
        grains = max(1, -(-room // max(1, self.piece.codec.payload_bytes(grain))))
        count = min(self.count, grains * grain)
        rest = None
        if count < self.count:
            rest = _Stretch(self.piece, self.start + count, self.first + count, self.count - count)
        return _Stretch(self.piece, self.start, self.first, count), rest


def _divided(piece: Piece, shares: int) -> Iterator[tuple[int, int, int]]:
    """(share, from, to) for every part of a piece that has elements."""
    if piece.codec.payload_bytes(piece.count) < shares * _LEAST_DIVIDED_BYTES:
        if piece.count:
            yield zlib.crc32(str(piece.name).encode()) % shares, 0, piece.count
        return
    grains = -(-piece.count // piece.grain)
    edges = [min(piece.count, grains * i // shares * piece.grain) for i in range(shares + 1)]
    for share, (low, high) in enumerate(pairwise(edges)):
        if low < high:
            yield share, low, high


def _chunks(share: int, stretches: Sequence[_Stretch], chunk_bytes: int) -> tuple[Chunk, ...]:
    total = sum(stretch.bytes for stretch in stretches)
    parts = max(1, -(-total // chunk_bytes), min(_LEAST_CHUNKS, total // _LEAST_CHUNK_BYTES))
    target = -(-total // parts)
    messages: list[list[_Stretch]] = [[]]
    filled = 0
    for stretch in stretches:
        rest: _Stretch | None = stretch
        # What is large and travels as it is gets messages of its own, which then need no copy.
        alone = bucket_of(stretch.piece.codec) == 1 and stretch.bytes >= _LEAST_CHUNK_BYTES
        while rest is not None:
            if messages[-1] and (alone or filled >= target):
                messages.append([])
                filled = 0
            part, rest = rest.split(target - filled)
            messages[-1].append(part)
            filled = target if alone else filled + part.bytes
    return tuple(_chunk(share, number, message) for number, message in enumerate(m for m in messages if m))


def _chunk(share: int, number: int, message: Sequence[_Stretch]) -> Chunk:
    segments: list[Segment] = []
    offset = 0
    for part in message:
        first = part.piece.first + part.first
        segments.append(Segment(part.piece, part.start, part.count, first, offset, part.bytes))
        offset = aligned(offset + part.bytes)
    return Chunk(share, number, tuple(segments))
