"""Where everything lies in a flat buffer, and who adds up which part of it: pure arithmetic, no torch.

    buffer   | piece 0            | piece 1    | piece 2                          |
    buckets  |    |    |    |    || |  |  |  | |      |      |      |      |      |
    shares   | share 0          | share 1          | share 2           | share 3    |
    chunks   |       |          |        |         |         |         |     |      |

A *piece* is a parameter (or a part of one) with the codec it travels in. A *share* is what one worker adds
up, and a *chunk* is what is packed, sent and unpacked as one message. Both are cut at the boundaries of
quantization buckets, so that a cut changes none of the bytes: a codec is keyed by the parameter's name and
the element's index in it. Shares are equal by compressed bytes, not by elements, because the wire is what
they share; a cut is off by half a bucket at most.

Every worker computes the layout by itself from the same pieces, and so arrives at the same one.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
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


def bucket_of(codec: Codec) -> int:
    """How many elements the codec treats as one; 1 where each stands for itself."""
    return int(getattr(codec, "bucket", 1))


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one piece that lies in one chunk: one call of its codec."""

    piece: Piece
    start: int
    """Its first element, counted in the chunk."""
    count: int
    first: int
    """Its first element, counted in the parameter."""
    offset: int
    """Its first byte in the message."""
    bytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of the buffer that travels as one message."""

    share: int
    number: int
    """Its place in its share."""
    start: int
    """Its first element, counted in the buffer."""
    count: int
    segments: tuple[Segment, ...]
    bytes: int
    """The size of its message."""


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
        """Shares that are as equal by compressed bytes as bucket boundaries allow."""
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
    ruler = _Ruler(pieces)
    edges = [ruler.nearest(ruler.bytes * i // shares) for i in range(shares + 1)]
    cut = (_chunks(ruler, i, *edge, chunk_bytes) for i, edge in enumerate(pairwise(edges)))
    return Layout(pieces=pieces, shares=tuple(cut))


@functools.lru_cache(maxsize=256)
def _given(shares: tuple[tuple[Piece, ...], ...], chunk_bytes: int) -> Layout:
    pieces = tuple(piece for share in shares for piece in share)
    ruler = _Ruler(pieces)
    edges = [0, *accumulate(sum(piece.count for piece in share) for share in shares)]
    cut = (_chunks(ruler, i, *edge, chunk_bytes) for i, edge in enumerate(pairwise(edges)))
    return Layout(pieces=pieces, shares=tuple(cut))


class _Ruler:
    """Measures a buffer by elements and by compressed bytes."""

    def __init__(self, pieces: tuple[Piece, ...]) -> None:
        self._pieces = pieces
        self._starts = [0, *accumulate(piece.count for piece in pieces)]
        self._bytes = [0, *accumulate(piece.codec.payload_bytes(piece.count) for piece in pieces)]
        self.bytes = self._bytes[-1]

    def at(self, element: int) -> int:
        """Compressed bytes before an element that lies on a boundary."""
        i = self._piece(element)
        if i == len(self._pieces):
            return self.bytes
        return self._bytes[i] + self._pieces[i].codec.payload_bytes(element - self._starts[i])

    def nearest(self, target: int) -> int:
        """The boundary whose bytes are nearest to the target."""
        i = min(bisect_right(self._bytes, target), len(self._pieces)) - 1
        if i < 0:
            return 0
        piece, before = self._pieces[i], self._bytes[i]
        grain_bytes = max(1, piece.codec.payload_bytes(piece.grain))
        low = min((target - before) // grain_bytes * piece.grain, piece.count)
        high = min(low + piece.grain, piece.count)
        near_low = target - self.at(self._starts[i] + low) <= self.at(self._starts[i] + high) - target
        return self._starts[i] + (low if near_low else high)

    def segments(self, start: int, stop: int) -> Iterator[Segment]:
        """The segments between two boundaries, placed one after the other in a message."""
        offset = 0
        for i in range(self._piece(start), len(self._pieces)):
            piece, begin = self._pieces[i], self._starts[i]
            if begin >= stop:
                return
            low, high = max(start, begin), min(stop, begin + piece.count)
            if low < high:
                size = piece.codec.payload_bytes(high - low)
                first = piece.first + low - begin
                yield Segment(piece, low - start, high - low, first, offset, size)
                offset += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def _piece(self, element: int) -> int:
        """The last piece that starts at or before the element, so one that is not empty."""
        return bisect_right(self._starts, element) - 1


def _chunks(ruler: _Ruler, share: int, start: int, stop: int, chunk_bytes: int) -> tuple[Chunk, ...]:
    low, high = ruler.at(start), ruler.at(stop)
    parts = max(1, -(-(high - low) // chunk_bytes), min(_LEAST_CHUNKS, (high - low) // _LEAST_CHUNK_BYTES))
    inner = {ruler.nearest(low + (high - low) * i // parts) for i in range(1, parts)}
    edges = sorted({start, stop} | {edge for edge in inner if start < edge < stop})
    found = []
    for number, (begin, end) in enumerate(pairwise(edges)):
        segments = tuple(ruler.segments(begin, end))
        last = segments[-1]
        found.append(Chunk(share, number, begin, end - begin, segments, last.offset + last.bytes))
    return tuple(found)
