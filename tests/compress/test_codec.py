"""Codecs: what they promise to whoever uses them."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.compress import Cast, Codec, Exact, Quantizer
from plait.compress.rounding import stream_key
from plait.errors import UsageError

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CODECS: list[Codec] = [
    Quantizer(),
    Quantizer(bits=8, bucket=100),
    Quantizer(bits=3, bucket=7, stochastic=False),
    Quantizer(bits=1, threads=2),
    Cast("fp16"),
    Cast("bf16"),
    Exact(),
]


def payload_for(codec: Codec, count: int) -> torch.Tensor:
    return torch.empty(codec.payload_bytes(count), dtype=torch.uint8)


def through(codec: Codec, source: torch.Tensor, *, key: int = 0, first: int = 0) -> torch.Tensor:
    """The source as it arrives."""
    payload = payload_for(codec, source.numel())
    codec.compress(source, payload, key=key, first=first)
    target = torch.full_like(source, 7)
    codec.extract(payload, target)
    return target


def bound(source: torch.Tensor, codec: Quantizer) -> torch.Tensor:
    """The largest error of each element: one unit (half of it, to the nearest) and the rounding of fp32."""
    largest = torch.empty_like(source, dtype=torch.float64)
    for at in range(0, source.numel(), codec.bucket):
        x = source[at : at + codec.bucket].double()
        unit = max(float(x.max() - x.min()) / (2**codec.bits - 1), 2.0**-110)
        least = 0.0 if x.max() == x.min() else unit * (1 if codec.stochastic else 0.5)
        largest[at : at + codec.bucket] = least * (1 + 1e-4) + 4 * float(x.abs().max()) * 2.0**-24
    return largest


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (1,), (1023,), (1025,), (3, 5, 77)])
def test_numbers_come_back_about_the_same(codec: Codec, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = through(codec, source)
    assert found.shape == source.shape
    assert found.dtype == dtype
    if source.numel():
        error = float((found - source).double().square().mean() / source.double().square().mean())
        assert error <= 2 * codec.estimate(source.numel()).relative_squared_error + 1e-4


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES)
def test_adding_adds_what_extracting_gives(codec: Codec, dtype: torch.dtype) -> None:
    source = torch.randn(3000)
    payload = payload_for(codec, 3000)
    codec.compress(source, payload, key=3)
    decoded, target = torch.empty(3000), torch.randn(3000).to(dtype)
    codec.extract(payload, decoded)
    expected = (target.float() + decoded).to(dtype)
    codec.extract(payload, target, add=True)
    assert target.equal(expected)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_residual_is_what_was_lost(codec: Codec, dtype: torch.dtype) -> None:
    source = torch.randn(3000).to(dtype)
    payload, residual = payload_for(codec, 3000), torch.full((3000,), 7.0)
    codec.compress(source, payload, key=3, residual=residual)
    decoded = torch.empty(3000)
    codec.extract(payload, decoded)
    assert residual.equal(source.float() - decoded)
    if dtype == torch.float32:
        again = payload_for(codec, 3000)
        codec.compress(source, again, key=3, residual=source)  # in its place
        assert again.equal(payload)
        assert source.equal(residual)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_payloads_may_stand_anywhere_in_any_shape(codec: Codec) -> None:
    source = torch.randn(500)
    expected = payload_for(codec, 500)
    codec.compress(source, expected, key=1)
    row, found = torch.empty_like(expected)[None], torch.empty(500)
    codec.compress(source.view(5, 100), row, key=1)
    codec.extract(row, found.view(100, 5))
    assert row[0].equal(expected)
    assert found.equal(through(codec, source, key=1))
    for offset in (1, 2, 3, 5):
        memory = torch.zeros(expected.numel() + offset, dtype=torch.uint8)
        codec.compress(source, memory[offset:], key=1)
        assert memory[offset:].equal(expected)
        targets = torch.empty(500), torch.empty(500)
        codec.extract(memory[offset:], targets[0])
        codec.extract(expected, targets[1])
        assert targets[0].equal(targets[1])


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_chunks_do_not_change_the_bytes(data: st.DataObject) -> None:
    bucket = data.draw(st.integers(1, 100))
    codec = Quantizer(bits=data.draw(st.integers(1, 8)), bucket=bucket)
    count, key = data.draw(st.integers(1, 2000)), data.draw(st.integers(0, 2**64 - 1))
    source = torch.randn(count)
    whole = payload_for(codec, count)
    codec.compress(source, whole, key=key)
    cuts = data.draw(st.lists(st.integers(0, count // bucket), max_size=5))
    edges = [0, *sorted(cut * bucket for cut in cuts), count]
    parts = []
    for begin, end in itertools.pairwise(edges):
        part = payload_for(codec, end - begin)
        codec.compress(source[begin:end], part, key=key, first=begin)
        parts.append(part)
    assert torch.cat(parts).equal(whole)


def test_another_key_or_place_gives_other_bytes() -> None:
    codec, source = Quantizer(), torch.randn(4096)
    seen = set()
    for name in ({}, {"seed": 1}, {"step": 1}, {"rank": 1}, {"phase": 1}, {"parameter": "w"}):
        for first in (0, 1024, 2**40):
            payload = payload_for(codec, 4096)
            codec.compress(source, payload, key=stream_key(**name), first=first)  # type: ignore[arg-type]
            seen.add(bytes(payload.tolist()))
    assert len(seen) == 18


@settings(deadline=None, max_examples=150)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=100),
    bits=st.integers(1, 8),
    bucket=st.integers(1, 50),
    stochastic=st.booleans(),
    key=st.integers(0, 2**64 - 1),
)
def test_the_error_is_at_most_a_unit(
    values: list[float], bits: int, bucket: int, stochastic: bool, key: int
) -> None:
    codec = Quantizer(bits=bits, bucket=bucket, stochastic=stochastic)
    source = torch.tensor(values)
    found = through(codec, source, key=key)
    assert found.isfinite().all()
    assert ((found.double() - source.double()).abs() <= bound(source, codec)).all()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("scale", [1.0, 1e-36, 2e38])
def test_stochastic_rounding_is_unbiased(bits: int, scale: float) -> None:
    # 1024 elements, each the mean of 1000 roundings, against its own standard deviation. A
    # sound rounding exceeds 6 for one of them with probability 1024 * 2e-9 = 2e-6; the seeds are fixed.
    codec = Quantizer(bits=bits)
    source = (torch.rand(1024, generator=torch.Generator().manual_seed(bits)) * 2 - 1) * scale
    total, rounds = torch.zeros(1024, dtype=torch.float64), 1000
    for step in range(rounds):
        total += through(codec, source, key=stream_key(step=step)).double()
    unit = max(float(source.double().max() - source.double().min()) / (2**bits - 1), 2.0**-110)
    place = (source.double() - source.double().min()) / unit
    spread = unit * ((place % 1) * (1 - place % 1)).sqrt()
    allowed = 6 * spread / rounds**0.5 + unit * 2.0**-15 + float(source.abs().max()) * 2.0**-22
    assert ((total / rounds - source.double()).abs() <= allowed).all()
    # The sum over the bucket too, within 5 standard deviations: 6e-7.
    drift = float((total / rounds - source.double()).sum())
    assert abs(drift) <= 5 * float(spread.square().sum().sqrt()) / rounds**0.5 + 1024 * unit * 2.0**-15


def test_errors_of_ranks_average_out() -> None:
    # With independent rounding the squared error of a mean over W ranks is 1/W of one rank's.
    codec, source = Quantizer(), torch.randn(1 << 16, generator=torch.Generator().manual_seed(1))
    errors = torch.stack([through(codec, source, key=stream_key(rank=rank)) - source for rank in range(16)])
    ratio = float(errors.mean(0).square().mean() / errors.square().mean())
    assert ratio == pytest.approx(1 / 16, rel=0.03)


@pytest.mark.parametrize("codec", [c for c in CODECS if isinstance(c, Quantizer)], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_bucket_that_is_not_finite_arrives_as_nan(codec: Quantizer, dtype: torch.dtype, bad: float) -> None:
    for count in (1, 40, 2500):
        for place in {0, count // 3, count - 1}:
            source = torch.randn(count).to(dtype)
            source[place] = bad
            payload, residual = payload_for(codec, count), torch.full((count,), 7.0)
            codec.compress(source, payload, key=1, residual=residual)
            target = torch.zeros(count)
            codec.extract(payload, target)
            first = place // codec.bucket * codec.bucket
            hit = torch.zeros(count, dtype=torch.bool)
            hit[first : first + codec.bucket] = True
            assert target.isnan().equal(hit)
            # Error feedback must not carry it into the next step.
            assert (residual[hit] == 0).all()
            assert residual.isfinite().all()


@pytest.mark.parametrize("to", ["fp16", "bf16"])
def test_a_cast_carries_what_is_not_finite_element_by_element(to: str) -> None:
    source = torch.tensor([1.0, math.inf, -math.inf, math.nan, 3.4028234e38])
    payload, residual = torch.empty(10, dtype=torch.uint8), torch.full((5,), 7.0)
    codec = Cast(to)  # type: ignore[arg-type]
    codec.compress(source, payload, key=0, residual=residual)
    target = torch.empty(5)
    codec.extract(payload, target)
    assert target[:3].equal(source[:3])
    assert target[3].isnan()
    assert target[4] == math.inf
    assert residual.equal(torch.zeros(5))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3.4028234e38, 1e-45, 2.0**126])
def test_constant_buckets_are_exact(value: float) -> None:
    source = torch.full((100,), value)
    for bits in (1, 4, 8):
        found = through(Quantizer(bits=bits, bucket=64), source)
        assert found.equal(source)
        assert not found.signbit().any() or value < 0


def test_the_ends_of_the_range_of_fp32() -> None:
    largest = 3.4028234663852886e38
    source = torch.linspace(-1, 1, 257).double().mul(largest).float()
    for bits in range(1, 9):
        codec = Quantizer(bits=bits, bucket=257)
        payload, residual = payload_for(codec, 257), torch.empty(257)
        codec.compress(source, payload, key=1, residual=residual)
        found = torch.empty(257)
        codec.extract(payload, found)
        assert found.isfinite().all()
        assert residual.isfinite().all()
        assert found[0] == -largest
        assert found[-1] == pytest.approx(largest, rel=1e-6)
        error = (found.double() - source.double()).abs().max()
        assert error <= 2 * largest / (2**bits - 1) * (1 + 1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_compiled_kernels_the_bytes_are_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = torch.randn(5000).to(dtype)
    found = []
    for setting in ("1", "0"):
        monkeypatch.setenv("PLAIT_NATIVE", setting)
        payload, target = payload_for(Quantizer(), 5000), torch.empty_like(source)
        Quantizer().compress(source, payload, key=9)
        Quantizer().extract(payload, target)
        found.append((payload, target))
    assert found[0][0].equal(found[1][0])
    assert found[0][1].equal(found[1][1])


def test_parameters_that_train_can_be_read_and_written() -> None:
    parameter = torch.nn.Parameter(torch.randn(100))
    assert through(Quantizer(), parameter).isfinite().all()
    payload = payload_for(Cast(), 100)
    Cast().compress(parameter, payload, key=0)
    Cast().extract(payload, parameter, add=True)
    assert parameter.grad_fn is None


def test_codecs_are_codecs() -> None:
    assert all(isinstance(codec, Codec) for codec in CODECS)
    assert Quantizer(threads=4) == Quantizer()  # how fast, not what


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: Quantizer(bits=0), "bits"),
        (lambda: Quantizer(bits=9), "bits"),
        (lambda: Quantizer(bits=True), "bits"),
        (lambda: Quantizer(bits=2.0), "bits"),  # type: ignore[arg-type]
        (lambda: Quantizer(bucket=0), "bucket"),
        (lambda: Quantizer(bucket=2**30 + 1), "bucket"),
        (lambda: Quantizer(stochastic="no"), "stochastic"),  # type: ignore[arg-type]
        (lambda: Quantizer(threads=0), "threads"),
        (lambda: Cast("fp8"), "to"),  # type: ignore[arg-type]
        (lambda: Quantizer().payload_bytes(-1), "count"),
        (lambda: Exact().payload_bytes(1.5), "count"),  # type: ignore[arg-type]
        (lambda: Quantizer().estimate(-1), "count"),
        (lambda: Quantizer().estimate(10, bucket_range=-1.0), "bucket_range"),
        (lambda: Quantizer().estimate(10, bucket_range=math.nan), "bucket_range"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: object, setting: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()  # type: ignore[operator]
    assert caught.value.setting == setting
    assert caught.value.works


GOOD = torch.zeros(2048)
BYTES = Quantizer().payload_bytes(2048)


@pytest.mark.parametrize(
    ("arguments", "setting", "says"),
    [
        ({"source": GOOD.double()}, "source", "float64"),
        ({"source": GOOD.int()}, "source", "int32"),
        ({"source": torch.zeros(32, 64).t()}, "source", "strides"),
        ({"source": GOOD[::2]}, "source", "strides"),
        ({"payload": torch.empty(BYTES + 1, dtype=torch.uint8)}, "payload", "1041 elements where 2048"),
        ({"payload": torch.empty(BYTES - 1, dtype=torch.uint8)}, "payload", "1039"),
        ({"payload": torch.empty(BYTES, dtype=torch.int8)}, "payload", "int8"),
        ({"payload": torch.empty(2 * BYTES, dtype=torch.uint8)[::2]}, "payload", "strides"),
        ({"payload": torch.empty(BYTES, dtype=torch.uint8, device="meta")}, "payload", "meta"),
        ({"residual": torch.empty(2047)}, "residual", "2047"),
        ({"residual": torch.empty(2048, dtype=torch.float16)}, "residual", "float16"),
        ({"residual": torch.empty(4096)[::2]}, "residual", "strides"),
        ({"key": -1}, "key", "64 bits"),
        ({"key": 2**64}, "key", "64 bits"),
        ({"first": 1000}, "first", "element 1000 is not the first of a bucket of 1024"),
        ({"first": -1024}, "first", "-1024"),
    ],
)
def test_what_cannot_be_compressed_is_refused(arguments: dict[str, object], setting: str, says: str) -> None:
    given = {"source": GOOD, "payload": torch.empty(BYTES, dtype=torch.uint8), "key": 0, **arguments}
    with pytest.raises(UsageError, match=says) as caught:
        Quantizer().compress(**given)  # type: ignore[arg-type]
    assert caught.value.setting == setting
    assert caught.value.works


@pytest.mark.parametrize("codec", [Quantizer(), Cast(), Exact()], ids=repr)
def test_what_cannot_be_extracted_is_refused(codec: Codec) -> None:
    payload = payload_for(codec, 100)
    for target, setting in (
        (torch.zeros(101), "payload"),
        (torch.zeros(100).long(), "target"),
        (torch.zeros(200)[::2], "target"),
    ):
        with pytest.raises(UsageError) as caught:
            codec.extract(payload, target)
        assert caught.value.setting == setting


def test_prices_need_no_torch() -> None:
    code = (
        "import sys; from plait.compress import Quantizer, Cast, Exact\n"
        "for codec in (Quantizer(), Cast(), Exact()): codec.estimate(10**6)\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
