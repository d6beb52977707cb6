"""The arithmetic of the format, and headers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.compress import wire
from plait.errors import UsageError


@given(bits=st.integers(1, 8), elements=st.integers(1, 10**6))
def test_a_record_is_as_small_as_its_codes_allow(bits: int, elements: int) -> None:
    codes = wire.record_bytes(elements, bits) - wire.GRID_BYTES
    least = -(-elements * bits // 8)
    assert least <= codes <= least + len(wire.planes(bits)) - 1
    if elements % 8 == 0:
        assert codes == least


@given(
    count=st.integers(0, 10**7),
    bits=st.integers(1, 8),
    bucket=st.integers(1, 5000),
    cut=st.integers(0, 10**4),
)
def test_payloads_add_up_at_the_edges_of_buckets(count: int, bits: int, bucket: int, cut: int) -> None:
    head = min(cut * bucket, count // bucket * bucket)
    whole = wire.payload_bytes(count, bits, bucket)
    parts = wire.payload_bytes(head, bits, bucket) + wire.payload_bytes(count - head, bits, bucket)
    assert whole == parts


@pytest.mark.parametrize("bits", range(1, 9))
def test_planes_have_every_bit_once(bits: int) -> None:
    places = [shift + bit for width, shift in wire.planes(bits) for bit in range(width)]
    assert places == list(range(bits))


HEADER = wire.Header(bits=4, bucket=1024, dtype="bfloat16", count=5000)
PAYLOAD = (bytes(range(256)) * 10)[: wire.payload_bytes(5000, 4, 1024)]


def test_a_header_says_what_it_was_told() -> None:
    sealed = HEADER.seal(PAYLOAD)
    assert len(sealed) == wire.HEADER_BYTES == 24
    assert wire.Header.open(sealed, PAYLOAD, len(PAYLOAD)) == HEADER
    # As docs/wire.md has it.
    assert sealed[:20] == b"plai\x01\x01\x04\x02" + (1024).to_bytes(4, "little") + (5000).to_bytes(
        8, "little"
    )


def altered(at: int, value: int) -> bytes:
    sealed = bytearray(HEADER.seal(PAYLOAD))
    sealed[at] = value
    return bytes(sealed)


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"", "a header alone 24"),
        (HEADER.seal(PAYLOAD)[:23], "a header alone 24"),
        (altered(0, 0), "starts with"),
        (altered(4, 2), "version is 2, and this plait reads 1"),
        (altered(5, 9), "codec is number 9"),
        (altered(6, 0), "0 bits"),
        (altered(6, 9), "9 bits"),
        (altered(7, 3), "dtype number 3"),
        (altered(9, 0), "buckets of 0"),
        (altered(11, 255), "buckets of"),
        (altered(12, 0), "elements take"),
        (altered(19, 255), "elements take"),
        (altered(20, HEADER.seal(PAYLOAD)[20] ^ 1), "checksum"),
        (altered(7, 1), "checksum"),
    ],
)
def test_headers_that_lie_are_refused(head: bytes, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        wire.Header.open(head, PAYLOAD, len(PAYLOAD))
    assert caught.value.setting == "message"
    assert caught.value.works
