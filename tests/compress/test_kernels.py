"""The compiled codec: the bytes of the plain one, on every instruction set that this machine can run."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait import native
from plait.compress import kernels, plain, wire

ISAS = [isa for isa in native.isas() if isa != "python"]
pytestmark = pytest.mark.skipif(not ISAS, reason=str(native.missing()))

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SPECIAL = [
    0.0, -0.0, 1.0, -1.0, 65504.0, 1e-45, -1e-45, 1e-40, 1.2e-38, 7.7e-34, 1e-30,
    2.0**126, -(2.0**126), 2.0**127, 3.4028234e38, -3.4028234e38,
    float("inf"), float("-inf"), float("nan"),
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    values: torch.Tensor
    settings: dict[str, Any]

    @property
    def layout(self) -> dict[str, int]:
        return {"bits": self.settings["bits"], "bucket": self.settings["bucket"]}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Numbers of any scale, with special ones strewn in, and settings of every kind."""
    count = draw(st.integers(0, 200) | st.integers(0, 3000))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.randn(count, generator=generator) * 10.0 ** draw(st.floats(-45, 38))
    values += draw(st.sampled_from([0.0, 1.0, 1e6, -1e30]))
    for place, special in draw(
        st.lists(st.tuples(st.integers(0, 2999), st.sampled_from(SPECIAL)), max_size=10)
    ):
        values[place : place + 1] = special
    if draw(st.integers(0, 9)) == 0:
        values.fill_(draw(st.sampled_from(SPECIAL)))
    settings = {
        "bits": draw(st.integers(1, 8)),
        "bucket": draw(st.integers(1, 200) | st.sampled_from([32, 64, 1000, 1024, 4096])),
        "stochastic": draw(st.booleans()),
        "key": draw(st.integers(0, 2**64 - 1)),
        "first_bucket": draw(st.integers(0, 2**40)),
    }
    return Case(values.to(draw(st.sampled_from(DTYPES))), settings)


def encoded(module: Any, case: Case, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    size = wire.payload_bytes(case.values.numel(), **case.layout)
    payload = torch.full((size,), 0xAA, dtype=torch.uint8)
    residual = torch.full((case.values.numel(),), 7.0)
    module.quantize(case.values, payload, residual=residual, **case.settings, **more)
    return payload, residual


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, but that any NaN is a NaN."""
    return torch.where(a.isnan(), 0, a).equal(torch.where(b.isnan(), 0, b)) and a.isnan().equal(b.isnan())


@pytest.mark.parametrize("isa", ISAS)
@settings(deadline=None, max_examples=150)
@given(case=cases(), threads=st.integers(1, 5))
def test_encoded_bytes_and_residuals_are_those_of_the_plain_codec(isa: str, case: Case, threads: int) -> None:
    payload, residual = encoded(plain, case)
    mine, my_residual = encoded(kernels, case, threads=threads, isa=isa)
    assert mine.equal(payload)
    assert my_residual.view(torch.int32).equal(residual.view(torch.int32))


@pytest.mark.parametrize("isa", ISAS)
@settings(deadline=None, max_examples=150)
@given(
    case=cases(),
    dtype=st.sampled_from(DTYPES),
    add=st.booleans(),
    threads=st.integers(1, 5),
    garbage=st.none() | st.integers(0, 2**32),
)
def test_decoded_numbers_are_those_of_the_plain_codec(
    isa: str, case: Case, dtype: torch.dtype, add: bool, threads: int, garbage: int | None
) -> None:
    payload, _ = encoded(plain, case)
    if garbage is not None:  # whatever arrives, all decode it alike
        noise = torch.Generator().manual_seed(garbage)
        payload = torch.randint(256, payload.shape, dtype=torch.uint8, generator=noise)
    targets = [torch.linspace(-2, 2, case.values.numel()).to(dtype) for _ in range(2)]
    plain.dequantize(payload, targets[0], add=add, **case.layout)
    kernels.dequantize(payload, targets[1], add=add, threads=threads, isa=isa, **case.layout)
    assert same(*targets)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_16_bits_survives_its_own_conversion(isa: str, dtype: torch.dtype) -> None:
    # One element a bucket is kept as it is, so this is the kernels' widening and narrowing alone.
    raw = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = raw.view(torch.float16 if dtype == torch.float32 else dtype)
    payload = torch.empty(wire.payload_bytes(values.numel(), 1, 1), dtype=torch.uint8)
    kernels.quantize(values, payload, bits=1, bucket=1, stochastic=True, key=0, first_bucket=0, isa=isa)
    target = torch.empty(values.numel(), dtype=dtype)
    kernels.dequantize(payload, target, bits=1, bucket=1, add=False, isa=isa)
    expected = torch.where(values.isfinite(), values.float() + 0.0, torch.nan).to(dtype)
    assert same(target, expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrowing_rounds_to_the_nearest_even(isa: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), generator=generator)
    ties = bits[: 1 << 14] >> 16 << 16 | 0x8000  # halfway between two numbers of bf16
    more = bits[1 << 14 : 1 << 15] >> 13 << 13 | 0x1000  # and of fp16
    values = torch.cat([bits, ties, more]).to(torch.int32).view(torch.float32)
    # A code of 0 in buckets of 64 decodes to the lowest value, given as it is in the record.
    payload = torch.zeros(values.numel(), wire.record_bytes(64, 8), dtype=torch.uint8)
    payload[:, :4] = values[:, None].contiguous().view(torch.uint8)
    target = torch.empty(values.numel() * 64, dtype=dtype)
    kernels.dequantize(payload.view(-1), target, bits=8, bucket=64, add=False, isa=isa)
    assert same(target.view(-1, 64), values.to(dtype)[:, None].expand(-1, 64))


@pytest.mark.parametrize("isa", ISAS)
def test_nothing_is_written_beyond_the_end(isa: str) -> None:
    for count in (1, 31, 33, 100, 1025):
        for bits in range(1, 9):
            size = wire.payload_bytes(count, bits, 96)
            payload = torch.full((size + 64,), 0xAA, dtype=torch.uint8)
            residual, target = torch.full((count + 16,), 7.0), torch.full((count + 16,), 7.0)
            kernels.quantize(
                torch.randn(count), payload[:size], bits=bits, bucket=96, stochastic=True, key=1,
                first_bucket=0, residual=residual[:count], isa=isa,
            )  # fmt: skip
            kernels.dequantize(payload[:size], target[:count], bits=bits, bucket=96, add=True, isa=isa)
            assert (payload[size:] == 0xAA).all()
            assert (residual[count:] == 7).all()
            assert (target[count:] == 7).all()


@pytest.mark.parametrize("isa", ISAS)
def test_denormals_count_whatever_the_thread_is_set_to(isa: str) -> None:
    values = torch.randn(4096) * 1e-40
    values[::100] = 1e-33
    case = Case(values, {"bits": 4, "bucket": 64, "stochastic": True, "key": 5, "first_bucket": 0})
    before = encoded(kernels, case, isa=isa)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormals")
    try:
        after = encoded(kernels, case, isa=isa)
        flushed = float(torch.tensor(1e-40) * 1)
    finally:
        torch.set_flush_denormal(False)
    assert flushed == 0  # the setting was on
    assert all(a.equal(b) for a, b in zip(before, after, strict=True))


def test_the_interpreter_is_released() -> None:
    values = torch.zeros(1 << 24)
    values[::2] = 1.0
    payload = torch.empty(wire.payload_bytes(values.numel(), 4, 1024), dtype=torch.uint8)
    done = threading.Event()

    def work() -> None:
        kernels.quantize(
            values, payload, bits=4, bucket=1024, stochastic=True, key=0, first_bucket=0, isa="scalar"
        )
        done.set()

    thread, turns = threading.Thread(target=work), 0
    switch = sys.getswitchinterval()
    sys.setswitchinterval(10.0)  # longer than the kernel: only a release lets this thread run meanwhile
    try:
        thread.start()
        while not done.is_set():
            turns += 1
            done.wait(0.0005)
    finally:
        sys.setswitchinterval(switch)
    thread.join()
    assert turns > 1
