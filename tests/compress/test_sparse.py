import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.compress import Codec, TopK
from plait.errors import UsageError


def through(codec, source):
    payload = torch.empty(codec.payload_bytes(source.numel()), dtype=torch.uint8)
    residual, target = torch.full_like(source, 5, dtype=torch.float32), torch.full_like(source, 7)
    codec.compress(source, payload, key=0, residual=residual)
    codec.extract(payload, target)
    return payload, target, residual


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 400), st.integers(1, 20), st.sampled_from([20, 27, 64, 300]), st.integers(0, 99))
def test_the_largest_of_each_bucket_arrive_and_the_rest_is_the_residual(count, keep, bucket, seed):
    source = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    _, target, residual = through(TopK(keep=keep, bucket=bucket), source)
    assert torch.equal(target + residual, source)
    for start in range(0, count, bucket):
        part, kept = source[start : start + bucket], target[start : start + bucket]
        assert kept.ne(0).sum() == min(keep, len(part))
        if keep < len(part):
            assert part[kept.ne(0)].abs().min() >= part[kept.eq(0)].abs().max()


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 300), st.integers(0, 4))
def test_a_cut_between_buckets_changes_no_byte(count, cut):
    codec, source = TopK(keep=3, bucket=50), torch.randn(count)
    at = min(count // 50, cut) * 50
    whole, _, _ = through(codec, source)
    parts = [through(codec, part)[0] for part in (source[:at], source[at:])]
    assert torch.equal(whole, torch.cat(parts))


def test_it_is_added_and_other_types_work():
    codec, source = TopK(keep=2, bucket=4), torch.tensor([1.0, -5.0, 3.0, 0.5, 2.0])
    payload = through(codec, source)[0]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        target = torch.ones(5, dtype=dtype)
        codec.extract(payload, target, add=True)
        assert target.tolist() == [1.0, -4.0, 4.0, 1.0, 3.0]
        assert through(codec, source.to(dtype))[1].tolist() == [0.0, -5.0, 3.0, 0.0, 2.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_travels_and_is_not_remembered(value):
    source = torch.randn(2000)
    source[77] = value
    _, target, residual = through(TopK(keep=1), source)
    assert not target[77].isfinite()
    assert residual.isfinite().all()


def test_bytes_and_error_are_known_beforehand():
    codec = TopK(keep=16)
    source = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    payload, target, _ = through(codec, source)
    estimate = codec.estimate(source.numel())
    assert estimate.payload_bytes == payload.numel() == 256 * 16 * 6
    measured = ((target - source).norm() / source.norm()) ** 2
    assert estimate.relative_squared_error == pytest.approx(measured.item(), rel=0.02)
    assert isinstance(codec, Codec)
    assert TopK(keep=3, bucket=3).estimate(10).relative_squared_error == 0.0


def test_bytes_that_are_no_message_are_refused():
    codec = TopK(keep=1, bucket=4)
    payload = through(codec, torch.randn(4))[0]
    payload[4] = 200
    with pytest.raises(UsageError, match="place 200"):
        codec.extract(payload, torch.zeros(4))


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        ({"keep": 0}, "keep"),
        ({"keep": 9, "bucket": 8}, "keep"),
        ({"bucket": 0}, "bucket"),
        ({"bucket": 1 << 17}, "bucket"),
    ],
)
def test_mistakes(given, setting):
    with pytest.raises(UsageError) as caught:
        TopK(**given)
    assert caught.value.setting == setting
