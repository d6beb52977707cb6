from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.collective import ring_ms
from plait.compress.codec import Exact, Quantizer
from plait.compress.collectives import CompressedCollective
from plait.compress.layout import Piece
from plait.compress.price import Pace, Speed, measure_speed, price_ms, worth_it
from plait.errors import UsageError

FREE = Speed(pack_s_per_byte=0.0, add_s_per_byte=0.0, decode_s_per_byte=0.0)
FAST = Speed(pack_s_per_byte=1e-10, add_s_per_byte=1e-10, decode_s_per_byte=1e-10)
SLOW = Speed(pack_s_per_byte=1e-7, add_s_per_byte=1e-7, decode_s_per_byte=1e-7)
FOUR = Quantizer(bits=4)
GIGABIT = Pace(bandwidth_bytes_per_s=125e6)


def price(count, world, link, speed, codec=FOUR):
    pieces = [Piece(name="", count=count, codec=codec)]
    return price_ms(pieces, world, link, {codec: speed}, chunk_bytes=256 << 10)


def test_where_work_is_free_the_wire_is_all():
    count = 16 << 20
    assert price(count, 2, GIGABIT, FREE) == pytest.approx(FOUR.payload_bytes(count) / 125e6 * 1e3)
    # and uncompressed it is what the ring takes
    assert price(count, 4, GIGABIT, FREE, Exact()) == pytest.approx(ring_ms(4 * count, 4, GIGABIT))


def test_where_the_wire_is_free_work_is_all():
    wire = Pace(bandwidth_bytes_per_s=1e15)
    numbers = 4 * (16 << 20)
    # packed once, decoded once, and with 4 workers 3/4 of it added
    work_ms = 1e3 * numbers * 1e-7 * (1 + 1 + 3 / 4)
    assert price(16 << 20, 4, wire, SLOW) == pytest.approx(work_ms, rel=0.05)
    assert price(16 << 20, 4, wire, SLOW) >= work_ms


links = st.builds(
    Pace,
    bandwidth_bytes_per_s=st.floats(1e3, 1e12),
    latency_ms=st.floats(0, 10),
    busy_s_per_byte=st.floats(0, 1e-7),
)


@settings(deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 64), links)
def test_a_price_grows_with_numbers_workers_and_worse_links(count, world, link):
    cost = price(count, world, link, FAST)
    assert cost >= 0
    assert price(count, 1, link, FAST) == 0
    assert price(count, world, replace(link, latency_ms=link.latency_ms + 1), FAST) >= cost
    assert (
        price(count, world, replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / 2), FAST) >= cost
    )
    assert price(count, world, link, SLOW) >= cost * (1 - 1e-9)


def test_a_thin_wire_is_worth_it_and_a_thick_one_is_not():
    speeds = {FOUR: SLOW, Exact(): FAST}
    assert worth_it(1 << 20, FOUR, 2, Pace(bandwidth_bytes_per_s=1e6), speeds=speeds)
    assert not worth_it(1 << 20, FOUR, 2, Pace(bandwidth_bytes_per_s=1e12), speeds=speeds)
    assert not worth_it(1 << 20, FOUR, 1, Pace(bandwidth_bytes_per_s=1e6), speeds=speeds)


def test_a_codec_is_measured_once():
    speed = measure_speed(FOUR)
    assert min(speed.pack_s_per_byte, speed.add_s_per_byte, speed.decode_s_per_byte) > 0
    assert measure_speed(Quantizer(bits=4)) is speed
    assert worth_it(1 << 22, FOUR, 2, Pace(bandwidth_bytes_per_s=1e6))


@dataclass(frozen=True)
class Wire:
    bandwidth_bytes_per_s: float
    latency_ms: float


def test_a_collective_prices_itself():
    slow = Wire(1e6, 1.0)
    four, eight = CompressedCollective(bits=4), CompressedCollective(bits=8)
    assert four.estimate_ms(4_000_000, 2, slow) < eight.estimate_ms(4_000_000, 2, slow)
    assert four.estimate_ms(4_000_000, 2, slow) == pytest.approx(
        FOUR.payload_bytes(1_000_000) / 1e3 + 2, rel=0.1
    )
    declining = CompressedCollective(bits=8, decline=True)
    assert declining.estimate_ms(4_000_000, 2, slow) <= eight.estimate_ms(4_000_000, 2, slow)


@pytest.mark.parametrize(
    ("world", "link", "setting"),
    [(0, GIGABIT, "world"), (2, Wire(0.0, 0.0), "link"), (2, Wire(1.0, -1.0), "link")],
)
def test_nonsense_has_no_price(world, link, setting):
    with pytest.raises(UsageError) as caught:
        price(10, world, link, FREE)
    assert caught.value.setting == setting
