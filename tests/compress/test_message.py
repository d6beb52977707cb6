"""Messages: whole, they come back; damaged, they are an error and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.compress import Quantizer, dequantize, quantize, wire
from plait.compress.rounding import stream_key
from plait.errors import UsageError

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 700)])
def test_a_message_says_all_that_is_needed(dtype: torch.dtype, bits: int, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    name = {"seed": 1, "step": 2, "rank": 3, "phase": 4, "parameter": "w"}
    message = quantize(tensor, bits=bits, bucket=100, **name)  # type: ignore[arg-type]
    found = dequantize(message)
    codec = Quantizer(bits=bits, bucket=100)
    payload = torch.empty(codec.payload_bytes(tensor.numel()), dtype=torch.uint8)
    codec.compress(tensor, payload, key=stream_key(**name))  # type: ignore[arg-type]
    expected = torch.empty(tensor.numel(), dtype=dtype)
    codec.extract(payload, expected)
    assert found.equal(expected)
    assert found.dtype == dtype
    assert message[wire.HEADER_BYTES :].equal(payload)


def test_rounding_is_reproducible_and_can_be_to_the_nearest() -> None:
    tensor = torch.randn(3000)
    assert quantize(tensor).equal(quantize(tensor))
    assert not quantize(tensor).equal(quantize(tensor, seed=1))
    nearest = quantize(tensor, stochastic=False)
    assert nearest.equal(quantize(tensor, stochastic=False, seed=1))
    error, other = ((dequantize(m) - tensor).square().mean() for m in (nearest, quantize(tensor)))
    assert error < 0.7 * other


def test_views_can_be_sent() -> None:
    tensor = torch.randn(64, 100)
    assert quantize(tensor.t()).equal(quantize(tensor.t().contiguous()))


MESSAGE = quantize(torch.linspace(-1, 1, 3000), bucket=512)


def refused(message: torch.Tensor) -> None:
    with pytest.raises(UsageError) as caught:
        dequantize(message)
    assert caught.value.setting == "message"


@settings(deadline=None, max_examples=200)
@given(noise=st.binary(max_size=300))
def test_noise_is_an_error(noise: bytes) -> None:
    refused(torch.tensor(list(noise), dtype=torch.uint8))


@settings(deadline=None, max_examples=200)
@given(noise=st.binary(min_size=20, max_size=300), size=st.integers(0, 300))
def test_noise_behind_a_good_start_is_an_error(noise: bytes, size: int) -> None:
    start = bytes(MESSAGE[: min(size, 12)].tolist())
    refused(torch.tensor(list(start + noise), dtype=torch.uint8))


@settings(deadline=None, max_examples=200)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, MESSAGE.numel() - 1), st.integers(1, 255)),
        min_size=1,
        max_size=4,
        unique_by=lambda change: change[0],
    )
)
def test_a_changed_byte_is_an_error(changes: list[tuple[int, int]]) -> None:
    message = MESSAGE.clone()
    for at, change in changes:
        message[at] ^= change
    refused(message)


def test_any_changed_bit_of_the_header_is_an_error() -> None:
    for bit in range(8 * wire.HEADER_BYTES):
        message = MESSAGE.clone()
        message[bit // 8] ^= 1 << bit % 8
        refused(message)


@settings(deadline=None, max_examples=100)
@given(cut=st.integers(0, MESSAGE.numel() - 1), more=st.integers(1, 100))
def test_a_cut_or_longer_message_is_an_error(cut: int, more: int) -> None:
    refused(MESSAGE[:cut])
    refused(torch.cat([MESSAGE, MESSAGE[:more]]))
    assert dequantize(MESSAGE).numel() == 3000


@pytest.mark.parametrize(
    "message", [b"plai", MESSAGE.to(torch.int8), MESSAGE.view(1, -1), None, torch.zeros(())]
)
def test_what_is_no_message_is_refused(message: object) -> None:
    with pytest.raises(UsageError, match="flat tensor of uint8") as caught:
        dequantize(message)  # type: ignore[arg-type]
    assert caught.value.setting == "message"


@pytest.mark.parametrize(
    ("settings", "setting"),
    [({"bits": 0}, "bits"), ({"bits": 9}, "bits"), ({"bucket": 0}, "bucket"), ({"seed": -1}, "seed")],
)
def test_wrong_settings_are_refused(settings: dict[str, int], setting: str) -> None:
    with pytest.raises(UsageError) as caught:
        quantize(torch.zeros(3), **settings)  # type: ignore[arg-type]
    assert caught.value.setting == setting


def test_other_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match="float64"):
        quantize(torch.zeros(3, dtype=torch.float64))
