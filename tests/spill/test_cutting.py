"""The search within one window: what it is allowed, and what it gives up on."""

import numpy as np
import pytest

from plait.spill.cutting import budget_of, fastest, unlimited
from plait.spill.forecast import Machine, Model
from plait.spill.intervals import Intervals

PAGE = 4096


def model(sketch, blocks, *, window, private=10_000, arena=10_000, rate=1e9):
    machine = Machine(
        arena_bytes=arena * PAGE,
        private_bytes=private * PAGE,
        read_bytes_per_s=rate,
        write_bytes_per_s=rate,
        unit_ms=0.5,
    )
    return Model(Intervals.of(*sketch(blocks)), machine, window_bytes=window * PAGE)


def search(of, cuts=None, limit_ms=np.inf):
    return fastest(of, budget_of(of), range(of.blocks + 1) if cuts is None else cuts, limit_ms)


BLOCKS = [{"weights": 4, "saved": 3}] * 6


def test_one_shard_where_all_fits(sketch):
    found = search(model(sketch, BLOCKS, window=24))
    assert [(shard.first, shard.end) for shard in found.shards] == [(0, 6)]


def test_shards_as_large_as_the_window_lets_them_be(sketch):
    # A unit costs something, so fewer shards are faster, as long as transfers hide behind computing. Of 12
    # blocks, 4 pages each and 2 for every value that crosses with its gradient, two neighbours need 52 pages;
    # three do with 40, a small one between.
    of = model(sketch, [*BLOCKS, *BLOCKS], window=40, arena=40, rate=10e3 * PAGE)
    shards = search(of).shards
    assert len(shards) == 3
    assert of.forecast(shards, 1).arena_peak_bytes <= 40 * PAGE
    assert search(model(sketch, BLOCKS, window=7)) is None  # 4 of weights, 4 for two values


def test_cuts_only_where_they_may_be(sketch):
    found = search(
        model(sketch, [*BLOCKS, *BLOCKS], window=40, arena=40, rate=10e3 * PAGE), cuts=range(0, 13, 4)
    )
    assert [shard.first for shard in found.shards] == [0, 4, 8]


def test_the_last_block_ends_a_shard_whatever_the_grid(sketch):
    found = search(model(sketch, BLOCKS, window=22), cuts=range(0, 7, 4))
    assert found.shards[-1].end == 6


def test_what_is_not_faster_is_not_found(sketch):
    of = model(sketch, BLOCKS, window=22)
    found = search(of)
    assert search(of, limit_ms=found.ms) is None
    assert search(of, limit_ms=found.ms + 1e-6) == found


def test_activations_are_kept_as_far_as_memory_reaches(sketch):
    plenty = model(sketch, BLOCKS, window=22)
    assert budget_of(plenty).modes == unlimited(plenty).modes
    assert {shard.activations for shard in search(plenty).shards} == {"keep"}
    tight = model(sketch, BLOCKS, window=22, private=16)
    found = search(tight)
    assert {shard.activations for shard in found.shards[:-1]} != {"keep"}
    assert tight.forecast(found.shards, 1).private_peak_bytes <= 16 * PAGE
    assert found.ms == pytest.approx(tight.forecast(found.shards, 1).step_ms)
    assert fastest(tight, unlimited(tight), range(7), np.inf).ms <= found.ms
