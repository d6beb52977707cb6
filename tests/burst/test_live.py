"""Graphs as chains of live sets, and shared weights."""

from plait.burst.live import cut_bytes, sharers
from plait.profile import BlockProfile, Profile, Times


def block(name, size, inputs=None, tied=()):
    times = {1: Times(forward=1.0, backward=2.0)}
    return BlockProfile(
        name=name,
        parameter_bytes=8,
        output_bytes_per_sample=size,
        milliseconds=times,
        inputs=inputs,
        tied=tied,
    )


def test_a_chain_passes_on_what_the_block_before_made():
    assert cut_bytes(Profile(blocks=(block("a", 1), block("b", 10), block("c", 100)))) == (0, 1, 10)


def test_what_a_later_block_reads_stays_alive():
    blocks = (
        block("a", 1),
        block("b", 10),
        block("c", 100, ("a", "b")),  # a is alive before b and c
        block("d", 1000, ()),  # reads the model's inputs alone: c is alive because of e
        block("e", 1, ("c", "d")),
    )
    assert cut_bytes(Profile(blocks=blocks)) == (0, 1, 11, 100, 1100)


def test_what_nobody_reads_does_not_move():
    assert cut_bytes(Profile(blocks=(block("a", 1), block("b", 10, ()), block("c", 5, ("b",))))) == (0, 0, 10)


def test_shared_weights_belong_to_their_first_block():
    blocks = (
        block("a", 1, tied=("x",)),
        block("b", 1, tied=("y", "z")),
        block("c", 1, tied=("x", "y")),
        block("d", 1, tied=("z",)),
    )
    assert sharers(Profile(blocks=blocks)) == {0: (2,), 1: (2, 3)}
