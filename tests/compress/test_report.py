from plait.compress.report import Comparison, Report, Summary
from plait.compress.sharded import ShardedSummary


def test_reports_add_up():
    whole = Report()
    whole.add(Report(operations=1, sent_bytes=100, plain_bytes=800, pack_s=0.5))
    whole.add(Report(operations=1, sent_bytes=300, plain_bytes=800, wire_s=0.25, declined=1))
    assert whole.operations == 2
    assert whole.ratio == 4.0
    assert whole.to_json()["ratio"] == 4.0
    assert whole.to_json()["wire_s"] == 0.25
    assert str(whole) == (
        "2 operations sent 400 B, 4.0 times fewer than uncompressed; pack 500 ms, wire 250 ms, unpack 0 s"
    )


def test_nothing_sent_saves_nothing():
    assert Report().ratio == 1.0


DECLINED = {"steps": 40, "errors": {}, "exposed_s": 0.0, "memory_bytes": 0, "declined": (4,)}


def test_who_declined_says_so_and_what_was_found():
    left = Summary(**DECLINED | {"declined": ()}, bits={"a": 32}, left=True, total=Report())
    assert str(left) == (
        "40 steps, declined: uncompressed is faster here; decline=False compresses all the same"
    )
    compared = Comparison(elements=1000, plain_s=0.004, compressed_s=0.0093)
    found = Summary(**DECLINED, bits={"a": 32}, compared=compared, total=Report())
    assert str(found) == (
        "40 steps, declined: uncompressed is faster here (1000 numbers take 4 ms, compressed 9.3 ms); "
        "decline=False compresses all the same"
    )
    assert found.to_json()["compared"] == {"elements": 1000, "plain_s": 0.004, "compressed_s": 0.0093}
    assert left.to_json()["compared"] is None


def test_what_was_sent_is_told_all_the_same():
    sent = Report(operations=1, sent_bytes=400, plain_bytes=400)
    said = str(Summary(**DECLINED, bits={"a": 32}, total=sent))
    assert "declined: uncompressed is faster here; " in said
    assert "32.00 bits a number on the wire; 1 operations sent 400 B" in said
    assert "; 0 s exposed (waited for after backward passes); " in said
    assert "declined" not in str(Summary(**DECLINED, bits={"a": 32, "b": 8}, total=sent))


def test_compressed_weights_are_not_declined():
    reports = {name: Report() for name in ("scatter", "gather", "reduce", "total")}
    assert not ShardedSummary(**DECLINED, bits={"a": 32}, gather_bits={"a": 8}, **reports).nothing_pays
    assert ShardedSummary(**DECLINED, bits={"a": 32}, gather_bits={}, **reports).nothing_pays
