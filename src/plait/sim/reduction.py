"""What averaging gradients costs, whatever they travel in: time alone, bytes on the wire, processor time.

A player asks three things of a reduction of so many bytes of fp32 over so many workers: how long it takes if
nobody else uses the network (``estimate_ms``, as every :class:`plait.collective.Collective` says it), how
many bytes each worker sends (``wire_bytes``), and for how long the codec keeps a worker's own processor from
computing (``busy_ms``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from plait.collective import Link, ring_ms
from plait.compress.codec import Codec, Exact
from plait.compress.compression import Compression
from plait.compress.layout import Piece
from plait.compress.price import Pace, Speed, measure_speed, price_ms
from plait.compress.settings import Settings
from plait.errors import UsageError

_ONE_CHUNK = 1 << 62


class Estimate(Protocol):
    """The part of a :class:`plait.collective.Collective` that needs no workers."""

    def estimate_ms(self, bytes: int, world: int, link: Link) -> float:
        """How long an all-reduce of so many bytes takes over ``world`` workers joined by such links."""


@runtime_checkable
class Reduction(Estimate, Protocol):
    """What a player asks of a collective."""

    def wire_bytes(self, bytes: int, world: int) -> float:
        """What each worker sends for so many bytes of gradients."""

    def busy_ms(self, bytes: int, world: int) -> float:
        """For how long it keeps the device that also computes."""


@dataclass(frozen=True, kw_only=True)
class Ring:
    """A ring all-reduce of numbers as they are, or of any collective's time: the processor is left alone."""

    of: Estimate | None = None
    """Whose time it takes; None is that of the ring."""
    codec: Codec = Exact()  # noqa: RUF009
    """What the numbers travel in."""

    def estimate_ms(self, bytes: int, world: int, link: Link) -> float:
        """Milliseconds alone."""
        return ring_ms(bytes, world, link) if self.of is None else self.of.estimate_ms(bytes, world, link)

    def wire_bytes(self, bytes: int, world: int) -> float:
        """2(W-1)/W of what the gradients are as the codec has them."""
        return 2 * (world - 1) / world * _packed(self.codec, bytes)

    def busy_ms(self, bytes: int, world: int) -> float:
        """Nothing."""
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Coded:
    """A compressed all-reduce, as :mod:`plait.compress.price` prices it."""

    codec: Codec
    speed: Speed | None = None
    """None is that of this machine's processor, which is measured when it is first asked for."""
    chunk_bytes: int = 512 << 10
    busy_s_per_byte: float = 0.0
    """Processor time for a byte sent and a byte received."""
    shares_device: bool = True
    """Whether packing and sending take the device that computes; False where other cores do them."""

    def estimate_ms(self, bytes: int, world: int, link: Link) -> float:
        """Milliseconds alone: processor and wire overlap, but for a chunk."""
        pace = Pace(
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
            latency_ms=link.latency_ms,
            busy_s_per_byte=self.busy_s_per_byte,
        )
        return self._price_ms(bytes, world, pace, self.chunk_bytes)

    def wire_bytes(self, bytes: int, world: int) -> float:
        """2(W-1)/W of what the gradients are as the codec has them."""
        return 2 * (world - 1) / world * _packed(self.codec, bytes)

    def busy_ms(self, bytes: int, world: int) -> float:
        """Packing, adding and unpacking, and the processor's part in sending."""
        if not self.shares_device:
            return 0.0
        # With a wire that takes no time and a single chunk, the price is the busy time twice.
        pace = Pace(bandwidth_bytes_per_s=math.inf, busy_s_per_byte=self.busy_s_per_byte)
        return self._price_ms(bytes, world, pace, _ONE_CHUNK) / 2

    def _price_ms(self, bytes: int, world: int, pace: Pace, chunk_bytes: int) -> float:
        speed = measure_speed(self.codec) if self.speed is None else self.speed
        speeds: Mapping[Codec, Speed] = {self.codec: speed}
        piece = Piece(name="", count=-(-bytes // 4), codec=self.codec)
        return price_ms([piece], world, pace, speeds, chunk_bytes=chunk_bytes)


def codec_of(bits: int) -> Codec:
    """What gradients travel in at a width, as ``plait.compress.attach`` has it."""
    return Compression(bits=bits).codec_at(bits)


def reduction_of(collective: Estimate | None, bits: int | Literal["auto"] | None) -> Reduction:
    """The costs of a collective; without one, those of torch's ring, or of the codec with so many bits.

    A ``CompressedCollective`` is priced by its codec. Of any other that is no :class:`Reduction`, its own
    time is taken, the bytes are those of its ``bits`` or ``codec`` (of the plan's ``bits`` where it has
    neither), and the processor is left alone.
    """
    if isinstance(collective, Reduction):
        return collective
    if collective is None:
        if bits == "auto":
            raise UsageError(
                "bits that a run chooses layer by layer have no price by themselves",
                setting="collective",
                works="the collective of the option that was planned, or bits=4",
            )
        return Ring() if bits is None else Coded(codec=codec_of(bits))
    if not hasattr(collective, "estimate_ms"):
        raise UsageError(
            f"{collective!r} says nothing of what it costs",
            setting="collective",
            works="an object with estimate_ms(bytes, world, link)",
        )
    width: Any = getattr(collective, "bits", bits)
    codec = getattr(collective, "codec", None)
    settings = getattr(collective, "settings", None)
    if isinstance(settings, Settings) and not getattr(collective, "decline", False):
        from plait.compress.call import codec_of as own_codec

        return Coded(codec=own_codec(width, codec), chunk_bytes=settings.chunk_bytes)  # its price is known
    return Ring(of=collective, codec=codec or codec_of(width if isinstance(width, int) else 32))


def _packed(codec: Codec, bytes: int) -> int:
    return codec.payload_bytes(-(-bytes // 4))
