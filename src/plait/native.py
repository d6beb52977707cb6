"""The kernels: compiled ones where they were built, pure ones where not, with the same results.

The compiled module ``plait._native`` picks its instruction set at run time; ``"python"`` is the name
of the pure implementation here. The environment variable ``PLAIT_NATIVE`` decides which one is used:
``0`` never loads the compiled module, a name from :func:`isas` takes that one, and otherwise it is
the fastest that this machine can run.

A *buffer* is anything that owns contiguous bytes in host memory: ``bytes``, a memory map, a numpy
array, or a CPU tensor of torch (which is never imported here).
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import UsageError

_POLYNOMIAL = 0x82F63B78
"""CRC-32C's 0x1EDC6F41 with its bits reversed, as a reflected register needs it."""
_PIECE_BYTES = 1 << 20
"""The pure checksum works on pieces of this size, so that its columns stay in the cache."""


@functools.cache
def _load() -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module("plait._native"), ""
    except ImportError as error:
        return None, str(error)


def _module() -> ModuleType | None:
    return None if os.environ.get("PLAIT_NATIVE") == "0" else _load()[0]


def missing() -> str | None:
    """Why the compiled kernels are not in use, or None where they are."""
    if os.environ.get("PLAIT_NATIVE") == "0":
        return "PLAIT_NATIVE=0 turns the compiled kernels off"
    module, reason = _load()
    return None if module is not None else f"the compiled kernels were not built ({reason})"


def folder() -> Path | None:
    """Where the compiled libraries are, if they are in use."""
    module = _module()
    return None if module is None or module.__file__ is None else Path(module.__file__).parent


def isas() -> tuple[str, ...]:
    """The implementations that can run here, slowest first: ``python``, ``scalar``, ``avx2``, ``avx512``."""
    module = _module()
    return ("python",) if module is None else ("python", *module.isas())


def isa() -> str:
    """The implementation in use."""
    asked = os.environ.get("PLAIT_NATIVE", "")
    return isas()[-1] if asked in ("", "0", "1") else _known(asked, setting="PLAIT_NATIVE")


def _known(name: str, *, setting: str) -> str:
    here = isas()
    if name not in here:
        raise UsageError(
            f"{name!r} is not an implementation that can run here; these are: {', '.join(here)}",
            setting=setting,
            works=here[-1],
        )
    return name


def _bytes_of(buffer: Any, argument: str) -> NDArray[np.uint8]:
    """The buffer's own bytes as an array, without a copy; it lives no longer than the buffer."""
    if not hasattr(buffer, "data_ptr"):
        try:
            return np.frombuffer(buffer, np.uint8)
        except (TypeError, ValueError, BufferError) as error:
            problem = f"{type(buffer).__name__} does not offer contiguous bytes ({error})"
    elif buffer.device.type != "cpu":
        problem = f"a tensor on {buffer.device} is not in host memory"
    elif not buffer.is_contiguous():
        problem = f"a tensor of shape {tuple(buffer.shape)} and strides {buffer.stride()} is not contiguous"
    elif buffer.nbytes == 0:
        return np.empty(0, np.uint8)
    else:
        raw = (ctypes.c_uint8 * buffer.nbytes).from_address(buffer.data_ptr())
        return np.frombuffer(raw, np.uint8)
    raise UsageError(problem, setting=argument, works="bytes, a contiguous array, tensor.cpu().contiguous()")


def read(buffer: Any, *, isa: str | None = None) -> int:
    """Read every byte; returns the exclusive or of all 64-bit little-endian words, the last zero-padded."""
    data = _bytes_of(buffer, "buffer")
    name = _choose(isa)
    if name != "python":
        return int(_compiled().read(data.ctypes.data, data.nbytes, name))
    whole = data.nbytes // 8 * 8
    last = int.from_bytes(data[whole:].tobytes(), "little")
    return int(np.bitwise_xor.reduce(data[:whole].view("<u8"))) ^ last


def copy(target: Any, source: Any, *, isa: str | None = None) -> None:
    """Copy the bytes of one buffer over another of the same size, past the cache.

    Meant for what will not be read again soon; the two must not overlap.
    """
    to, data = _bytes_of(target, "target"), _bytes_of(source, "source")
    if not to.flags.writeable:
        raise UsageError(f"a read-only {type(target).__name__} cannot be written", setting="target")
    if to.nbytes != data.nbytes:
        raise UsageError(
            f"a copy of {data.nbytes} bytes does not fit {to.nbytes} bytes exactly",
            setting="target",
            works=f"{data.nbytes} bytes",
        )
    if np.may_share_memory(to, data):
        raise UsageError("the source and the target overlap", setting="target", works="another buffer")
    name = _choose(isa)
    if name == "python":
        np.copyto(to, data)
    else:
        _compiled().copy(to.ctypes.data, data.ctypes.data, data.nbytes, name)


def checksum(buffer: Any, *, start: int = 0, isa: str | None = None) -> int:
    """CRC-32C of the bytes, continued from ``start``, the checksum of what came before them.

    So ``checksum(a + b) == checksum(b, start=checksum(a))``; of nothing, it is 0.
    """
    data = _bytes_of(buffer, "buffer")
    if not 0 <= start < 2**32:
        raise UsageError(f"{start} is not a 32-bit checksum", setting="start", works="0")
    name = _choose(isa)
    if name != "python":
        return int(_compiled().checksum(data.ctypes.data, data.nbytes, start, name))
    register = start ^ 0xFFFFFFFF
    for at in range(0, data.nbytes, _PIECE_BYTES):
        piece = data[at : at + _PIECE_BYTES]
        register = _append_zeros(register, piece.nbytes) ^ _register(piece)
    return register ^ 0xFFFFFFFF


def paths(
    values: NDArray[Any], moving: NDArray[Any], weights: NDArray[Any], *, isa: str | None = None
) -> None:
    """Shortest paths through layers of places, several searches at once; all float32, or all float64.

    ``values``, [layer, place, search], holds what each place costs; in its stead comes the least that a path
    to it costs. ``moving``, [2, layer, from, to], are two costs of going from a place of the layer before to
    one of this, which count ``weights``, [2, search], times.
    """
    layers, places, searches = values.shape
    assert moving.shape == (2, layers, places, places), "the costs of moving are of other layers and places"
    assert weights.shape == (2, searches), "each search has two weights"
    arrays = (values, moving, weights)
    assert {each.dtype for each in arrays} in ({np.dtype("f4")}, {np.dtype("f8")}), "one kind of numbers"
    assert all(each.flags.c_contiguous for each in arrays), "all of them contiguous"
    name = _choose(isa)
    if name != "python":
        where = [each.ctypes.data for each in arrays]
        _compiled().paths(*where, layers, places, searches, values.itemsize == 8, name)
        return
    room, best = np.empty((places, places, searches), values.dtype), np.empty_like(values[0])
    for layer in range(1, layers):
        np.multiply(moving[1, layer][..., None], weights[1], out=room)
        room += moving[0, layer][..., None] * weights[0]
        room += values[layer - 1][:, None]
        np.minimum.reduce(room, axis=0, out=best)
        values[layer] += best


def _choose(name: str | None) -> str:
    return isa() if name is None else _known(name, setting="isa")


def _compiled() -> ModuleType:
    module = _module()
    assert module is not None, "a compiled implementation was chosen without the module"
    return module


# The pure checksum. A CRC register is linear over GF(2): appending n zero bytes is a 32x32 bit matrix,
# held as four tables, one for each byte of the register. Appending data is the same after an exclusive
# or of the next four bytes into the register, and two stretches that were run apart join as
# zeros(length of the second) * first ^ second. So many stretches run side by side, as numpy likes it.


@functools.cache
def _zeros(power: int) -> NDArray[np.uint32]:
    """The tables (4, 256) that append 2**power zero bytes."""
    if power > 0:
        half = _zeros(power - 1)
        return _look_up(half, half)
    byte = np.arange(256, dtype=np.uint32)
    first = byte.copy()
    for _ in range(8):
        first[:] = (first >> 1) ^ (first & 1) * np.uint32(_POLYNOMIAL)
    return np.stack([first, byte, byte << 8, byte << 16])


def _look_up(tables: NDArray[np.uint32], registers: NDArray[np.uint32]) -> NDArray[np.uint32]:
    a, b, c, d = tables
    found: NDArray[np.uint32] = a[registers & 255]
    found ^= b[(registers >> 8) & 255]
    found ^= c[(registers >> 16) & 255]
    found ^= d[registers >> 24]
    return found


def _append_zeros(register: int, count: int) -> int:
    registers = np.array([register], np.uint32)
    for power in range(count.bit_length()):
        if count >> power & 1:
            registers = _look_up(_zeros(power), registers)
    return int(registers[0])


def _register(piece: NDArray[np.uint8]) -> int:
    """The register after the piece, from zero; zeros in front of it change nothing, so it is padded there."""
    power = max(2, piece.nbytes.bit_length() // 2 - 2)
    lanes = -(-piece.nbytes // (1 << power))
    padded = np.zeros(lanes << power, np.uint8)
    padded[padded.nbytes - piece.nbytes :] = piece
    columns = np.ascontiguousarray(padded.view("<u4").reshape(lanes, -1).T, np.uint32)
    registers = np.zeros(lanes, np.uint32)
    for column in columns:
        registers = _look_up(_zeros(2), registers ^ column)
    while registers.size > 1:
        if registers.size % 2:
            registers = np.concatenate([np.zeros(1, np.uint32), registers])
        registers = _look_up(_zeros(power), registers[0::2]) ^ registers[1::2]
        power += 1
    return int(registers[0])
