"""The error of quantization without quantizing, against the codec that really does it."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.compress.codec import Exact, Quantizer
from plait.compress.observation import WIDTHS, LayerError, average, measure
from plait.errors import UsageError


def gradient(count, seed=0):
    own = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=own) * torch.rand(count, generator=own) ** 3


def really(tensor, bits, key, *, stochastic=True, bucket=256):
    """The squared error that the codec makes."""
    codec = Quantizer(bits=bits, bucket=bucket, stochastic=stochastic)
    lost = torch.empty(tensor.numel())
    payload = torch.empty(codec.payload_bytes(tensor.numel()), dtype=torch.uint8)
    codec.compress(tensor, payload, key=key, residual=lost)
    return float(lost.double().square().sum())


def test_by_hand():
    # 2 bits: units of 1 between 0 and 3; 0.25 and 2.5 lie between levels. 1 bit: a unit of 3.
    seen = measure(torch.tensor([0.0, 0.25, 2.5, 3.0]), name="hand", widths=(1, 2))
    assert seen.squared_error[1] == pytest.approx(0.25 * 0.75 + 0.5 * 0.5)
    assert seen.squared_error[0] == pytest.approx(9 * (1 / 12 * 11 / 12 + 5 / 6 * 1 / 6))
    assert seen.squared_norm == pytest.approx(0.0625 + 6.25 + 9)
    nearest = measure(torch.tensor([0.0, 0.25, 2.5, 3.0]), name="hand", widths=(2,), stochastic=False)
    assert nearest.squared_error[0] == pytest.approx(0.25**2 + 0.5**2)


@pytest.mark.parametrize("bits", WIDTHS)
def test_the_codec_makes_the_expected_error(bits):
    """Squared errors lie within a squared unit: Hoeffding's bound, for one false alarm in 1e9 runs."""
    tensor, keys = gradient(10_007), range(8)
    seen = measure(tensor, name="layer", bucket=256)
    made = [really(tensor, bits, key) for key in keys]
    ranges = torch.stack([piece.max() - piece.min() for piece in tensor.split(256)]).double()
    units = ranges / (2**bits - 1)
    reach = math.sqrt(len(keys) * 256 * float((units**4).sum()) * math.log(2e9) / 2)
    assert abs(sum(made) - len(keys) * seen.error_at(bits)) <= reach
    assert reach < 0.1 * sum(made), "the bound is so wide that the test could not fail"


@pytest.mark.parametrize("bits", WIDTHS)
def test_rounding_to_the_nearest_has_the_very_error(bits):
    tensor = gradient(10_007)
    seen = measure(tensor, name="layer", bucket=256, stochastic=False)
    assert seen.error_at(bits) == pytest.approx(really(tensor, bits, 0, stochastic=False), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1000])
def test_bytes_are_the_codecs(count, dtype):
    seen = measure(gradient(count).to(dtype), name="layer", bucket=256)
    assert seen.count == count
    assert seen.payload_bytes == tuple(Quantizer(bits=b, bucket=256).payload_bytes(count) for b in WIDTHS)
    assert seen.bytes_at(None) == Exact().payload_bytes(count)
    assert seen.error_at(None) == 0


@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40),
    bucket=st.integers(1, 16),
)
@settings(max_examples=100, deadline=None)
def test_any_finite_gradient_has_a_finite_error_within_its_bound(values, bucket):
    tensor = torch.tensor(values, dtype=torch.float32)
    seen = measure(tensor, name="layer", bucket=bucket)
    pieces = tensor.double().split(bucket) if len(tensor) else ()
    ranges = [(len(piece), float(piece.max() - piece.min())) for piece in pieces]
    for bits in WIDTHS:
        most = sum(n * (r / (2**bits - 1)) ** 2 / 4 for n, r in ranges)
        assert 0 <= seen.error_at(bits) <= most * (1 + 1e-9)


@pytest.mark.parametrize("sample", [1, 40])
def test_constant_gradients_cost_no_error(sample):
    tensor = torch.arange(100).repeat_interleave(16).float()
    assert measure(tensor, name="layer", bucket=16, sample=sample).squared_error == (0.0,) * 8


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1500, 2999])
def test_a_gradient_that_is_not_finite_has_no_finite_error(value, place):
    tensor = gradient(3000)
    tensor[place] = value
    seen = measure(tensor, name="layer", sample=1)
    assert not seen.finite
    assert seen.squared_error == (math.inf,) * 8


def test_a_sample_is_close_right_on_average_and_repeatable():
    tensor = gradient(200 * 64 + 5)
    whole = measure(tensor, name="layer", bucket=64)
    assert whole.sampling_bound == 0
    sampled = [measure(tensor, name="layer", bucket=64, sample=50, seed=seed) for seed in range(40)]
    assert sampled[0] == measure(tensor, name="layer", bucket=64, sample=50, seed=0)
    assert len({seen.squared_error for seen in sampled}) == 40
    ranges = torch.stack([piece.max() - piece.min() for piece in tensor.split(64)]).double()
    for place, bits in enumerate(WIDTHS):
        spread = 64 * float(((ranges / (2**bits - 1)) ** 2).sum()) / 6
        for seen in sampled:
            assert abs(seen.squared_error[place] - whole.squared_error[place]) <= seen.sampling_bound * spread
        mean = sum(seen.squared_error[place] for seen in sampled) / 40
        # The bound for 40 times as many buckets.
        assert abs(mean - whole.squared_error[place]) <= sampled[0].sampling_bound / math.sqrt(40) * spread


def layer(**changes):
    base = LayerError(
        name="a",
        count=8,
        widths=(2, 4),
        squared_error=(4.0, 1.0),
        payload_bytes=(10, 12),
        exact_bytes=32,
        squared_norm=5.0,
    )
    return replace(base, **changes)


@given(st.permutations([(4.0, 1.0), (5.1, 0.3), (1e-9, 1e9), (0.1, 0.2)]))
def test_an_average_does_not_depend_on_the_order(errors):
    (seen,) = average([[layer(squared_error=error)] for error in errors])
    first, second = [4.0, 5.1, 1e-9, 0.1], [1.0, 0.3, 1e9, 0.2]
    assert seen.squared_error == (math.fsum(first) / 4, math.fsum(second) / 4)


def test_an_average_leaves_out_what_is_not_finite():
    broken = layer(squared_error=(math.inf, math.inf), squared_norm=math.nan)
    (seen,) = average([[layer()], [broken], [layer(squared_error=(6.0, 3.0))]])
    assert seen == layer(squared_error=(5.0, 2.0))
    assert not average([[broken], [broken]])[0].finite


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (lambda: layer(widths=(4, 2)), r"\[4, 2\] are not widths in ascending order .*works: \[1, 2"),
        (lambda: layer(widths=(0, 4)), r"\[0, 4\] are not widths"),
        (lambda: layer(widths=(4, 9)), r"\[4, 9\] are not widths"),
        (lambda: layer(widths=()), r"\[\] are not widths"),
        (lambda: layer(squared_error=(1.0,)), "layer 'a' has 1 squared_error for 2 widths"),
        (lambda: layer(squared_error=(1.0, -1.0)), "errors .*-1.0.* works: 0 or more"),
        (lambda: layer(payload_bytes=(1, -1)), "bytes .*-1.* works: 0 or more"),
        (lambda: layer(count=-1), "count is -1"),
        (lambda: layer().error_at(3), "layer 'a' was not measured at 3 bits .*works: 2, 4"),
        (lambda: average([]), "no observation"),
        (lambda: average([[layer()], [layer(name="b")]]), "name 'a' in one observation and 'b' in another"),
        (lambda: average([[layer()], [layer(), layer(name="b")]]), "one observation has 1 layers, another 2"),
        (lambda: measure(torch.ones(3), name="a", bucket=0), "bucket is 0"),
        (lambda: measure(torch.ones(3), name="a", sample=0), "sample is 0"),
        (lambda: measure(torch.ones(3), name="a", widths=(9,)), r"\[9\] are not widths"),
        (lambda: measure(torch.ones(3).int(), name="a"), "gradient of 'a' is of type torch.int32"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, match):
    with pytest.raises(UsageError, match=match):
        wrong()
