"""The codec for GPUs in Triton's interpreter; test_triton_kernels.py runs this in a process of its own."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

from plait.compress import plain, wire
from plait.compress import triton_kernels as kernels

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, on Inf and NaN

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
VALUES = {
    "normal": lambda n: torch.randn(n),
    "constant": lambda n: torch.full((n,), -2.5),
    "zeros": lambda n: torch.tensor([0.0, -0.0]).repeat(n)[:n],
    "denormal": lambda n: torch.randn(n) * 1e-40,
    "tiny": lambda n: torch.randn(n) * 1e-33,
    "huge": lambda n: torch.linspace(-3.4e38, 3.4e38, n),
    "infinite": lambda n: torch.where(torch.arange(n) == n // 3, math.inf, torch.randn(n)),
    "not a number": lambda n: torch.where(torch.arange(n) == n - 1, math.nan, torch.randn(n)),
}


def encoded(
    module: ModuleType, values: torch.Tensor, bits: int, bucket: int, stochastic: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    payload = torch.full((wire.payload_bytes(values.numel(), bits, bucket),), 0xAA, dtype=torch.uint8)
    residual = torch.full((values.numel(),), 7.0)
    module.quantize(
        values,
        payload,
        bits=bits,
        bucket=bucket,
        stochastic=stochastic,
        key=0xFEDCBA9876543210,
        first_bucket=2**33,
        residual=residual,
    )
    return payload, residual


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.where(a.isnan(), 0, a).equal(torch.where(b.isnan(), 0, b)) and a.isnan().equal(b.isnan())


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("count", "bucket"), [(0, 4), (5, 1), (100, 33), (70, 1000), (130, 64)])
def test_bytes_are_those_of_the_plain_codec(bits: int, count: int, bucket: int) -> None:
    for stochastic, dtype in ((True, DTYPES[bits % 3]), (False, DTYPES[(bits + 1) % 3])):
        values = torch.randn(count).to(dtype)
        expected, found = (encoded(module, values, bits, bucket, stochastic) for module in (plain, kernels))
        assert found[0].equal(expected[0])
        assert found[1].view(torch.int32).equal(expected[1].view(torch.int32))


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(values: str, dtype: torch.dtype) -> None:
    source = VALUES[values](75).to(dtype)
    for bits in (1, 4, 8):
        expected, found = (encoded(module, source, bits, 32, True) for module in (plain, kernels))
        assert found[0].equal(expected[0])
        assert found[1].view(torch.int32).equal(expected[1].view(torch.int32))
        targets = [torch.linspace(-2, 2, 75).to(dtype) for _ in range(2)]
        for module, target in zip((plain, kernels), targets, strict=True):
            module.dequantize(expected[0], target, bits=bits, bucket=32, add=bits == 4)
        assert same(*targets)


@pytest.mark.parametrize("bits", range(1, 9))
def test_whatever_arrives_is_decoded_alike(bits: int) -> None:
    payload = torch.randint(256, (wire.payload_bytes(100, bits, 33),), dtype=torch.uint8)
    for dtype in DTYPES:
        targets = [torch.linspace(-2, 2, 100).to(dtype) for _ in range(2)]
        for module, target in zip((plain, kernels), targets, strict=True):
            module.dequantize(payload, target, bits=bits, bucket=33, add=True)
        assert same(*targets)


def test_the_residual_may_be_the_source() -> None:
    source = torch.randn(100)
    expected, residual = encoded(plain, source, 7, 40, True)
    payload = torch.empty_like(expected)
    kernels.quantize(
        source, payload, bits=7, bucket=40, stochastic=True, key=0xFEDCBA9876543210,
        first_bucket=2**33, residual=source,
    )  # fmt: skip
    assert payload.equal(expected)
    assert source.equal(residual)
