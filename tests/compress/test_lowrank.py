import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.compress import Codec, LowRank
from plait.errors import UsageError


def through(codec, source, key=1):
    payload = torch.empty(codec.payload_bytes(source.numel()), dtype=torch.uint8)
    residual, target = torch.full_like(source, 5, dtype=torch.float32), torch.full_like(source, 7)
    codec.compress(source, payload, key=key, residual=residual)
    codec.extract(payload, target)
    return payload, target, residual


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 500), st.integers(1, 4), st.integers(0, 99))
def test_what_is_lost_is_the_residual_and_less_than_there_was(count, rank, seed):
    source = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    _, target, residual = through(LowRank(rank=rank, side=8), source)
    assert torch.allclose(target + residual, source, atol=1e-5)
    assert residual.norm() <= source.norm() * (1 + 1e-5)
    assert residual[count // 64 * 64 :].eq(0).all()


def test_what_has_low_rank_arrives_whole():
    generator = torch.Generator().manual_seed(0)
    tile = torch.randn(64, 2, generator=generator) @ torch.randn(2, 64, generator=generator)
    _, target, _ = through(LowRank(rank=2), tile.view(-1))
    assert torch.allclose(target, tile.view(-1), atol=1e-4)


def test_tiles_do_not_depend_on_each_other():
    codec, source = LowRank(rank=1, side=8), torch.randn(300)
    whole = through(codec, source)[1]
    parts = [through(codec, part)[1] for part in (source[:128], source[128:])]
    assert torch.allclose(whole, torch.cat(parts), atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_travels_and_is_not_remembered(value):
    source = torch.randn(200)
    source[70] = value
    _, target, residual = through(LowRank(rank=1, side=8), source)
    assert not target[64:128].isfinite().any()
    assert target[:64].isfinite().all()
    assert residual.isfinite().all()


def test_bytes_and_error_are_known_beforehand():
    codec = LowRank(rank=2)
    source = torch.randn(64 * 4096, generator=torch.Generator().manual_seed(0))
    payload, target, _ = through(codec, source)
    estimate = codec.estimate(source.numel())
    assert estimate.payload_bytes == payload.numel() == 64 * 2 * 64 * 2 * 4
    measured = ((target - source).norm() / source.norm()) ** 2
    # One step of the power method catches a little more of noise than a random plane would.
    assert measured.item() <= estimate.relative_squared_error <= measured.item() + 0.1
    assert isinstance(codec, Codec)


@pytest.mark.parametrize(
    ("given", "setting"), [({"rank": 0}, "rank"), ({"side": 0}, "side"), ({"rank": 65}, "rank")]
)
def test_mistakes(given, setting):
    with pytest.raises(UsageError) as caught:
        LowRank(**given)
    assert caught.value.setting == setting
