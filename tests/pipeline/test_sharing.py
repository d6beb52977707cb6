"""Weights that several stages hold: their copies, and what their sums take."""

import pytest

from plait.pipeline.memory import StageMemory
from plait.pipeline.network import Link, Network, Wire
from plait.pipeline.sharing import Sharing, copied, copies_bytes, sharings, summed_ms, with_copies
from plait.profile import BlockProfile, Times


def block(place, *tied, size=100):
    return BlockProfile(
        name=f"b{place}",
        parameter_bytes=size,
        optimizer_bytes=2 * size,
        output_bytes_per_sample=1,
        milliseconds={1: Times(forward=1, backward=2)},
        tied=tied,
    )


BLOCKS = (block(0, "w"), block(1), block(2, "v", size=30), block(3, "v", "w", size=7))
"""A weight of the first is used by the last, and one of the third."""


@pytest.mark.parametrize(
    ("ends", "wanted"),
    [
        ((0, 4), []),
        ((0, 1, 4), [((0, 1), ("b0",), 100)]),
        ((0, 3, 4), [((0, 1), ("b0", "b2"), 130)]),
        ((0, 1, 3, 4), [((0, 2), ("b0",), 100), ((1, 2), ("b2",), 30)]),
        ((0, 1, 2, 3, 4), [((0, 3), ("b0",), 100), ((2, 3), ("b2",), 30)]),
    ],
)
def test_what_the_same_stages_hold_is_summed_at_once(ends, wanted):
    found = sharings(BLOCKS, ends)
    assert [(each.stages, each.blocks, each.size_bytes) for each in found] == wanted


def test_copies_have_gradients_and_optimizer_state():
    assert [one.name for one in copied(BLOCKS, 3, 4)] == ["b0", "b2"]
    assert copied(BLOCKS, 0, 4) == ()
    assert copied(BLOCKS, 2, 4) == (BLOCKS[0],)
    assert copies_bytes(BLOCKS, 3, 4) == 4 * 130
    memories = (StageMemory(static_bytes=5), StageMemory(static_bytes=6))
    assert [memory.static_bytes for memory in with_copies(memories, BLOCKS, (0, 3, 4))] == [5, 6 + 4 * 130]


def test_gradients_cross_once_each_way_for_every_stage_but_the_first():
    three = Sharing(stages=(0, 2, 3), blocks=("b0",), size_bytes=10)
    assert three.wire_bytes == 40
    assert "stages 0, 2, 3 share weights: all 10 B of b0" in three.remark


def test_the_sum_follows_on_the_last_of_the_backwards():
    network = Network.uniform(3, latency_ms=1.0, bytes_per_s=1e5)  # 100 bytes take 1 ms
    shared = (Sharing(stages=(0, 2), blocks=("b0",), size_bytes=100),)
    assert summed_ms([50, 40, 30], (), network) == 50
    assert summed_ms([50, 40, 30], shared, network) == 50 + 1 + 1  # gradients came while stage 0 went back
    assert summed_ms([50, 40, 49], shared, network) == 49 + 2 + 2
    several = (*shared, Sharing(stages=(1, 2), blocks=("b1",), size_bytes=100))
    assert summed_ms([50, 40, 30], several, network) == 52 + 2 + 2


def test_the_slowest_link_between_two_stages_counts():
    wires = [
        Wire(latency_ms=latency, bytes_per_s=rate) for latency, rate in ((1.0, 1e5), (0.0, 1e4), (5.0, 1e9))
    ]
    network = Network(links=tuple(Link(forward=wire, backward=wire) for wire in wires))
    near = (Sharing(stages=(0, 2), blocks=("b0",), size_bytes=100),)
    assert summed_ms([20, 0, 0, 0], near, network) == pytest.approx(20 + 10 + 1)
