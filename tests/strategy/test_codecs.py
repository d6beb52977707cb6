"""What packing costs: measured, given, and priced as compress prices it."""

import subprocess
import sys

import pytest
from chains import CODECS, MIB

from plait.collective import ring_ms
from plait.compress.layout import Piece
from plait.compress.price import Pace, Speed, price_ms
from plait.errors import UsageError
from plait.sim.reduction import Coded, Reduction, codec_of
from plait.strategy.codecs import Codecs, Mixed

LINK = Pace(bandwidth_bytes_per_s=1.25e8, latency_ms=0.05)


def test_one_width_is_priced_as_everywhere():
    mixed = Mixed(parts=((4, 1.0),), codecs=CODECS)
    assert isinstance(mixed, Reduction)
    coded = Coded(codec=codec_of(4), speed=CODECS.speeds[4], busy_s_per_byte=CODECS.busy_s_per_byte)
    for size in (1000, MIB, 100 * MIB):
        assert mixed.estimate_ms(size, 4, LINK) == pytest.approx(coded.estimate_ms(size, 4, LINK))
        assert mixed.busy_ms(size, 4) == pytest.approx(coded.busy_ms(size, 4))
        assert mixed.wire_bytes(size, 4) == coded.wire_bytes(size, 4)


def test_several_widths_lie_between_them():
    price = [
        Mixed(parts=parts, codecs=CODECS).estimate_ms(64 * MIB, 2, LINK)
        for parts in (((4, 1.0),), ((4, 0.5), (8, 0.5)), ((8, 1.0),))
    ]
    assert price == sorted(price)
    pieces = [Piece(name=str(bits), count=8 * MIB, codec=codec_of(bits)) for bits in (4, 8)]
    speeds = {codec_of(bits): CODECS.speeds[bits] for bits in (4, 8)}
    pace = Pace(bandwidth_bytes_per_s=1.25e8, latency_ms=0.05, busy_s_per_byte=CODECS.busy_s_per_byte)
    assert price[1] == pytest.approx(price_ms(pieces, 2, pace, speeds, chunk_bytes=512 << 10))


def test_four_bits_are_fewer_bytes_than_thirty_two():
    mixed = Mixed(parts=((4, 1.0),), codecs=CODECS)
    assert 6 < 2 * 3 / 4 * 64 * MIB / mixed.wire_bytes(64 * MIB, 4) < 8
    assert mixed.estimate_ms(64 * MIB, 4, LINK) < ring_ms(64 * MIB, 4, LINK) / 4


def test_where_another_stream_packs_the_device_is_left_alone():
    beside = Codecs(speeds=CODECS.speeds, shares_device=False)
    assert Mixed(parts=((4, 1.0),), codecs=beside).busy_ms(MIB, 2) == 0


def test_an_unknown_width_and_impossible_figures_are_refused():
    with pytest.raises(UsageError, match="at 2 bits"):
        CODECS.speed(2)
    with pytest.raises(UsageError, match="-1"):
        Codecs(speeds={4: Speed(pack_s_per_byte=-1, add_s_per_byte=0, decode_s_per_byte=0)})
    with pytest.raises(UsageError, match="inf"):
        Codecs(speeds={}, busy_s_per_byte=float("inf"))


def test_this_machine_is_measured_without_torch():
    code = (
        "import sys; from plait import native; from plait.strategy import Codecs; c = Codecs.measure([4]);"
        "assert c.speed(4).pack_s_per_byte > 0 and c.busy_s_per_byte > 0;"
        "sys.exit('torch' in sys.modules and native.missing() is None)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_was_measured_is_kept_and_said(tmp_path, monkeypatch):
    first = Codecs.kept(tmp_path)
    (file,) = tmp_path.iterdir()

    def never(*_):
        raise AssertionError("it was measured again")

    monkeypatch.setattr(Codecs, "measure", never)
    again = Codecs.kept(tmp_path)
    assert again == first
    assert again.remark == first.remark
    assert again.remark[0].endswith(f"measured on this machine once and kept in {file}")
    assert "GiB/s a core" in again.remark[0] or "MiB/s a core" in again.remark[0]
    with pytest.raises(AssertionError, match="again"):
        Codecs.kept(tmp_path / "elsewhere")
    monkeypatch.setattr("plait.strategy.codecs.machine", lambda: "another processor x1")
    with pytest.raises(AssertionError, match="again"):
        Codecs.kept(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"speeds": {"4": {}}}', '{"speeds": {"4": 1}, "busy_s_per_byte": 0}']
)
def test_a_file_that_is_not_whole_is_measured_again(tmp_path, text):
    first = Codecs.kept(tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    file.write_text(text)
    assert Codecs.kept(tmp_path).speeds.keys() == first.speeds.keys()
    assert file.read_text().count("pack_s_per_byte") == whole.count("pack_s_per_byte")


def test_where_nothing_can_be_kept_it_is_measured(tmp_path):
    (tmp_path / "file").write_text("")
    found = Codecs.kept(tmp_path / "file" / "cache")
    assert found.remark[0].endswith("measured on this machine now")
    assert CODECS.remark == ()
