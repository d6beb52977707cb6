"""Prices against what really comes out."""

from __future__ import annotations

import pytest
import torch

from plait.compress import Cast, Exact, Quantizer
from plait.compress.estimate import normal_range

COUNT = 1 << 18


def measured(codec: Quantizer | Cast | Exact, source: torch.Tensor) -> float:
    payload = torch.empty(codec.payload_bytes(source.numel()), dtype=torch.uint8)
    target = torch.empty_like(source)
    codec.compress(source, payload, key=1)
    codec.extract(payload, target)
    return float((target - source).double().square().sum() / source.double().square().sum())


def normal(count: int = COUNT) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("bucket", [64, 1024, 8192])
def test_the_error_of_normal_numbers_is_foreseen(bits: int, bucket: int, stochastic: bool) -> None:
    codec = Quantizer(bits=bits, bucket=bucket, stochastic=stochastic)
    foreseen = codec.estimate(COUNT).relative_squared_error
    assert measured(codec, normal()) == pytest.approx(foreseen, rel=0.05)


@pytest.mark.parametrize("bucket", [1, 2, 3, 8, 20])
def test_small_buckets_are_foreseen(bucket: int) -> None:
    codec = Quantizer(bucket=bucket)
    foreseen = codec.estimate(COUNT).relative_squared_error
    # Grids between so few numbers are no longer around zero, as the model has them.
    assert measured(codec, normal()) == pytest.approx(foreseen, rel=0.25, abs=1e-12)


def test_a_measured_range_replaces_the_model() -> None:
    # Tails heavier than normal: the model is far too kind, the measured range is not.
    source = normal() ** 3
    codec = Quantizer(bits=4, bucket=1024)
    rows = source.view(-1, 1024)
    reach = (rows.amax(1) - rows.amin(1)).square().mean().sqrt() / source.square().mean().sqrt()
    found = measured(codec, source)
    assert found > 2 * codec.estimate(COUNT).relative_squared_error
    foreseen = codec.estimate(COUNT, bucket_range=float(reach)).relative_squared_error
    assert found == pytest.approx(foreseen, rel=0.25)


@pytest.mark.parametrize("to", ["fp16", "bf16"])
def test_the_error_of_a_cast_is_foreseen(to: str) -> None:
    codec = Cast(to)  # type: ignore[arg-type]
    assert measured(codec, normal()) == pytest.approx(codec.estimate(COUNT).relative_squared_error, rel=0.1)


def test_bytes_are_foreseen() -> None:
    assert Quantizer().estimate(COUNT).payload_bytes == COUNT // 2 + COUNT // 1024 * 8
    assert Cast().estimate(7).payload_bytes == 14
    assert Exact().estimate(7).payload_bytes == 28
    assert Exact().estimate(7).relative_squared_error == 0
    for codec in (Quantizer(), Cast(), Exact()):
        assert codec.estimate(0).payload_bytes == 0
        assert codec.estimate(0).relative_squared_error == 0


def test_a_short_last_bucket_counts_by_its_elements() -> None:
    codec = Quantizer(bucket=1000)
    whole, short = (codec.estimate(n).relative_squared_error for n in (1000, 500))
    assert codec.estimate(1500).relative_squared_error == pytest.approx((2 * whole + short) / 3)


def test_the_range_of_normal_numbers() -> None:
    assert normal_range(1) == 0
    assert normal_range(2) == pytest.approx(2**0.5, rel=1e-3)
    rows = normal(1 << 20).view(-1, 256)
    found = (rows.amax(1) - rows.amin(1)).square().mean().sqrt()
    assert normal_range(256) == pytest.approx(float(found), rel=0.01)
    sizes = [2, 3, 10, 100, 1000, 10**6, 2**30]
    assert [normal_range(size) for size in sizes] == sorted(normal_range(size) for size in sizes)
    assert 11 < normal_range(2**30) < 13
