"""How fast gradients are packed and unpacked on a device: measured here, or given for hardware elsewhere.

The codec's compiled kernels are timed on plain arrays, so no torch is needed where they were built. What the
processor does for a byte that is sent and one that is received is timed over the loopback device. Both are
kept beside the profiles of jobs: measured twice, they would make two plans of one question.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import socket
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from plait.collective import Link
from plait.compress import kernels
from plait.compress.codec import Codec, Exact, Quantizer
from plait.compress.layout import Piece
from plait.compress.price import Pace, Speed, measure_speed, price_ms
from plait.errors import UsageError
from plait.sim.reduction import codec_of
from plait.strategy.measuring import cache_folder, digest_of, machine, versions
from plait.units import format_bytes

FORMAT = "plait.codecs/1"
_SAMPLE = 1 << 20
"""Numbers that are packed: more than an inner cache holds."""
_ROUNDS = 5
_MESSAGE_BYTES = 256 << 10
_MESSAGES = 64
_CHUNK_BYTES = 512 << 10
_ONE_CHUNK = 1 << 62
_FIGURES = ("pack_s_per_byte", "add_s_per_byte", "decode_s_per_byte")


@dataclass(frozen=True, kw_only=True)
class Codecs:
    """What packing costs a device, in seconds for a byte of fp32."""

    speeds: Mapping[int, Speed]
    """By bits."""
    busy_s_per_byte: float = 0.0
    """Processor time for a byte sent and a byte received."""
    shares_device: bool = True
    """Whether this takes the core that computes, as on a CPU; False where a GPU's stream beside it does."""
    source: str = field(default="", compare=False)
    """Where the figures come from, in words; empty where they were given."""

    def __post_init__(self) -> None:
        figures = [getattr(speed, name) for speed in self.speeds.values() for name in _FIGURES]
        for figure in (*figures, self.busy_s_per_byte):
            if not 0 <= figure < math.inf:
                raise UsageError(
                    f"a codec that takes {figure} s for a byte", setting="codecs", works="Codecs.measure()"
                )

    @classmethod
    def measure(cls, bits: Sequence[int] = (3, 4, 5, 6, 7, 8)) -> Codecs:
        """This machine's, of one core; measured once in a process, in about a tenth of a second."""
        return cls(
            speeds={each: _measured(cast(Hashable, codec_of(each))) for each in bits},
            busy_s_per_byte=_measured_busy(),
            source="measured on this machine now",
        )

    @classmethod
    def kept(cls, directory: str | Path | None = None) -> Codecs:
        """This machine's as they were measured first, so that plans made twice are the same.

        They are kept beside the profiles of jobs (by default in the user's cache), under a digest of the
        processor and of the versions of torch and plait; where nothing can be written, they are measured.
        """
        folder = cache_folder() if directory is None else Path(directory)
        content = {"machine": machine(), "versions": versions(), "kernels": kernels.available()}
        file = folder / f"codecs-{digest_of(content)[:16]}.json"
        if (known := _read(file)) is not None:
            return known
        found = cls.measure()
        data = {"format": FORMAT, "speeds": {bits: asdict(speed) for bits, speed in found.speeds.items()}}
        text = json.dumps({**data, "busy_s_per_byte": found.busy_s_per_byte}, indent=1)
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            # Another process may be writing the same: each replaces the file as a whole.
            part = file.with_name(f"{file.name}.{os.getpid()}")
            part.write_text(text + "\n")
            part.replace(file)
            return replace(found, source=_kept_in(file))
        return found

    @property
    def remark(self) -> tuple[str, ...]:
        """What figures that were not given rest on."""
        if not self.source:
            return ()
        speed = self.speed(min(self.speeds, key=lambda bits: abs(bits - 4)))
        rate = format_bytes(1 / speed.pack_s_per_byte) if speed.pack_s_per_byte else "no time for"
        return (f"gradients are packed at {rate}/s a core, {self.source}",)

    def speed(self, bits: int) -> Speed:
        """That of some bits."""
        if bits not in self.speeds:
            raise UsageError(
                f"nothing is known of the codec's speed at {bits} bits",
                setting="codecs",
                works=f"the speed at {bits} bits, or Codecs.measure()",
            )
        return self.speeds[bits]


@dataclass(frozen=True, kw_only=True)
class Mixed:
    """A compressed all-reduce in which parts of the gradients have different bits.

    What a player asks of a collective (:class:`plait.sim.reduction.Reduction`); one width is one part.
    """

    parts: tuple[tuple[int, float], ...]
    """Bits, and the share of all elements that has them."""
    codecs: Codecs

    @property
    def bits(self) -> float:
        """On average."""
        return sum(bits * share for bits, share in self.parts)

    def estimate_ms(self, bytes: int, world: int, link: Link) -> float:
        """How long it takes alone: processor and wire overlap, but for a chunk."""
        pace = Pace(
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
            latency_ms=link.latency_ms,
            busy_s_per_byte=self.codecs.busy_s_per_byte,
        )
        return self._price_ms(bytes, world, pace, _CHUNK_BYTES)

    def wire_bytes(self, bytes: int, world: int) -> float:
        """What each worker sends."""
        packed = sum(piece.codec.payload_bytes(piece.count) for piece in self._pieces(bytes))
        return 2 * (world - 1) / world * packed

    def busy_ms(self, bytes: int, world: int) -> float:
        """For how long it keeps the device that also computes."""
        if not self.codecs.shares_device:
            return 0.0
        # With a wire that takes no time and a single chunk, the price is the busy time twice.
        pace = Pace(bandwidth_bytes_per_s=math.inf, busy_s_per_byte=self.codecs.busy_s_per_byte)
        return self._price_ms(bytes, world, pace, _ONE_CHUNK) / 2

    def all_reduce(self, tensor: Any, group: Any = None) -> Any:
        """Start reducing a tensor, in place; one width alone can do that for any tensor."""
        from plait.compress.collectives import CompressedCollective

        ((bits, _),) = self.parts
        return CompressedCollective(codec=codec_of(bits)).all_reduce(tensor, group)

    def _price_ms(self, bytes: int, world: int, pace: Pace, chunk_bytes: int) -> float:
        speeds: dict[Codec, Speed] = {codec_of(bits): self.codecs.speed(bits) for bits, _ in self.parts}
        return price_ms(self._pieces(bytes), world, pace, speeds, chunk_bytes=chunk_bytes)

    def _pieces(self, bytes: int) -> list[Piece]:
        count = -(-bytes // 4)
        ends = np.rint(np.cumsum([0.0, *(share for _, share in self.parts)]) * count).astype(int).tolist()
        return [
            Piece(name=str(bits), count=end - begin, codec=codec_of(bits))
            for (bits, _), (begin, end) in zip(self.parts, pairwise(ends), strict=True)
        ]


# --- measuring ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _measured(codec: Any) -> Speed:
    if isinstance(codec, Exact) or not isinstance(codec, Quantizer) or not kernels.available():
        if importlib.util.find_spec("torch") is None:
            raise UsageError(
                f"{codec} cannot be measured here: there are neither compiled kernels nor torch",
                setting="codecs",
                works="Codecs(speeds={4: Speed(...)})",
            )
        return measure_speed(codec)
    source = _Numbers(np.linspace(-1.0, 1.0, _SAMPLE, dtype=np.float32))
    target = _Numbers(np.zeros(_SAMPLE, dtype=np.float32))
    payload = _Numbers(np.empty(codec.payload_bytes(_SAMPLE), dtype=np.uint8))
    grid: Any = {"bits": codec.bits, "bucket": codec.bucket}
    pack = functools.partial(
        kernels.quantize, _any(source), _any(payload), stochastic=codec.stochastic, key=0, first_bucket=0
    )
    passes: list[Callable[[], None]] = [
        functools.partial(pack, **grid),
        functools.partial(kernels.dequantize, _any(payload), _any(target), add=True, **grid),
        functools.partial(kernels.dequantize, _any(payload), _any(target), add=False, **grid),
    ]
    # The fastest: whatever else the machine did is not the codec's.
    figures = [min(_timed(one) for _ in range(1 + _ROUNDS)) / (4 * _SAMPLE) for one in passes]
    return Speed(**dict(zip(_FIGURES, figures, strict=True)))


def _kept_in(file: Path) -> str:
    return f"measured on this machine once and kept in {file}"


def _read(file: Path) -> Codecs | None:
    """What is kept in a file; None where there is none, or one that was half written."""
    try:
        data = json.loads(file.read_text())
        return Codecs(
            speeds={int(bits): Speed(**figures) for bits, figures in data["speeds"].items()},
            busy_s_per_byte=data["busy_s_per_byte"],
            source=_kept_in(file),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UsageError):
        return None


def _timed(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _any(numbers: _Numbers) -> Any:
    return numbers


class _Numbers:
    """An array in the way in which the kernels see a tensor."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array, self.dtype = array, array.dtype

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def numel(self) -> int:
        return int(self.array.size)


@functools.cache
def _measured_busy() -> float:
    """Processor time of a thread that sends a byte and receives one, over the loopback device."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        out = socket.create_connection(server.getsockname())
        into, _ = server.accept()
    message, room = memoryview(bytearray(_MESSAGE_BYTES)), memoryview(bytearray(_MESSAGE_BYTES))
    out.setblocking(False)
    with out, into:
        best = math.inf
        for _ in range(3):
            began = time.thread_time()
            for _ in range(_MESSAGES):
                _exchange(out, into, message, room)
            best = min(best, time.thread_time() - began)
    return best / (_MESSAGES * _MESSAGE_BYTES)


def _exchange(out: socket.socket, into: socket.socket, message: memoryview, room: memoryview) -> None:
    sent = got = 0
    while got < len(message):
        if sent < len(message):
            with suppress(BlockingIOError):  # the kernel has no room before we take some out
                sent += out.send(message[sent:])
        if got < sent:
            got += into.recv_into(room[got:], sent - got)
