"""The widths there are to choose from."""

import pytest

from plait.burst.candidates import candidates, checked
from plait.errors import UsageError


def test_more_devices_only_add_widths():
    for blocks in (5, 64, 65, 1000):
        for devices in range(1, 300):
            few, more = candidates(blocks, devices, 512), candidates(blocks, devices + 1, 512)
            assert more[: len(few)] == few
            assert few[0] == 1
            assert few[-1] <= devices


def test_every_width_of_few_devices_then_steps():
    assert candidates(10, 16, 99) == tuple(range(1, 17))
    assert candidates(10, 40, 99)[16:] == (20, 24, 28, 32, 40)
    assert candidates(1000, 1024, 4096)[8:] == (
        12,
        16,
        24,
        32,
        48,
        64,
        96,
        128,
        192,
        256,
        384,
        512,
        768,
        1024,
    )
    assert candidates(10, 16, 3) == (1, 2, 3)  # no device without a row


def test_widths_of_ones_own():
    assert checked([4, 2, 4, 9], 8, 32) == (2, 4)
    with pytest.raises(UsageError, match=r"none of the widths \[9\] can be had with 8 devices"):
        checked([9], 8, 32)
    with pytest.raises(UsageError, match="widths is 0"):
        checked([0], 8, 32)
