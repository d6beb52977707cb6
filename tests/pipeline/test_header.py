import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import WorkerError
from plait.pipeline.header import SIZE, Header

NUMBER = st.integers(0, 2**32 - 1)
LARGE = st.integers(0, 2**63)


@given(
    st.builds(
        Header,
        what=st.sampled_from(["note", "activation", "gradient", "report", "tied"]),
        step=NUMBER,
        number=NUMBER,
        tensor_bytes=LARGE,
        extra_bytes=LARGE,
        sent_ns=LARGE,
        queued_bytes=LARGE,
    )
)
def test_what_is_packed_is_unpacked(header):
    assert len(header.pack()) == SIZE
    assert Header.unpack(header.pack()) == header


def test_something_else_is_no_header():
    with pytest.raises(WorkerError, match="no head of a message between stages"):
        Header.unpack(b"x" * SIZE)
