"""What averaging gradients costs: against the strand's own price, and against the ring."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.collective import TorchCollective, ring_ms
from plait.compress.codec import Cast, Exact, Quantizer
from plait.compress.compression import Compression
from plait.compress.layout import Piece
from plait.compress.price import Pace, Speed, price_ms
from plait.errors import UsageError
from plait.sim.reduction import Coded, Ring, codec_of, reduction_of

SPEED = Speed(pack_s_per_byte=3e-10, add_s_per_byte=2e-10, decode_s_per_byte=1e-10)
LINK = Pace(bandwidth_bytes_per_s=1.25e8, latency_ms=0.05)


def test_without_a_collective_it_is_torch_s_ring():
    found = reduction_of(None, None)
    assert found.estimate_ms(4000, 4, LINK) == ring_ms(4000, 4, LINK)
    assert found.wire_bytes(4000, 4) == 6000
    assert found.busy_ms(4000, 4) == 0


@given(st.integers(1, 10**7), st.integers(2, 64), st.sampled_from([1, 4, 8, 16, 32]))
def test_a_codec_costs_what_the_strand_says(count, world, bits):
    codec = codec_of(bits)
    found = Coded(codec=codec, speed=SPEED, busy_s_per_byte=1e-10)
    pace = Pace(bandwidth_bytes_per_s=1.25e8, latency_ms=0.05, busy_s_per_byte=1e-10)
    piece = Piece(name="", count=count, codec=codec)
    wanted = price_ms([piece], world, pace, {codec: SPEED}, chunk_bytes=512 << 10)
    assert found.estimate_ms(4 * count, world, LINK) == wanted
    assert found.wire_bytes(4 * count, world) == 2 * (world - 1) / world * codec.payload_bytes(count)


@given(st.integers(1, 10**7), st.integers(2, 64))
def test_the_codec_s_time_is_packing_adding_unpacking_and_sending(count, world):
    found = Coded(codec=Quantizer(bits=4), speed=SPEED, busy_s_per_byte=1e-10)
    share, size = (world - 1) / world, 4 * count
    wanted = size * (3e-10 + 1e-10) + size * share * 2e-10 + found.wire_bytes(size, world) * 1e-10
    assert found.busy_ms(size, world) == pytest.approx(1e3 * wanted, rel=1e-12)


def test_a_codec_on_other_cores_leaves_the_device_alone():
    assert Coded(codec=Quantizer(bits=4), speed=SPEED, shares_device=False).busy_ms(4000, 4) == 0


def test_any_collective_will_do():
    class Half:
        def estimate_ms(self, bytes, world, link):
            return ring_ms(bytes, world, link) / 2

    found = reduction_of(Half(), 4)
    assert found.estimate_ms(4096, 2, LINK) == ring_ms(4096, 2, LINK) / 2
    assert found.wire_bytes(4096, 2) == Quantizer(bits=4, bucket=128).payload_bytes(1024)
    assert reduction_of(Half(), None).wire_bytes(4096, 2) == 4096
    assert reduction_of(TorchCollective(), None).estimate_ms(4096, 2, LINK) == ring_ms(4096, 2, LINK)
    own = Ring()
    assert reduction_of(own, 4) is own


def test_a_compressed_collective_is_priced_by_its_codec():
    from plait.compress.collectives import CompressedCollective

    found = reduction_of(CompressedCollective(bits=3), None)
    assert isinstance(found, Coded)
    assert found.codec == Quantizer(bits=3)


def test_codecs_by_their_bits_are_those_of_a_run():
    assert (codec_of(32), codec_of(16)) == (Exact(), Cast("fp16"))
    assert codec_of(2) == Quantizer(bits=2, bucket=Compression().bucket)


def test_bits_that_a_run_chooses_need_a_collective():
    with pytest.raises(UsageError, match="layer by layer") as error:
        reduction_of(None, "auto")
    assert error.value.setting == "collective"
    assert reduction_of(Ring(), "auto") == Ring()


def test_what_says_nothing_of_its_cost_is_refused():
    with pytest.raises(UsageError, match="says nothing of what it costs") as error:
        reduction_of(object(), None)
    assert error.value.setting == "collective"
