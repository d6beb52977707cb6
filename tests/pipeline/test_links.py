import pytest

from plait.pipeline import links
from plait.pipeline.links import Links, Report
from plait.pipeline.memory import StageMemory
from plait.pipeline.record import Computation, Receipt, StepRecord

MS = 1_000_000


def receipt(what, number, sent, head, arrived, size=1000):
    return Receipt(
        peer=0, what=what, number=number, bytes=size, posted_ns=0, queued_bytes=0,
        sent_ns=sent * MS, head_ns=head * MS, arrived_ns=arrived * MS,
    )  # fmt: skip


def record(computations, receipts, begun=0):
    return StepRecord(
        begun_ns=begun * MS,
        computations=[Computation(kind, number, a * MS, b * MS) for kind, number, a, b in computations],
        receipts=receipts,
    )


def test_times_are_those_of_full_micro_batches():
    seen = record(
        [
            ("F", 0, 0, 10),
            ("F", 1, 10, 20),
            ("F", 2, 20, 23),
            ("B", 0, 30, 50),
            ("B", 1, 50, 70),
            ("B", 2, 70, 76),
        ],
        [],
    )
    assert links.times_ms(seen, full=2) == (10.0, 20.0)


def test_waking_up_counts_where_the_stage_had_waited():
    came = [
        receipt("activation", 0, 0, 4, 5),
        receipt("activation", 1, 0, 6, 7),
        receipt("gradient", 0, 0, 38, 40),
    ]
    # F0 was waited for, F1 was there before F0 ended, B0 was waited for.
    seen = record([("F", 0, 7, 17), ("F", 1, 17, 27), ("B", 0, 44, 60)], came)
    assert links.wake_ms(seen) == 3.0
    assert links.wake_ms(record([("F", 0, 0, 1)], [])) == 0.0


def test_arrivals_name_link_and_direction():
    seen = record([], [receipt("activation", 3, 1, 2, 3), receipt("gradient", 1, 4, 5, 6)])
    forward, backward = links.arrivals(seen, stage=2)
    assert (forward.link, forward.direction, forward.micro_batch) == (1, "forward", 3)
    assert (backward.link, backward.direction, backward.micro_batch) == (2, "backward", 1)
    assert (forward.sent_ms, forward.started_ms, forward.arrived_ms) == (1.0, 2.0, 3.0)


def report(stage, receipts, host):
    return Report(
        stage=stage, host=host, forward_ms=1.0, backward_ms=2.0, wake_ms=0.1,
        arrivals=links.arrivals(record([], receipts), stage),
        memory=StageMemory(static_bytes=5), peak_bytes=7, limit_bytes=float("inf"),
    )  # fmt: skip


def test_a_report_crosses_as_text():
    import json

    given = report(1, [receipt("activation", 0, 1, 2, 3)], "here")
    assert Report.from_json(json.loads(json.dumps(given.to_json()))) == given


def test_the_network_is_known_once_all_has_crossed():
    seen = Links(2)
    # A megabyte in 100 ms is 10 MB/s; both clocks are the same, and a header takes 2 ms.
    there = [receipt("activation", n, 200 * n, 200 * n + 2, 200 * n + 102, 10**6) for n in range(4)]
    back = [receipt("gradient", n, 200 * n, 200 * n + 2, 200 * n + 52, 10**6) for n in range(4)]
    assert seen.network is None
    seen.observe([report(0, [], "a"), report(1, there, "b")])
    assert seen.network is None
    seen.observe([report(0, back, "a"), report(1, there, "b")])
    (link,) = seen.network.links
    assert link.forward.latency_ms == pytest.approx(2.0)
    assert link.forward.bytes_per_s == pytest.approx(1e7)
    assert link.backward.bytes_per_s == pytest.approx(2e7)
    assert seen.network.hosts == (0, 1)


def test_a_host_is_known_by_its_network():
    assert "net:[" in links.own_host()
