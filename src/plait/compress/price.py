"""What a compressed all-reduce will take, and whether it is worth it: a model of one worker's time.

A worker has one thread that packs, unpacks and feeds the network, and a wire that works beside it. Of n
numbers in fp32, with W workers (scatter.py):

    packed      4n bytes          its part of the others' shares, and its own share's sum
    added       4n (W-1)/W        what the others sent of its own share
    decoded     4n                every share's sum, its own too
    sent        2(W-1)/W of the compressed bytes, and as many received

The thread needs ``busy`` = packing + unpacking + the processor's part in sending; the wire needs ``wire`` =
bytes / bandwidth. They overlap, except for the first chunk's packing and the last one's unpacking:

    milliseconds = max(busy, wire) + busy of one chunk + 2 latencies

Uncompressed numbers are sent from where they are and received where they belong: only adding remains.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, cast

from plait.compress.codec import Codec, Exact
from plait.compress.layout import Piece
from plait.errors import UsageError

if TYPE_CHECKING:
    from plait.collective import Link

_SAMPLE = 1 << 20
"""Numbers that a codec is measured with: more than an inner cache holds, little enough to be quick."""
_ROUNDS = 5
WORTH_ELEMENTS = 1 << 20
"""Whether a width pays for a model is judged by so many numbers at once: its buckets have millions."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """A wire as a worker's thread sees it; also a :class:`plait.collective.Link`."""

    bandwidth_bytes_per_s: float
    latency_ms: float = 0.0
    busy_s_per_byte: float = 0.0
    """Processor time for a byte sent and a byte received."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast a codec is, in seconds for a byte of fp32."""

    pack_s_per_byte: float
    add_s_per_byte: float
    decode_s_per_byte: float


def measure_speed(codec: Codec) -> Speed:
    """Measure a codec on this machine; once, so codecs are values that can be looked up."""
    return _measure_speed(cast(Hashable, codec))


@functools.lru_cache(maxsize=64)
def _measure_speed(value: Hashable) -> Speed:
    import torch

    codec = cast(Codec, value)

    source = torch.linspace(-1.0, 1.0, _SAMPLE)
    target = torch.zeros(_SAMPLE)
    payload = torch.empty(codec.payload_bytes(_SAMPLE), dtype=torch.uint8)
    times: list[list[float]] = []
    for _ in range(1 + _ROUNDS):
        marks = [time.perf_counter()]
        codec.compress(source, payload, key=0)
        marks.append(time.perf_counter())
        codec.extract(payload, target, add=True)
        marks.append(time.perf_counter())
        codec.extract(payload, target)
        marks.append(time.perf_counter())
        times.append([after - before for before, after in pairwise(marks)])
    # The fastest: whatever else the machine did is not the codec's.
    pack, add, decode = (min(column) / (4 * _SAMPLE) for column in zip(*times[1:], strict=True))
    return Speed(pack_s_per_byte=pack, add_s_per_byte=add, decode_s_per_byte=decode)


def price_ms(
    pieces: Sequence[Piece], world: int, link: Link, speeds: Mapping[Codec, Speed], *, chunk_bytes: int
) -> float:
    """Milliseconds of an all-reduce of these pieces."""
    if world < 1:
        raise UsageError(f"a world of {world} workers", setting="world", works="1 or more")
    if world == 1:
        return 0.0
    if not (link.bandwidth_bytes_per_s > 0 and link.latency_ms >= 0):
        raise UsageError(
            f"a link of {link.bandwidth_bytes_per_s} bytes/s and {link.latency_ms} ms",
            setting="link",
            works="a bandwidth above 0 and a latency of 0 or more",
        )
    share = (world - 1) / world
    busy_s, sent = 0.0, 0.0
    for piece in pieces:
        speed = speeds[piece.codec]
        numbers = 4 * piece.count
        busy_s += numbers * share * speed.add_s_per_byte
        if not isinstance(piece.codec, Exact):
            busy_s += numbers * (speed.pack_s_per_byte + speed.decode_s_per_byte)
        sent += 2 * share * piece.codec.payload_bytes(piece.count)
    busy_s += sent * getattr(link, "busy_s_per_byte", 0.0)
    wire_s = sent / link.bandwidth_bytes_per_s
    chunks = max(1.0, sent / chunk_bytes)
    return 1e3 * (max(busy_s, wire_s) + busy_s / chunks) + 2 * link.latency_ms


def worth_it(
    count: int,
    codec: Codec,
    world: int,
    link: Link,
    *,
    speeds: Mapping[Codec, Speed] | None = None,
    chunk_bytes: int = 512 << 10,
) -> bool:
    """Whether to compress so many numbers with this codec, rather than send them as they are.

    ``speeds`` are those of the codec and of ``Exact()``; without them, both are measured here.
    """
    known = speeds or {each: measure_speed(each) for each in (codec, Exact())}
    packed, plain = (
        price_ms([Piece(name="", count=count, codec=each)], world, link, known, chunk_bytes=chunk_bytes)
        for each in (codec, Exact())
    )
    return packed < plain
