"""Numbers as people read them."""

import pytest

from plait.strategy.figure import figure, milliseconds, readable


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (17_780.4, "17780"),
        (123.456, "123.5"),
        (0.012345, "0.01235"),
        (0.00001234, "0.000012"),
        (3.553e-15, "0"),
        (0.0, "0"),
        (-2.5, "-2.5"),
    ],
)
def test_no_power_of_ten(value, text):
    assert figure(value) == text


def test_long_times_are_seconds():
    assert (milliseconds(999.94), milliseconds(23_456.0)) == ("999.9 ms", "23.46 s")


def test_bytes_that_work_are_rounded_up_to_mebibytes():
    assert readable("1048577 for each device, or 3 stages") == "2MiB for each device, or 3 stages"
    assert readable("4096, or more") == "4096, or more"
    assert readable(None) is None
