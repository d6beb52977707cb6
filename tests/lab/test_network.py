from __future__ import annotations

import ipaddress
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import LabError, UsageError
from plait.lab.label import Label
from plait.lab.network import (
    MOST_HOSTS,
    Network,
    address,
    burst_bytes,
    missing,
    parse_link_rate,
    queue_bytes,
    segment_bytes,
)

rates = st.floats(1e3, 1e12)


@given(rates)
def test_a_bucket_holds_whole_packets_and_a_queue_whole_buckets(rate: float) -> None:
    assert 1514 <= segment_bytes(rate) <= 65536
    assert segment_bytes(rate) <= burst_bytes(rate) < queue_bytes(rate)


@given(rates, rates)
def test_faster_links_never_have_smaller_buckets(one: float, other: float) -> None:
    slow, fast = sorted((one, other))
    assert burst_bytes(slow) <= burst_bytes(fast)
    assert queue_bytes(slow) <= queue_bytes(fast)


def test_a_burst_is_small_beside_a_transfer() -> None:
    for rate in (12.5e6, 125e6):
        assert burst_bytes(rate) <= 0.008 * 8 * 2**20


def test_addresses_are_private_and_distinct() -> None:
    addresses = {ipaddress.ip_address(address(host)) for host in range(MOST_HOSTS)}
    assert len(addresses) == MOST_HOSTS
    assert all(one in ipaddress.ip_network("198.18.0.0/24") for one in addresses)
    assert all(one.is_private for one in addresses)


def test_rates() -> None:
    assert parse_link_rate(None) is None
    assert parse_link_rate("1gbit") == 125e6
    assert parse_link_rate(1e6) == 1e6
    assert parse_link_rate("1tbit") == 125e9


@pytest.mark.parametrize(
    "rate",
    ["-1gbit", "0mbit", 0, -5.0, math.nan, math.inf, "1bit", "fast", "10", "1e300gbit", "1e20bit", "2tbit"],
)
def test_wrong_rates_are_refused(rate: str | float) -> None:
    with pytest.raises(UsageError) as caught:
        parse_link_rate(rate)
    assert caught.value.setting == "rate"
    assert caught.value.works is not None


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, namespaces: None) -> None:
    assert missing() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing() == "ip and tc (Debian package iproute2)"


def test_what_the_kernel_refuses_is_said(namespaces: None) -> None:
    with pytest.raises(LabError, match=r"`ip -n .*` failed: .*No such file") as caught:
        Network(Label.new(), 1).traffic(0)  # never built
    assert caught.value.setting == "loopback"
