"""The codec's kernels for tensors on a GPU, in Triton; they give the bytes that ``plain.py`` gives.

One program encodes or decodes one bucket. The elements whose bits share a byte are far apart (see
``wire.py``), so a plane is worked on as a tile with a row for each slot of a byte, and codes are found anew
for each plane: arithmetic is cheap there, memory is not.

Two things are asked of Triton so that every bit is as elsewhere: division that rounds to the nearest
(``div_rn``), and no fusing of a multiplication and an addition (``enable_fp_fusion=False``).

Importing this needs triton.
"""

# Kernels are compiled by Triton, which is untyped and takes annotations to mean something else.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from plait.compress import plain, rounding, wire

LARGEST_BUCKET = 16384
"""A program holds its bucket in registers; larger ones are left to plain torch."""

_WEYL = tl.constexpr(rounding.WEYL)
_FIRST = tl.constexpr(rounding.FIRST)
_SECOND = tl.constexpr(rounding.SECOND)
_GOLDEN = tl.constexpr(rounding.GOLDEN)
_MIX_1 = tl.constexpr(rounding.MIX_1)
_MIX_2 = tl.constexpr(rounding.MIX_2)
_WIDE = tl.constexpr(plain.WIDE)
_LEAST_UNIT = tl.constexpr(plain.LEAST_UNIT)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_GRID_BYTES = tl.constexpr(wire.GRID_BYTES)


def quantize(
    source: Tensor,
    payload: Tensor,
    *,
    bits: int,
    bucket: int,
    stochastic: bool,
    key: int,
    first_bucket: int,
    residual: Tensor | None = None,
    threads: int = 1,
) -> None:
    """Write the records of a source; ``threads`` is the GPU's own affair."""
    if source.numel():
        _encode[(triton.cdiv(source.numel(), bucket),)](
            source,
            payload,
            source if residual is None else residual,
            source.numel(),
            bucket,
            wire.record_bytes(bucket, bits),
            key & 0xFFFFFFFF,
            key >> 32,
            first_bucket,
            BITS=bits,
            RANDOM=stochastic,
            KEEP=residual is not None,
            ELEMENTS=_elements(bucket),
            enable_fp_fusion=False,
        )


def dequantize(
    payload: Tensor, target: Tensor, *, bits: int, bucket: int, add: bool, threads: int = 1
) -> None:
    """Decode the records over a target, or add them to it."""
    if target.numel():
        _decode[(triton.cdiv(target.numel(), bucket),)](
            payload,
            target,
            target.numel(),
            bucket,
            wire.record_bytes(bucket, bits),
            BITS=bits,
            ADD=add,
            ELEMENTS=_elements(bucket),
            enable_fp_fusion=False,
        )


def _elements(bucket: int) -> int:
    """The size of a tile that holds a bucket: a power of two, and whole bytes of every plane."""
    return max(8, int(triton.next_power_of_2(bucket)))


# bf16 is converted bit by bit, since Triton leaves its denormals and its rounding to the device.
@triton.jit
def _load(pointers, valid):
    numbers = tl.load(pointers, mask=valid, other=0.0)
    if numbers.dtype == tl.bfloat16:
        bits = numbers.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return numbers.to(tl.float32)


@triton.jit
def _store(pointers, values, valid):
    if pointers.dtype.element_ty == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        bits = tl.where(values != values, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
        tl.store(pointers, bits.to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=valid)
    else:
        tl.store(pointers, values.to(pointers.dtype.element_ty), mask=valid)


@triton.jit
def _within_range(value):
    return tl.where(value > _LARGEST, _LARGEST, tl.where(value < -_LARGEST, -_LARGEST, value))


@triton.jit
def _grid(values, valid, BITS: tl.constexpr):
    """The lowest value and the unit, as in a record."""
    low = tl.min(tl.where(valid, values, float("inf"))) + 0.0
    high = tl.max(tl.where(valid, values, float("-inf"))) + 0.0
    broken = tl.max((valid & (values != values)).to(tl.int32)) != 0
    finite = (low >= -_LARGEST) & (high <= _LARGEST) & (broken == 0)
    wide = (low <= -_WIDE) | (high >= _WIDE)
    scale = tl.where(wide, 0.25, 1.0)
    least = low * scale
    reach = high * scale - least
    levels = tl.full((), (1 << BITS) - 1, tl.float32)
    unit = tl.maximum(tl.div_rn(reach, levels), _LEAST_UNIT)
    above = (unit.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    unit = tl.where(tl.div_rn(reach, unit) > levels, above, unit)
    unit = tl.where(wide, -unit, unit)
    flat = (finite == 0) | (low == high)
    least = tl.where(finite, tl.where(flat, low, least), float("nan"))
    return least, tl.where(flat, 0.0, unit)


@triton.jit
def _stream(key_low, key_high, bucket):
    """The start and the twist of a bucket's random words."""
    key = (key_high.to(tl.uint64) << 32) | key_low.to(tl.uint64)
    z = key + (bucket.to(tl.uint64) + 1) * _GOLDEN
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    z = z ^ (z >> 31)
    return z.to(tl.uint32), (z >> 32).to(tl.uint32)


@triton.jit
def _codes(values, places, low, unit, start, twist, RANDOM: tl.constexpr):
    """The codes of values that stand at those places of the bucket."""
    flat = unit == 0
    scale = tl.where(unit < 0, 0.25, 1.0)
    step = tl.where(flat, 1.0, tl.abs(unit) * 0.0000152587890625)
    fixed = tl.where(flat, 0.0, tl.div_rn(values * scale - low, step)).to(tl.int32)
    if RANDOM:
        place = places.to(tl.uint32)
        h = start + (((place >> 5) << 4) | (place & 15)) * _WEYL
        h = (h ^ (h >> 16)) * _FIRST
        h = (h ^ (h >> 15) ^ twist) * _SECOND
        h = h ^ (h >> 16)
        number = tl.where((place & 16) != 0, h >> 16, h & 0xFFFF).to(tl.int32)
    else:
        number = 0x8000
    return (fixed + number) >> 16


@triton.jit
def _values(codes, low, unit):
    """The values that codes stand for."""
    values = low + codes.to(tl.float32) * tl.abs(unit)
    return tl.where(unit < 0, _within_range(values * 4), values)


@triton.jit
def _pack_plane(
    source, plane, n, low, unit, start, twist,
    WIDTH: tl.constexpr, SHIFT: tl.constexpr, RANDOM: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Write one plane of a bucket; returns where the next one starts."""
    size = (n * WIDTH + 7) // 8
    slot = tl.arange(0, 8 // WIDTH)[:, None]
    byte = tl.arange(0, ELEMENTS * WIDTH // 8)
    places = slot * size + byte[None, :]
    valid = (byte[None, :] < size) & (places < n)
    values = _load(source + places, valid)
    codes = _codes(values, places, low, unit, start, twist, RANDOM)
    bits = (tl.where(valid, codes, 0) >> SHIFT) & ((1 << WIDTH) - 1)
    tl.store(plane + byte, tl.sum(bits << (WIDTH * slot), axis=0).to(tl.uint8), mask=byte < size)
    return plane + size


@triton.jit(do_not_specialize=["count", "bucket", "record_bytes", "key_low", "key_high", "first_bucket"])
def _encode(
    source, payload, residual, count, bucket, record_bytes, key_low, key_high, first_bucket,
    BITS: tl.constexpr, RANDOM: tl.constexpr, KEEP: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    source += number * bucket
    record = payload + number * record_bytes
    n = tl.minimum(bucket, count - number * bucket).to(tl.int32)
    places = tl.arange(0, ELEMENTS)
    valid = places < n
    values = _load(source + places, valid)
    low, unit = _grid(values, valid, BITS)
    start, twist = _stream(key_low, key_high, number + first_bucket)
    byte = tl.arange(0, _GRID_BYTES)
    word = tl.where(byte < 4, low.to(tl.int32, bitcast=True), unit.to(tl.int32, bitcast=True))
    tl.store(record + byte, ((word >> ((byte & 3) * 8)) & 255).to(tl.uint8))
    plane = record + _GRID_BYTES
    if BITS == 8:
        _pack_plane(source, plane, n, low, unit, start, twist, 8, 0, RANDOM, ELEMENTS)
    if BITS & 4:
        plane = _pack_plane(source, plane, n, low, unit, start, twist, 4, 0, RANDOM, ELEMENTS)
    if BITS & 2:
        plane = _pack_plane(source, plane, n, low, unit, start, twist, 2, BITS & 4, RANDOM, ELEMENTS)
    if BITS & 1:
        plane = _pack_plane(source, plane, n, low, unit, start, twist, 1, BITS & 6, RANDOM, ELEMENTS)
    if KEEP:
        codes = _codes(values, places, low, unit, start, twist, RANDOM)
        lost = tl.where(unit == 0, 0.0, _within_range(values - _values(codes, low, unit)))
        # The residual may be the source: every plane must have been read before it is written.
        tl.debug_barrier()
        tl.store(residual + number * bucket + places, lost, mask=valid)


@triton.jit
def _plane_bits(plane, places, valid, n, WIDTH: tl.constexpr, SHIFT: tl.constexpr):
    """What one plane adds to the codes at those places."""
    size = (n * WIDTH + 7) // 8
    byte = tl.load(plane + places % size, mask=valid, other=0).to(tl.int32)
    return ((byte >> (WIDTH * (places // size))) & ((1 << WIDTH) - 1)) << SHIFT


@triton.jit
def _number(record):
    """The fp32 number in four bytes that may stand anywhere."""
    byte = tl.arange(0, 4)
    word = tl.sum(tl.load(record + byte).to(tl.int32) << (byte * 8))
    return word.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["count", "bucket", "record_bytes"])
def _decode(
    payload, target, count, bucket, record_bytes,
    BITS: tl.constexpr, ADD: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    record = payload + number * record_bytes
    target += number * bucket
    n = tl.minimum(bucket, count - number * bucket).to(tl.int32)
    places = tl.arange(0, ELEMENTS)
    valid = places < n
    plane = record + _GRID_BYTES
    if BITS == 8:
        codes = _plane_bits(plane, places, valid, n, 8, 0)
    else:
        codes = places * 0
    if BITS & 4:
        codes += _plane_bits(plane, places, valid, n, 4, 0)
        plane += (n * 4 + 7) // 8
    if BITS & 2:
        codes += _plane_bits(plane, places, valid, n, 2, BITS & 4)
        plane += (n * 2 + 7) // 8
    if BITS & 1:
        codes += _plane_bits(plane, places, valid, n, 1, BITS & 6)
    values = _values(codes, _number(record), _number(record + 4))
    if ADD:
        values = _load(target + places, valid) + values
    _store(target + places, values, valid)
