"""The codec in plain torch: what the compiled kernels are held against, and what runs where there are none.

All arithmetic is fp32, one IEEE operation at a time in the order written, on any device, so the bytes are
those of the kernels. It works through a piece of the buckets at a time, to keep its memory small.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from plait.compress import rounding, wire

WIDE = 2.0**126
"""From here on sums of two numbers may overflow: such buckets are kept at a quarter of their size."""
LEAST_UNIT = 2.0**-110
"""Its 2^-16 part is the least normal number."""
_PIECE_ELEMENTS = 1 << 18


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
    """Write the records of a source; ``threads`` is torch's own affair here."""
    source, payload = source.detach().view(-1), payload.view(-1)
    lost_to = None if residual is None else residual.detach().view(-1)
    for at, buckets, n, start in _pieces(source.numel(), bits, bucket):
        values = source[at : at + buckets * n].view(buckets, n).to(torch.float32)
        low, unit = grid(values, bits)
        flat, scale = unit == 0, _scale(unit < 0)
        step = torch.where(flat, 1.0, unit.abs() * 2.0**-16)
        fixed = torch.where(flat, 0.0, (values * scale - low) / step).to(torch.int32)
        numbers: Tensor | int = 0x8000
        if stochastic:
            numbers = rounding.draw(key, first_bucket + at // bucket, buckets, n, source.device)
        codes = ((fixed + numbers) >> 16).to(torch.uint8)
        record = payload[start : start + buckets * wire.record_bytes(n, bits)].view(buckets, -1)
        record[:, : wire.GRID_BYTES] = torch.cat([low, unit], dim=1).view(torch.uint8)
        record[:, wire.GRID_BYTES :] = pack(codes, bits)
        if lost_to is not None:
            largest = torch.finfo(torch.float32).max
            lost = (values - decode(codes, low, unit)).clamp(-largest, largest)
            lost_to[at : at + buckets * n].view(buckets, n).copy_(torch.where(flat, 0.0, lost))


def dequantize(
    payload: Tensor, target: Tensor, *, bits: int, bucket: int, add: bool, threads: int = 1
) -> None:
    """Decode the records over a target, or add them to it."""
    payload, target = payload.view(-1), target.detach().view(-1)
    for at, buckets, n, start in _pieces(target.numel(), bits, bucket):
        record = payload[start : start + buckets * wire.record_bytes(n, bits)].view(buckets, -1)
        head = record[:, : wire.GRID_BYTES].clone(memory_format=torch.contiguous_format)
        low, unit = head.view(torch.float32)[:, :1], head.view(torch.float32)[:, 1:]
        values = decode(unpack(record[:, wire.GRID_BYTES :], n, bits), low, unit)
        part = target[at : at + buckets * n].view(buckets, n)
        part.copy_(part.to(torch.float32) + values if add else values)


def grid(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The lowest value and the unit of each row, as a record has them."""
    low, high = values.amin(1, keepdim=True) + 0.0, values.amax(1, keepdim=True) + 0.0  # -0 becomes 0
    finite = low.isfinite() & high.isfinite()  # the extremes of a row with a NaN are NaN
    wide = torch.maximum(low.abs(), high.abs()) >= WIDE
    least = low * _scale(wide)
    reach = high * _scale(wide) - least
    # A tensor, because torch multiplies by the reciprocal of a number on some devices.
    levels = torch.full_like(reach, 2**bits - 1)
    unit = (reach / levels).clamp_min(LEAST_UNIT)
    # Rounded down, it could give the highest value a code too many: the next number above cannot.
    above = (unit.view(torch.int32) + 1).view(torch.float32)
    unit = torch.where(reach / unit > levels, above, unit)
    unit = torch.where(wide, -unit, unit)
    flat = ~finite | (low == high)
    least = torch.where(flat, torch.where(finite, low, torch.nan), least)
    return least, torch.where(flat, 0.0, unit)


def decode(codes: Tensor, low: Tensor, unit: Tensor) -> Tensor:
    """The values that codes stand for: low + code * unit, at four times that where the unit is below 0."""
    values = low + codes.to(torch.float32) * unit.abs()
    largest = torch.finfo(torch.float32).max
    return torch.where(unit < 0, (values * 4).clamp(-largest, largest), values)


def pack(codes: Tensor, bits: int) -> Tensor:
    """The planes of the codes of each row, side by side."""
    found = []
    for width, shift in wire.planes(bits):
        size, slots = wire.plane_bytes(codes.shape[1], width), 8 // width
        part = codes >> shift & (1 << width) - 1
        part = torch.nn.functional.pad(part, (0, size * slots - codes.shape[1])).view(-1, slots, size)
        places = width * torch.arange(slots, device=codes.device, dtype=torch.uint8)
        # The slots of a byte have no bit in common, so their sum is what they are together.
        found.append((part << places[:, None]).sum(1, dtype=torch.uint8))
    return torch.cat(found, dim=1)


def unpack(packed: Tensor, elements: int, bits: int) -> Tensor:
    """The codes of each row from its planes."""
    codes = torch.zeros(packed.shape[0], elements, dtype=torch.uint8, device=packed.device)
    at = 0
    for width, shift in wire.planes(bits):
        size, slots = wire.plane_bytes(elements, width), 8 // width
        places = width * torch.arange(slots, device=packed.device, dtype=torch.uint8)
        part = packed[:, None, at : at + size] >> places[:, None] & (1 << width) - 1
        codes |= part.reshape(-1, slots * size)[:, :elements] << shift
        at += size
    return codes


def _scale(wide: Tensor) -> Tensor:
    return torch.ones_like(wide, dtype=torch.float32).masked_fill_(wide, 0.25)


def _pieces(count: int, bits: int, bucket: int) -> Iterator[tuple[int, int, int, int]]:
    """Buckets of one size each time: first element, number of buckets, their size, first byte."""
    whole = count // bucket
    most = max(1, _PIECE_ELEMENTS // bucket)
    for first in range(0, whole, most):
        yield first * bucket, min(most, whole - first), bucket, first * wire.record_bytes(bucket, bits)
    if count % bucket:
        yield whole * bucket, 1, count % bucket, whole * wire.record_bytes(bucket, bits)
