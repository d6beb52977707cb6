"""The forecast against sums by hand."""

from itertools import pairwise

import pytest

from plait.spill.forecast import Machine, Model
from plait.spill.intervals import Intervals
from plait.spill.plan import Shard

PAGE = 4096


def shards(*edges, activations="keep"):
    return [Shard(first=first, end=end, activations=activations) for first, end in pairwise(edges)]


def model(sketch, blocks, *, arena, window, pages_per_ms=1.0, **options):
    machine = Machine(
        arena_bytes=arena * PAGE,
        private_bytes=1 << 30,
        read_bytes_per_s=pages_per_ms * PAGE * 1e3,
        write_bytes_per_s=pages_per_ms * PAGE * 1e3,
        unit_ms=0.0,
    )
    intervals = Intervals.of(*sketch(blocks, **options))
    return Model(intervals, machine, window_bytes=window * PAGE)


BLOCKS = [{"weights": 4, "forward": 3}] * 3
"""SGD: no state. Forward 3 ms, backward 6, update 0.5; 4 pages of weights."""


def test_columns_of_a_step(sketch):
    # Nothing to spare: F0 reads 1 (4), F1 reads 2 (4), T2 reads 1 and its input, B1 reads 0, and all write 4.
    #   F0: max(3, 4)   F1: max(3, 4, writes its input 1)   T2 U2: max(3 + 6.5, 5, 4)   B1 U1: max(6.5, 4, 4)
    #   B0 U0: 6.5; what it leaves to be written has the next forward pass
    of = model(sketch, BLOCKS, arena=24, window=24).forecast(shards(0, 1, 2, 3), 10)
    assert of.step_ms == 4 + 4 + 9.5 + 6.5 + 6.5
    assert of.compute_ms == 9 + 18 + 1.5
    assert of.read_bytes == (4 + 4 + 5 + 4) * PAGE
    assert of.written_bytes == (1 + 3 * 4) * PAGE
    assert of.run_ms == 10 * of.step_ms
    assert of.bottleneck == "compute"
    assert of.stall_ms == 2
    assert of.arena_peak_bytes == (6 + 8) * PAGE  # the middle one has two values and their gradients


def test_what_has_no_room_beside_its_neighbour_waits(sketch):
    # 8 pages hold the largest shard and no two. What B0 leaves to be written, 4, has the next forward pass.
    of = model(sketch, BLOCKS, arena=8, window=8).forecast(shards(0, 1, 2, 3), 1)
    assert of.step_ms == of.compute_ms + of.read_ms + of.write_ms - 4
    assert of.arena_peak_bytes == 8 * PAGE
    # 14 hold the middle one with either of the others.
    assert model(sketch, BLOCKS, arena=13, window=13).forecast(shards(0, 1, 2, 3), 1).step_ms == of.step_ms
    assert model(sketch, BLOCKS, arena=14, window=14).forecast(shards(0, 1, 2, 3), 1).step_ms == 30.5


def test_one_large_shard_does_not_keep_the_others_from_overlapping(sketch):
    blocks = [{"weights": 4, "forward": 3}] * 4 + [{"weights": 20, "forward": 3}]
    cut = shards(0, 1, 2, 3, 4, 5)
    roomy = model(sketch, blocks, arena=34, window=34).forecast(cut, 1)
    tight = model(sketch, blocks, arena=24, window=24).forecast(cut, 1)
    # F3, which the last shard follows, and that shard's turn wait; no other column does.
    assert tight.read_bytes == roomy.read_bytes
    assert tight.step_ms - roomy.step_ms == (3 + 20 + 1) - 20 + (9.5 + 5 + 20) - 20


def test_a_slow_disk_is_the_bottleneck(sketch):
    of = model(sketch, BLOCKS, arena=24, window=24, pages_per_ms=0.1).forecast(shards(0, 1, 2, 3), 1)
    assert of.bottleneck == "read"
    # Each column waits for its transfers: 40 + 40 forward, 50 and 40 back; what B0 leaves, 40, has 9.
    assert of.step_ms == 40 + 40 + 50 + 40 + (40 - 9)


def test_what_is_to_spare_saves_transfers(sketch):
    cut = shards(0, 1, 2, 3)
    moved = [
        model(sketch, BLOCKS, arena=16 + spare, window=16).forecast(cut, 1) for spare in (0, 4, 8, 9, 11, 12)
    ]
    # 8: the first two shards' weights at the turn of the step; 9: shard 1 and its input at the turn to
    # backward; 12: all weights, which then are not written either.
    assert [of.read_bytes // PAGE for of in moved] == [17, 17, 13, 8, 8, 0]
    assert [of.written_bytes // PAGE for of in moved] == [13, 13, 13, 12, 12, 0]


def test_optimizer_state_stays_once_all_weights_do(sketch):
    blocks = [{"weights": 4, "moments": 1}] * 3
    at = [model(sketch, blocks, arena=30 + spare, window=30) for spare in (11, 12, 16, 17, 40)]
    moved = [of.forecast(shards(0, 1, 2, 3), 1).read_bytes // PAGE for of in at]
    whole = moved[0] - 8  # its moments, 5 pages each with the numbers beside them
    assert moved == [8 + whole, 15, 15, 10, 0]
    assert whole == 15


def test_one_shard_that_fits_moves_nothing(sketch):
    of = model(sketch, BLOCKS, arena=24, window=12).forecast(shards(0, 3), 1)
    assert of.read_bytes == of.written_bytes == 0
    assert of.step_ms == of.compute_ms


@pytest.mark.parametrize(
    ("activations", "kept", "more_ms"),
    [("keep", 8, 0), ("thrift", 4, 1), ("spill", 0, 1), ("recompute", 0, 12)],
)
def test_activations(sketch, activations, kept, more_ms):
    blocks = [{"forward": 3, "saved": 2}] * 3
    far = {"arena": 2000, "window": 200}
    plain = model(sketch, blocks, micro_batches=(1, 1), **far).forecast(shards(0, 1, 2, 3), 1)
    of = model(sketch, blocks, micro_batches=(1, 1), **far).forecast(
        shards(0, 1, 2, 3, activations=activations), 1
    )
    assert of.kept_bytes == kept * PAGE
    assert of.compute_ms == plain.compute_ms + more_ms
    assert of.private_peak_bytes >= of.kept_bytes


def test_spilled_activations_cross_the_disk_where_they_do_not_stay(sketch):
    blocks = [{"saved": 2}] * 3
    tight = model(sketch, blocks, arena=60, window=60)
    kept, spilled = (tight.forecast(shards(0, 1, 2, 3, activations=mode), 1) for mode in ("keep", "spill"))
    # Two shards: half of 2 pages, and the slack of the segment.
    assert spilled.written_bytes - kept.written_bytes == 2 * (1 + 16) * PAGE
    assert spilled.read_bytes - kept.read_bytes == 2 * (1 + 16) * PAGE


def test_clipping_updates_in_a_pass_of_its_own(sketch):
    plain = model(sketch, BLOCKS, arena=40, window=40).forecast(shards(0, 1, 2, 3), 1)
    clipped = model(sketch, BLOCKS, arena=40, window=40, clips=True).forecast(shards(0, 1, 2, 3), 1)
    assert clipped.compute_ms == plain.compute_ms
    assert clipped.written_bytes == plain.written_bytes + 12 * PAGE  # gradients wait
    assert clipped.read_bytes == plain.read_bytes + 24 * PAGE  # and come again, with the weights
    assert clipped.step_ms > plain.step_ms
