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


def check(layout, given_pieces):
    """What holds of every layout: each element is in one segment, at the place that it says."""
    assert layout.pieces == tuple(given_pieces)
    pieces_of = [(piece, index) for piece in given_pieces for index in range(piece.count)]
    seen = [0] * len(pieces_of)
    for number, share in enumerate(layout.shares):
        for i, chunk in enumerate(share):
            assert (chunk.share, chunk.number) == (number, i)
            assert chunk.count == sum(segment.count for segment in chunk.segments) > 0
            offset = 0
            for segment in chunk.segments:
                piece = segment.piece
                assert segment.offset >= offset
                assert segment.offset % ALIGNMENT_BYTES == 0
                assert segment.bytes == piece.codec.payload_bytes(segment.count)
                # A cut lies between buckets; only a piece's end may be elsewhere.
                bucket = getattr(piece.codec, "bucket", 1)
                inner_end = segment.first - piece.first + segment.count
                assert segment.first % bucket == 0
                assert inner_end % bucket == 0 or inner_end == piece.count
                for element in range(segment.count):
                    home, index = pieces_of[segment.start + element]
                    assert home is piece
                    assert index == segment.first - piece.first + element
                    seen[segment.start + element] += 1
                offset = segment.offset + segment.bytes
            assert chunk.bytes == offset
    assert seen == [1] * layout.count
    assert layout.bytes == sum(chunk.bytes for share in layout.shares for chunk in share)


def weight(share, piece=None):
    segments = (segment for chunk in share for segment in chunk.segments)
    return sum(segment.bytes for segment in segments if piece is None or segment.piece is piece)


def owners(layout):
    """(name, index in the parameter) -> share."""
    return {
        (segment.piece.name, segment.first + element): number
        for number, share in enumerate(layout.shares)
        for chunk in share
        for segment in chunk.segments
        for element in range(segment.count)
    }


def grain_bytes(piece):
    return piece.codec.payload_bytes(min(piece.grain, piece.count))


@settings(deadline=None, max_examples=60)
@given(pieces, st.integers(1, 9), chunk_sizes)
def test_every_element_has_one_place(given_pieces, shares, chunk_bytes):
    layout = Layout.balanced(given_pieces, shares, chunk_bytes=chunk_bytes)
    check(layout, given_pieces)
    assert len(layout.shares) == shares


@settings(deadline=None, max_examples=30)
@given(codecs, st.integers(1 << 15, 1 << 18), st.integers(1, 7))
def test_a_large_piece_is_divided_equally(codec, count, shares):
    piece = Piece(name="w", count=count, codec=codec)
    layout = Layout.balanced([piece], shares, chunk_bytes=1 << 12)
    weights = [weight(share) for share in layout.shares]
    divided = piece.codec.payload_bytes(count) >= shares * 4096
    if divided:
        assert all(abs(each - sum(weights) / shares) <= grain_bytes(piece) + 1 for each in weights)
    else:
        assert sorted(weights)[:-1] == [0] * (shares - 1)


@settings(deadline=None, max_examples=60)
@given(st.permutations(range(6)), st.integers(0, 6), st.integers(1, 5), st.randoms())
def test_who_adds_an_element_up_does_not_depend_on_its_company(order, alone, shares, random):
    every = [
        Piece(name=f"p{i}", count=random.choice([1, 700, 5000, 40_000]), codec=Quantizer(bits=4, bucket=64))
        for i in range(6)
    ]
    together = owners(Layout.balanced(every, shares, chunk_bytes=4096))
    some = [every[i] for i in order[:alone]]
    apart = owners(Layout.balanced(some, shares, chunk_bytes=700))
    assert apart.items() <= together.items()


@settings(deadline=None, max_examples=60)
@given(st.lists(pieces, min_size=1, max_size=5), chunk_sizes)
def test_shares_that_are_given_are_kept(shares, chunk_bytes):
    layout = Layout.given(shares, chunk_bytes=chunk_bytes)
    check(layout, [piece for share in shares for piece in share])
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
    """Buckets of 1024 at 8 bits take 1032 bytes: 20 of them are divided among two, 3 are not."""
    first = Piece(name="a", count=20_000, codec=Quantizer(bits=8))
    second = Piece(name="b", count=3000, codec=Quantizer(bits=8), first=2048)
    layout = Layout.balanced([first, second], 2, chunk_bytes=6000)
    drawn = [
        [
            [(segment.piece.name, segment.start, segment.first, segment.count) for segment in chunk.segments]
            for chunk in share
        ]
        for share in layout.shares
    ]
    assert drawn == [
        [
            [("a", 0, 0, 5120)],
            [("a", 5120, 5120, 5120)],
        ],
        [
            [("a", 10_240, 10_240, 5120)],
            [("a", 15_360, 15_360, 4640)],
            [("b", 20_000, 2048, 3000)],
        ],
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
