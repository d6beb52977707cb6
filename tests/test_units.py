import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import UsageError
from plait.units import (
    counted,
    format_bytes,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_rate,
    parse_seconds,
    parse_whole,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [("2GiB", 2**31), ("512MB", 512 * 10**6), ("1.5 KiB", 1536), ("4096", 4096), (4096, 4096), ("0", 0),
     ("1g", 2**30), ("16m", 2**24), (" 3 kB ", 3000), ("4B", 4), ("4G", 2**32), ("4GB", 4 * 10**9),
     ("4gB", 4 * 10**9), ("1GIB", 2**30),
     ("1e3", 1000), (".5k", 512), (2**63 - 1, 2**63 - 1),
     ("9007199254740993", 2**53 + 1), (2**53 + 1, 2**53 + 1), ("2tiB", 2**41), ("1TB", 10**12)],
)  # fmt: skip
def test_sizes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "reason"),
    [("two", "'two' is not a size"), ("", "'' is not a size"), ("2 parsecs", "no unit of size"),
     ("2gbit", "no unit of size"), ("-1GiB", "cannot be negative: '-1GiB'"), (-1, "cannot be negative: -1"),
     ("1e400", "is not a finite size"), (math.nan, "not a finite size"), (math.inf, "not a finite size"),
     (True, "True is not a size"), (None, "None is not a size"), ("nan", "'nan' is not a size"),
     ("4Gi", "no unit of size"), ("4iB", "no unit of size"), (10**400, "not a finite size"),
     ("16777216TiB", "more than any memory or file"), ("1e30GiB", "more than any memory or file"),
     ("1e308TiB", "more than any memory or file"), (2**63, "more than any memory or file")],
)  # fmt: skip
def test_sizes_that_are_none(text, reason):
    with pytest.raises(UsageError, match=reason) as caught:
        parse_bytes(text, setting="budget")
    assert caught.value.setting == "budget"
    assert parse_bytes(caught.value.works) == 2**31


@pytest.mark.parametrize(
    ("text", "works"),
    [("4Gb", "4GiB"), ("4Gib", "4GiB"), ("4gb", "4GiB"), ("1.5 kb", "1.5KiB"), ("8b", "8B")],
)
def test_a_small_b_is_a_bit_and_no_size(text, works):
    with pytest.raises(UsageError, match=f"'{text}' ends in a small b, which is a bit") as caught:
        parse_bytes(text, setting="memory")
    assert (caught.value.setting, caught.value.works) == ("memory", works)
    assert parse_bytes(works) > 0


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1gbit", 125e6), ("100Mbit/s", 12.5e6), ("1.2GB/s", 1.2e9), ("266GB/s", 266e9), ("1GiB/s", 2.0**30),
     (125e6, 125e6), (1000, 1000.0), ("10 kbit", 1250.0), ("8bit", 1.0), ("1bit", 0.125),
     ("1gbps", 125e6), ("1Gbit/s", 125e6), ("1 Gb/s", 125e6), ("1GBps", 1e9),
     ("5 B/s", 5.0)],
)  # fmt: skip
def test_rates(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    ("text", "reason"),
    [("fast", "'fast' is not a rate"), ("10", "no unit of rate"), ("1g", "no unit of rate"),
     ("0gbit", "must be above zero"), ("-1gbit", "must be above zero"), (0, "must be above zero"),
     (math.nan, "not a finite rate"), (math.inf, "not a finite rate"), ("1e999gbit", "not a finite rate"),
     ("1e308tbit", "not a finite rate"), (10**400, "not a finite rate"),
     ("1e-300B/s", "'1e-300B/s' is less than the smallest rate that plait knows, 1 bit/s"),
     (0.1, "0.1 is less than the smallest rate"),
     (True, "True is not a rate"), (None, "None is not a rate"), ("1ms", "no unit of rate")],
)  # fmt: skip
def test_rates_that_are_none(text, reason):
    with pytest.raises(UsageError, match=reason) as caught:
        parse_rate(text, setting="--rate")
    assert caught.value.setting == "--rate"
    assert parse_rate(caught.value.works) == 125e6


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("40us", 40e-6), ("40 µs", 40e-6), ("40μs", 40e-6), ("3ms", 3e-3), ("2s", 2.0), ("7ns", 7e-9),
     (0.5, 0.5), (0, 0.0), ("0s", 0.0)],
)  # fmt: skip
def test_durations(text, seconds):
    assert math.isclose(parse_seconds(text), seconds, rel_tol=1e-12)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("soon", "'soon' is not a duration"), ("3", "no unit of time"), ("3 GiB", "no unit of time"),
     ("-1ms", "cannot be negative"), (-0.1, "cannot be negative"), (math.nan, "not a finite duration"),
     ("1e999s", "not a finite duration"), (False, "False is not a duration")],
)  # fmt: skip
def test_durations_that_are_none(text, reason):
    with pytest.raises(UsageError, match=reason) as caught:
        parse_seconds(text, setting="--latency")
    assert caught.value.setting == "--latency"


def test_counts():
    assert [parse_whole(n, setting="batch") for n in (1, 8, 2**63 - 1)] == [1, 8, 2**63 - 1]
    assert parse_whole(np.int64(3), setting="batch") == 3
    assert parse_whole(0, setting="seed", least=0) == 0
    with pytest.raises(UsageError, match=r"works: 32$"):
        parse_whole(-4, setting="batch", works=32)


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "8", None, math.nan])
def test_counts_that_are_none(value):
    with pytest.raises(UsageError, match=f"batch is {value!r}, not a whole number of at least 1") as caught:
        parse_whole(value, setting="batch")
    assert (caught.value.setting, caught.value.works) == ("batch", "1")


@pytest.mark.parametrize(
    ("power", "shown"),  # of two: Python itself does not print the largest
    [(63, "9223372036854775808"), (70, "1180591620717411303424"), (16609, "a number of 16610 bits")],
)
def test_counts_that_are_too_large(power, shown):
    with pytest.raises(UsageError) as caught:
        parse_whole(2**power, setting="batch")
    assert caught.value.what == f"batch is {shown}, more than 9223372036854775807 (2**63 - 1)"
    assert (caught.value.setting, caught.value.works) == ("batch", "1")


def test_a_count_too_small_to_print():
    with pytest.raises(UsageError, match="batch is a number of 16610 bits, not a whole number of at least 1"):
        parse_whole(-(10**5000), setting="batch")


def test_numbers_of_things():
    words = [counted(1, "shard"), counted(0, "shard"), counted(2, "device"), counted(3, "process")]
    assert words == ["1 shard", "0 shards", "2 devices", "3 processes"]


def test_printing():
    assert [format_bytes(n) for n in (0, 1023, 1536, 2**31, 3 * 2**40)] == [
        "0 B", "1023 B", "1.50 KiB", "2.00 GiB", "3.00 TiB"]  # fmt: skip
    assert [format_rate(n) for n in (1, 125e6, 12.5e6, 250e9)] == [
        "8 bit/s", "1.00 Gbit/s", "100.00 Mbit/s", "2.00 Tbit/s"]  # fmt: skip
    assert [format_seconds(s) for s in (0, 2, 3.2e-3, 4e-5, 7e-9, -2e-3)] == [
        "0 s", "2 s", "3.2 ms", "40 µs", "7 ns", "-2 ms"]  # fmt: skip


@given(st.integers(0, 2**60))
def test_a_size_prints_close_to_what_it_reads_as(count):
    assert math.isclose(parse_bytes(format_bytes(count)), count, rel_tol=5e-3, abs_tol=0.5)


@given(st.floats(1, 1e15))
def test_a_rate_prints_close_to_what_it_reads_as(rate):
    assert math.isclose(parse_rate(format_rate(rate)), rate, rel_tol=0.07)


@given(st.floats(1e-9, 1e3))
def test_a_duration_prints_close_to_what_it_reads_as(seconds):
    assert math.isclose(parse_seconds(format_seconds(seconds)), seconds, rel_tol=5e-3)
