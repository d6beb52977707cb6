"""The bytes of compressed numbers: how many there are, where each stands, and the header of a message.

docs/wire.md tells the whole format. In short: every bucket is a record of its lowest value and its unit
(fp32, little-endian) and the *planes* of its codes; a payload is the records one after the other; a
message is a header of 24 bytes and one payload. Nothing here needs torch.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

from plait import native
from plait.errors import UsageError
from plait.units import parse_whole

GRID_BYTES = 8
"""A record starts with its lowest value and its unit."""
MOST_BITS = 8
LARGEST_BUCKET = 2**30
"""Places in a bucket, and words of its random numbers, stay within 32 bits."""

MAGIC = b"plai"
VERSION = 1
QUANTIZED = 1
"""The codec that a message names; others may come."""
DTYPES = ("float32", "float16", "bfloat16")
"""What can be compressed; a message names one by its place here."""
_HEADER = struct.Struct("<4sBBBBIQI")
HEADER_BYTES = _HEADER.size


@functools.cache
def planes(bits: int) -> tuple[tuple[int, int], ...]:
    """The planes of codes of so many bits: (width, shift) each, the lowest bits of a code first."""
    found, shift = [], 0
    for width in (8, 4, 2, 1):
        if bits & width:
            found.append((width, shift))
            shift += width
    return tuple(found)


def plane_bytes(elements: int, width: int) -> int:
    """Bytes of a plane; byte i has the bits of elements i, i + bytes, i + 2 bytes, ... from its lowest up."""
    return -(-elements * width // 8)


@functools.lru_cache(maxsize=4096)
def record_bytes(elements: int, bits: int) -> int:
    """Bytes of the record of a bucket of so many elements."""
    return GRID_BYTES + sum(plane_bytes(elements, width) for width, _ in planes(bits))


def payload_bytes(count: int, bits: int, bucket: int) -> int:
    """Bytes of all records of ``count`` elements; the last bucket may be short."""
    whole, rest = divmod(count, bucket)
    return whole * record_bytes(bucket, bits) + (record_bytes(rest, bits) if rest else 0)


def checked_bits(bits: int) -> int:
    """The width of a code, if it is one."""
    if parse_whole(bits, setting="bits") > MOST_BITS:
        raise UsageError(f"codes of {bits} bits", setting="bits", works="1 to 8")
    return bits


def checked_bucket(bucket: int) -> int:
    """The size of a bucket, if it is one."""
    if parse_whole(bucket, setting="bucket") > LARGEST_BUCKET:
        raise UsageError(f"buckets of {bucket} elements", setting="bucket", works=f"1 to {LARGEST_BUCKET}")
    return bucket


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a message says of its payload."""

    bits: int
    bucket: int
    dtype: str
    """Of the numbers before they were compressed, as in DTYPES."""
    count: int

    def seal(self, payload: object) -> bytes:
        """The header's bytes for a payload (any buffer), with the checksum of both."""
        fields = (MAGIC, VERSION, QUANTIZED, self.bits, DTYPES.index(self.dtype), self.bucket, self.count)
        start = native.checksum(_HEADER.pack(*fields, 0)[:-4])
        return _HEADER.pack(*fields, native.checksum(payload, start=start))

    @classmethod
    def open(cls, head: bytes, payload: object, payload_size: int) -> Header:
        """Read and check the header of a payload of so many bytes; whatever is wrong is an error."""
        if len(head) < HEADER_BYTES:
            raise _broken(f"it has {len(head)} bytes, and a header alone {HEADER_BYTES}")
        magic, version, codec, bits, dtype, bucket, count, checksum = _HEADER.unpack(head)
        if magic != MAGIC:
            raise _broken(f"it starts with {magic!r}, not with {MAGIC!r}")
        if version != VERSION:
            raise _broken(f"its version is {version}, and this plait reads {VERSION}")
        if codec != QUANTIZED:
            raise _broken(f"its codec is number {codec}, and this plait knows {QUANTIZED}")
        if not (1 <= bits <= MOST_BITS and 1 <= bucket <= LARGEST_BUCKET and dtype < len(DTYPES)):
            raise _broken(f"it claims {bits} bits, buckets of {bucket} and dtype number {dtype}")
        expected = payload_bytes(count, bits, bucket)
        if expected != payload_size:
            raise _broken(f"its {count} elements take {expected} bytes, and {payload_size} follow its header")
        found = native.checksum(payload, start=native.checksum(head[:-4]))
        if found != checksum:
            raise _broken(f"its checksum is {found:08x} where it says {checksum:08x}")
        return cls(bits=bits, bucket=bucket, dtype=DTYPES[dtype], count=count)


def _broken(why: str) -> UsageError:
    return UsageError(
        f"this is no whole message of plait: {why}",
        setting="message",
        works="what quantize returned, unchanged",
    )
