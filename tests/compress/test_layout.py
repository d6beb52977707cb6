import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.compress.codec import Cast, Exact, Quantizer
from plait.compress.layout import ALIGNMENT_BYTES, Layout, Piece
from plait.errors import UsageError

codecs = st.one_of(
    st.builds(Quantizer, bits=st.integers(1, 8), bucket=st.sampled_from([1, 2, 64, 100, 1024, 5000])),
    st.just(Exact()),
    st.just(Cast("fp16")),
)
pieces = st.lists(
    st.builds(Piece, name=st.integers(0, 99), count=st.integers(0, 3000), codec=codecs), max_size=8
)
chunk_sizes = st.sampled_from([20, 300, 4096, 1 << 18])


def check(layout, given_pieces, chunk_bytes):
    """What holds of every layout: each element is in one segment, in order, at the place that it says."""
    assert layout.pieces == tuple(given_pieces)
    where = []  # (piece, index in it) of every element, in the order of the segments
    end = 0
    for number, share in enumerate(layout.shares):
        for i, chunk in enumerate(share):
            assert (chunk.share, chunk.number) == (number, i)
            assert chunk.start == end
            assert chunk.count > 0
            begin, offset = 0, 0
            for segment in chunk.segments:
                piece = segment.piece
                assert segment.start == begin
                assert segment.offset >= offset
                assert segment.offset % ALIGNMENT_BYTES == 0
                assert segment.bytes == piece.codec.payload_bytes(segment.count)
                # A cut lies between buckets; only a piece's end may be elsewhere.
                bucket = getattr(piece.codec, "bucket", 1)
                inner_end = segment.first - piece.first + segment.count
                assert segment.first % bucket == 0
                assert inner_end % bucket == 0 or inner_end == piece.count
                where += [(id(piece), index) for index in range(segment.first, segment.first + segment.count)]
                begin += segment.count
                offset = segment.offset + segment.bytes
            assert begin == chunk.count
            assert chunk.bytes == offset
            end += chunk.count
    assert end == layout.count == sum(piece.count for piece in given_pieces)
    assert where == [
        (id(piece), piece.first + index) for piece in given_pieces for index in range(piece.count)
    ]
    assert layout.bytes == sum(chunk.bytes for share in layout.shares for chunk in share)


def weight(share):
    return sum(segment.bytes for chunk in share for segment in chunk.segments)


def grain_bytes(piece):
    return piece.codec.payload_bytes(min(piece.grain, piece.count))


@settings(deadline=None, max_examples=60)
@given(pieces, st.integers(1, 9), chunk_sizes)
def test_every_element_has_one_place_and_shares_are_equal_by_bytes(given_pieces, shares, chunk_bytes):
    layout = Layout.balanced(given_pieces, shares, chunk_bytes=chunk_bytes)
    check(layout, given_pieces, chunk_bytes)
    assert len(layout.shares) == shares
    weights = [weight(share) for share in layout.shares]
    coarsest = max((grain_bytes(piece) for piece in given_pieces), default=0)
    assert all(abs(each - sum(weights) / shares) <= coarsest + 1 for each in weights)


@settings(deadline=None, max_examples=60)
@given(st.lists(pieces, min_size=1, max_size=5), chunk_sizes)
def test_shares_that_are_given_are_kept(shares, chunk_bytes):
    layout = Layout.given(shares, chunk_bytes=chunk_bytes)
    check(layout, [piece for share in shares for piece in share], chunk_bytes)
    counts = [sum(chunk.count for chunk in share) for share in layout.shares]
    assert counts == [sum(piece.count for piece in share) for share in shares]


@settings(deadline=None, max_examples=60)
@given(pieces, st.integers(1, 5), chunk_sizes)
def test_chunks_are_about_as_large_as_asked(given_pieces, shares, chunk_bytes):
    coarsest = max((grain_bytes(piece) for piece in given_pieces), default=0)
    for share in Layout.balanced(given_pieces, shares, chunk_bytes=chunk_bytes).shares:
        for chunk in share:
            assert sum(segment.bytes for segment in chunk.segments) <= chunk_bytes + 2 * coarsest


@settings(deadline=None, max_examples=60)
@given(pieces, st.integers(1, 5))
def test_the_cuts_of_shares_do_not_depend_on_chunks(given_pieces, shares):
    edges = {
        tuple(sum(chunk.count for chunk in share) for share in layout.shares)
        for layout in (Layout.balanced(given_pieces, shares, chunk_bytes=size) for size in (20, 300, 1 << 20))
    }
    assert len(edges) == 1


def test_equal_pieces_give_the_same_layout_wherever_it_is_computed():
    one, other = (
        [Piece(name="w", count=3000, codec=Quantizer(bits=3)), Piece(name="b", count=9, codec=Exact())]
        for _ in range(2)
    )
    assert Layout.balanced(one, 3, chunk_bytes=100) == Layout.balanced(other, 3, chunk_bytes=100)


def test_a_drawing():
    """Buckets of 4 at 4 bits take 10 bytes: 30 for the first piece, 20 for the second; 25 a share."""
    first = Piece(name="a", count=10, codec=Quantizer(bits=4, bucket=4))
    second = Piece(name="b", count=8, codec=Quantizer(bits=4, bucket=4), first=16)
    layout = Layout.balanced([first, second], 2, chunk_bytes=10)
    #    elements   0123 4567 89 | 0123 4567
    #    shares     0000 0000 11   1111 1111
    drawn = [
        [
            (chunk.start, [(segment.piece.name, segment.first, segment.count) for segment in chunk.segments])
            for chunk in share
        ]
        for share in layout.shares
    ]
    assert drawn == [
        [(0, [("a", 0, 4)]), (4, [("a", 4, 4)])],
        [(8, [("a", 8, 2)]), (10, [("b", 16, 4)]), (14, [("b", 20, 4)])],
    ]


@pytest.mark.parametrize(
    ("setting", "call"),
    [
        ("count", lambda: Piece(name="w", count=-1, codec=Exact())),
        ("first", lambda: Piece(name="w", count=5, codec=Quantizer(bucket=4), first=2)),
        ("shares", lambda: Layout.balanced([], 0, chunk_bytes=10)),
        ("chunk_bytes", lambda: Layout.balanced([], 1, chunk_bytes=0)),
        ("chunk_bytes", lambda: Layout.given([], chunk_bytes=-1)),
    ],
)
def test_what_cannot_be_laid_out(setting, call):
    with pytest.raises(UsageError) as caught:
        call()
    assert caught.value.setting == setting
