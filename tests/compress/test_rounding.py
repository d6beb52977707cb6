"""The random numbers of rounding: names of streams, and statistics with stated false-alarm rates.

The seeds are fixed, so a test passes always or never; the rates say how likely a sound generator would have
failed when the seeds were chosen. A |z| above 5 has probability 6e-7.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from plait.compress.rounding import checked_key, draw, stream_key
from plait.errors import UsageError

CPU = torch.device("cpu")
KEYS = [0x6C63E36EE0AC2CBA, 0x4D7C34011ACF6F27, 0x329343BE6943AB76]
DRAWN = [54749, 64352, 34451, 1416]


def stream(buckets: int, elements: int = 1024, **name: object) -> torch.Tensor:
    """Numbers of a stream in (-1/2, 1/2), a row a bucket."""
    drawn = draw(stream_key(**name), 0, buckets, elements, CPU)  # type: ignore[arg-type]
    return (drawn.double() + 0.5) / 65536 - 0.5


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """How many standard deviations the correlation of two uniform samples is away from none."""
    return float((a * b).sum() * 12 / a.numel() ** 0.5)


def test_every_part_of_a_name_matters() -> None:
    names = [
        {"seed": seed, "step": step, "rank": rank, "phase": phase, "parameter": parameter}
        for seed, step, rank, phase in itertools.product((0, 1, 2**40), repeat=4)
        for parameter in ("", "0", 0, 1, "weight", "weight2")
    ]
    keys = {stream_key(**name) for name in names}  # type: ignore[arg-type]
    assert len(keys) == len(names)
    assert all(0 <= key < 2**64 for key in keys)


def test_keys_are_the_same_everywhere() -> None:
    # Written down once: a change would change every run.
    assert stream_key() == KEYS[0]
    assert stream_key(seed=1, step=2, rank=3, phase=4, parameter="layer.0.weight") == KEYS[1]
    assert stream_key(parameter=7) == KEYS[2]
    assert draw(KEYS[1], 5, 1, 4, CPU).tolist() == [DRAWN]


def test_numbers_depend_on_their_place_alone() -> None:
    whole = draw(11, 100, 50, 1000, CPU)
    assert draw(11, 117, 3, 1000, CPU).equal(whole[17:20])
    assert draw(11, 100, 50, 333, CPU).equal(whole[:, :333])


def test_numbers_are_uniform() -> None:
    # Each 16-bit half by its upper and lower byte: 4 chi-square tests of 255 degrees, rate 4 * 3e-7.
    drawn = draw(stream_key(seed=3), 0, 256, 1024, CPU).view(-1, 2, 16)
    for half in drawn.unbind(1):
        for byte in (half >> 8, half & 255):
            seen = torch.bincount(byte.flatten(), minlength=256).double()
            expected = byte.numel() / 256
            chi = float(((seen - expected) ** 2 / expected).sum())
            assert abs(chi - 255) / (2 * 255) ** 0.5 < 5


def test_neighbours_are_independent() -> None:
    # 70 lags within buckets, the shared words of lag 16 among them, and 3 across: rate 73 * 6e-7.
    numbers = stream(256, seed=4)
    for lag in [*range(1, 65), 96, 128, 160, 256, 512, 768]:
        assert abs(correlation(numbers[:, :-lag], numbers[:, lag:])) < 5, lag
    for buckets in (1, 2, 16):
        assert abs(correlation(numbers[:-buckets], numbers[buckets:])) < 5, buckets


def test_neighbours_are_independent_in_more_than_correlation() -> None:
    # The joint distribution of the upper 4 bits at 40 lags, chi-square of 255 degrees: rate 40 * 6e-7.
    drawn = draw(stream_key(seed=5), 0, 256, 1024, CPU) >> 12
    for lag in [*range(1, 33), 48, 64, 80, 96, 128, 160, 256, 512]:
        pairs = drawn[:, :-lag] * 16 + drawn[:, lag:]
        seen = torch.bincount(pairs.flatten(), minlength=256).double()
        expected = pairs.numel() / 256
        chi = float(((seen - expected) ** 2 / expected).sum())
        assert abs(chi - 255) / (2 * 255) ** 0.5 < 5, lag


@pytest.mark.parametrize("part", ["seed", "step", "rank", "phase", "parameter"])
def test_streams_are_independent(part: str) -> None:
    # 28 pairs of neighbouring names: rate 28 * 6e-7 a part.
    streams = [stream(64, **{part: value}) for value in range(8)]
    for one, other in itertools.combinations(streams, 2):
        assert abs(correlation(one, other)) < 5


def test_sums_over_a_bucket_vary_as_they_should() -> None:
    # Errors of one bucket must average out: a bias of whole buckets would show in the variance of sums.
    sums = stream(2048, seed=6).sum(1)
    ratio = float(sums.var()) / (1024 / 12)
    assert abs(ratio - 1) < 5 * (2 / 2048) ** 0.5


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ({"seed": -1}, "seed"),
        ({"step": 1.5}, "step"),
        ({"rank": None}, "rank"),
        ({"parameter": -1}, "parameter"),
        ({"parameter": None}, "parameter"),
    ],
)
def test_wrong_names_are_refused(name: dict[str, object], setting: str) -> None:
    with pytest.raises(UsageError) as caught:
        stream_key(**name)  # type: ignore[arg-type]
    assert caught.value.setting == setting


@pytest.mark.parametrize("key", [-1, 2**64, 1.0, True, None])
def test_wrong_keys_are_refused(key: object) -> None:
    with pytest.raises(UsageError, match="64 bits"):
        checked_key(key)  # type: ignore[arg-type]
