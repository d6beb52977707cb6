"""The plain codec against the definition, worked out one number at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.compress import plain, rounding, wire

F = np.float32
MASK = 0xFFFFFFFF


def word(key: int, bucket: int, number: int) -> int:
    z = (key + (bucket + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    h = ((z & MASK) + number * 0x9E3779B1) & MASK
    h = (h ^ h >> 16) * 0x7FEB352D & MASK
    h = (h ^ h >> 15 ^ z >> 32) * 0x846CA68B & MASK
    return h ^ h >> 16


def number(key: int, bucket: int, place: int) -> int:
    h = word(key, bucket, place // 32 * 16 + place % 16)
    return h >> 16 if place % 32 >= 16 else h & 0xFFFF


def record(values: list[float], bits: int, key: int | None, bucket: int) -> bytes:
    """A bucket's record by the definition; a key of None rounds to the nearest."""
    x, levels = np.array(values, F), F(2**bits - 1)
    low, high = x.min() + F(0), x.max() + F(0)
    codes = [0] * len(values)
    if not np.isfinite(x).all():
        low, unit = F(np.nan), F(0)
    elif low == high:
        unit = F(0)
    else:
        wide = max(abs(low), abs(high)) >= F(2.0**126)
        scale = F(0.25) if wide else F(1)
        low, reach = low * scale, high * scale - low * scale
        unit = max(reach / levels, F(2.0**-110))
        if reach / unit > levels:
            unit = np.nextafter(unit, F(np.inf))
        for place, value in enumerate(x):
            fixed = int((value * scale - low) / (unit * F(2.0**-16)))
            r = 0x8000 if key is None else number(key, bucket, place)
            codes[place] = (fixed + r) >> 16
        unit = -unit if wide else unit
    packed, shift = b"", 0
    for width in [width for width in (8, 4, 2, 1) if bits & width]:
        size = -(-len(values) * width // 8)
        plane = [0] * size
        for place, code in enumerate(codes):
            plane[place % size] |= (code >> shift) % 2**width << width * (place // size)
        packed += bytes(plane)
        shift += width
    return low.tobytes() + unit.tobytes() + packed


CASES = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "ramp": lambda rng, n: np.arange(n),
    "constant": lambda rng, n: np.full(n, -1.7),
    "signed zeros": lambda rng, n: np.where(rng.random(n) < 0.5, 0.0, -0.0),
    "far from zero": lambda rng, n: 1e6 + rng.random(n),
    "denormal": lambda rng, n: rng.standard_normal(n) * 1e-42,
    "tiny": lambda rng, n: rng.standard_normal(n) * 1e-35,
    "huge": lambda rng, n: rng.uniform(-3.4e38, 3.4e38, n),
    "infinite": lambda rng, n: np.where(np.arange(n) == n // 2, np.inf, rng.standard_normal(n)),
    "not a number": lambda rng, n: np.where(np.arange(n) == n - 1, np.nan, rng.standard_normal(n)),
}


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("case", CASES)
def test_a_payload_is_the_records_of_its_buckets(case: str, bits: int) -> None:
    rng = np.random.default_rng(bits)
    for count, bucket in ((1, 1), (5, 2), (40, 40), (77, 37), (100, 64)):
        values = CASES[case](rng, count).astype(F)
        key = int(rng.integers(2**64, dtype=np.uint64))
        first = int(rng.integers(2**40))
        for stochastic in (True, False):
            expected = b"".join(
                record(values[at : at + bucket].tolist(), bits, key if stochastic else None, first + i)
                for i, at in enumerate(range(0, count, bucket))
            )
            payload = torch.empty(wire.payload_bytes(count, bits, bucket), dtype=torch.uint8)
            plain.quantize(
                torch.from_numpy(values),
                payload,
                bits=bits,
                bucket=bucket,
                stochastic=stochastic,
                key=key,
                first_bucket=first,
            )
            assert bytes(payload.tolist()) == expected


def test_random_numbers_follow_the_definition() -> None:
    for key in (0, 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF):
        for first in (0, 2**32 - 1, 2**40):
            drawn = rounding.draw(key, first, 3, 70, torch.device("cpu"))
            expected = [[number(key, first + row, place) for place in range(70)] for row in range(3)]
            assert drawn.tolist() == expected


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("elements", [1, 2, 7, 8, 9, 31, 64, 1000])
def test_planes_come_apart_as_they_were_put_together(bits: int, elements: int) -> None:
    codes = torch.randint(2**bits, (3, elements), dtype=torch.uint8)
    packed = plain.pack(codes, bits)
    assert packed.shape == (3, wire.record_bytes(elements, bits) - wire.GRID_BYTES)
    assert plain.unpack(packed, elements, bits).equal(codes)
