from plait.compress.report import Report


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
