"""One figure or a matrix between devices."""

import numpy as np
import pytest

from plait.burst.network import Network
from plait.errors import UsageError

ROWS = [["0", "1GB/s", "100MB/s"], ["1GB/s", "0", "50MB/s"], ["100MB/s", "50MB/s", "0"]]


def test_one_figure():
    network = Network.of("1gbit", "40us", devices=4)
    assert network.bandwidth(0, 3) == 125e6
    assert network.latency(3, 0) == pytest.approx(0.04)
    assert network.ring(4).bandwidth_bytes_per_s == 125e6
    assert network.devices is None


def test_a_ring_goes_by_its_slowest_link():
    network = Network.of(ROWS, np.array([[0, 1e-3, 2e-3], [1e-3, 0, 3e-3], [5e-3, 3e-3, 0]]), devices=3)
    assert network.devices == 3
    assert network.ring(2).bandwidth_bytes_per_s == 1e9
    assert network.ring(2).latency_ms == 1
    assert network.ring(3).bandwidth_bytes_per_s == 50e6
    assert network.ring(3).latency_ms == 5  # from the last device back to the first
    assert network.ring(1).latency_ms == 0


@pytest.mark.parametrize(
    ("bandwidth", "latency", "says"),
    [
        ("fast", 0.0, "'fast' is not a rate"),
        ("1gbit", "-1us", "cannot be negative"),
        ([[0, 1], [1]], 0.0, "2 rows, and row 1 is not as long"),
        ([[0, 1], [1, 0]], [[0.0]], "a matrix of 1 rows for 2 devices"),
        ([[0, 0], [1, 0]], 0.0, "above zero"),
        (None, 0.0, "neither a figure nor rows"),
        ([[0] * 3] * 3, 0.0, "above zero"),
    ],
)
def test_what_cannot_be(bandwidth, latency, says):
    with pytest.raises(UsageError, match=says):
        Network.of(bandwidth, latency, devices=2)


def test_matrices_of_two_sizes():
    with pytest.raises(UsageError, match="matrices of 2 and 3 devices"):
        Network(bandwidth_bytes_per_s=((0.0, 1.0), (1.0, 0.0)), latency_ms=((0.0,) * 3,) * 3)
    with pytest.raises(UsageError, match="bandwidth_bytes_per_s has -1"):
        Network(bandwidth_bytes_per_s=-1.0)
