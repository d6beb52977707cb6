"""What flows between the hosts of a lab: at the rates that links are given, and not over cut ones."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from lab_workers import left_of

from plait.errors import LabError
from plait.lab import Lab, Trace, measure_bandwidth


def arriving(lab: Lab, host: int) -> float:
    """Bytes per second that reach a host, over a moment."""
    begin, before = time.monotonic(), lab.hosts[host].received_bytes
    time.sleep(0.4)
    return (lab.hosts[host].received_bytes - before) / (time.monotonic() - begin)


def wait_until(lab: Lab, host: int, rate_bytes_per_second: float) -> None:
    deadline = time.monotonic() + 30
    while lab.hosts[host].rate_bytes_per_second != rate_bytes_per_second:
        assert time.monotonic() < deadline, "the trace was not followed"
        time.sleep(0.01)


def test_a_trace_that_halves_the_rate_is_visible(namespaces: None) -> None:
    with Lab(hosts=2, rate="40mbit") as lab, lab.compete(0, 1):
        before = max(arriving(lab, 1) for _ in range(3))
        lab.follow(Trace.parse("0.1 20mbit"))
        wait_until(lab, 1, 2.5e6)
        after = max(arriving(lab, 1) for _ in range(3))
    assert 0.25 < after / before < 0.75


def test_a_lab_follows_its_trace_from_the_first_worker_on(namespaces: None, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("0 40mbit\n0.05 20mbit 1\n")
    with Lab(hosts=2, rate="80mbit", trace=tmp_path / "trace") as lab:
        assert [host.rate_bytes_per_second for host in lab.hosts] == [10e6, 10e6]
        lab.start(0, ["sleep", "60"])
        wait_until(lab, 1, 2.5e6)
        assert lab.hosts[0].rate_bytes_per_second == 5e6


def test_a_cut_link_is_visible_and_so_is_its_return(namespaces: None) -> None:
    with Lab(hosts=2, rate="80mbit") as lab, lab.compete(0, 1):
        assert arriving(lab, 1) > 0
        lab.cut(1)
        time.sleep(0.1)
        assert arriving(lab, 1) == 0
        lab.restore(1)
        deadline = time.monotonic() + 30
        while arriving(lab, 1) == 0:
            assert time.monotonic() < deadline, "nothing arrives over the restored link"


def test_what_cannot_flow_over_a_cut_link_is_said(namespaces: None) -> None:
    with Lab(hosts=2) as lab:
        lab.cut(0)
        with pytest.raises(LabError, match="no traffic can flow from host 0 to host 1"):
            lab.compete(0, 1)
        assert lab.run(["true"]).exit_code == 0  # the host itself lives on
    assert left_of(lab) == []


def test_rates_change_host_by_host_and_both_ways(namespaces: None) -> None:
    with Lab(hosts=2, rate="80mbit") as lab:
        for slow, flow in ((0, (0, 1)), (1, (0, 1))):  # the sender's port, then the receiver's
            lab.set_rate("80mbit")
            with lab.compete(*flow):
                full = arriving(lab, 1)
                lab.set_rate("8mbit", host=slow)
                time.sleep(0.1)
                assert arriving(lab, 1) < 0.5 * full
        lab.set_rate(None)
        assert [host.rate_bytes_per_second for host in lab.hosts] == [None, None]


def test_a_link_that_is_slowed_far_down_under_traffic_lives_on(namespaces: None) -> None:
    # What waits in its queue was cut for the fast link, in packets larger than the slow one's bucket.
    with Lab(hosts=2, rate="2gbit") as lab, lab.compete(0, 1, streams=4):
        assert arriving(lab, 1) > 0
        lab.set_rate("8mbit")
        time.sleep(0.5)  # far longer than what was on its way needs
        assert 0 < arriving(lab, 1) < 3e6


def test_a_competing_flow_takes_no_more_than_its_rate_and_stops(namespaces: None) -> None:
    with Lab(hosts=2, rate="80mbit") as lab:
        with lab.compete(0, 1, streams=2, rate="8mbit") as flow:
            assert 0 < arriving(lab, 1) < 3e6
            flow.stop()
        time.sleep(0.1)
        assert arriving(lab, 1) < 1e4


def test_every_ordered_pair_is_measured_and_none_beats_its_link(namespaces: None) -> None:
    with Lab(hosts=3, rate="80mbit") as lab:
        lab.set_rate("40mbit", host=2)
        transfers = list(measure_bandwidth(lab, 2**19, seconds=0.0))
    assert [(t.source, t.target) for t in transfers] == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    for transfer in transfers:
        assert transfer.asked_bytes_per_second == (5e6 if 2 in (transfer.source, transfer.target) else 10e6)
        assert transfer.bytes_per_second == 2**19 / min(transfer.seconds)
        assert transfer.of_asked is not None
        assert transfer.of_asked < 1.1
    assert left_of(lab) == []
