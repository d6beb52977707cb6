"""Segments: where tensors lie in them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import UsageError
from plait.spill.segment import ALIGNMENT_BYTES, PAGE_BYTES, Segment, item_bytes, padded

TENSORS = st.lists(
    st.tuples(
        st.text(min_size=1, max_size=5),
        st.lists(st.integers(0, 50), max_size=3).map(tuple),
        st.sampled_from(["float32", "bfloat16", "int64", "bool", "complex128"]),
    ),
    max_size=8,
)


@given(TENSORS)
def test_tensors_are_aligned_in_their_order_and_do_not_overlap(tensors):
    segment = Segment.pack("job/weights/0", tensors, persistent=True)
    assert [(entry.name, entry.shape, entry.dtype) for entry in segment.entries] == tensors
    end = 0
    for entry in segment.entries:
        assert entry.offset % ALIGNMENT_BYTES == 0
        assert end <= entry.offset < end + ALIGNMENT_BYTES
        end = entry.offset + entry.nbytes
    assert segment.nbytes % PAGE_BYTES == 0
    assert max(end, 1) <= segment.nbytes < max(end, 1) + PAGE_BYTES


def test_the_group_is_what_stands_before_the_first_slash():
    assert Segment(key="job/weights/0", nbytes=PAGE_BYTES, persistent=True).group == "job"
    assert Segment(key="job", nbytes=PAGE_BYTES, persistent=True).group == "job"


def test_sizes_are_rounded_up():
    assert [padded(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
    assert item_bytes("bfloat16") == 2


def test_a_type_that_no_segment_holds_is_refused():
    with pytest.raises(UsageError, match="type qint8 cannot be kept") as caught:
        Segment.pack("job/weights/0", [("w", (3,), "qint8")], persistent=True)
    assert caught.value.setting == "model"
