"""Planning for a profile, end to end."""

from dataclasses import replace

import pytest

from plait.errors import UsageError
from plait.pipeline.network import Network
from plait.pipeline.planning import plan
from plait.profile import BlockProfile, Profile, Times

PROFILE = Profile(
    blocks=tuple(
        BlockProfile(
            name=f"b{i}",
            parameter_bytes=10_000,
            output_bytes_per_sample=50_000,
            saved_bytes_per_sample=100_000,
            milliseconds={1: Times(forward=2, backward=4), 8: Times(forward=9, backward=18)},
        )
        for i in range(8)
    )
)


def test_on_a_fast_network_it_saves_memory():
    made = plan(PROFILE, 4, global_batch=32, micro_batches=[16])
    assert made.cuts == (2, 4, 6)
    assert made.order.in_flight(0) <= 4
    assert made.forecast.busy_ms == pytest.approx([made.forecast.busy_ms[0]] * 4)


def test_a_slow_network_gets_another_order_and_a_shorter_step_than_1f1b():
    slow = Network.uniform(4, latency_ms=5, bytes_per_s=2e7)
    made = plan(PROFILE, 4, global_batch=32, micro_batches=[16], network=slow)
    plain = plan(PROFILE, 4, global_batch=32, micro_batches=[16], network=slow, families=())
    assert plain.order.k == 1
    assert made.forecast.step_ms < 0.9 * plain.forecast.step_ms
    assert made.order != plain.order


def test_the_size_of_micro_batches_is_chosen():
    """A pass has a large fixed cost here, so that many small micro-batches do not pay."""
    made = plan(PROFILE, 2, global_batch=64)
    for count in (2, 4, 8, 16):
        alone = plan(PROFILE, 2, global_batch=64, micro_batches=[count])
        assert made.forecast.step_ms <= 1.01 * alone.forecast.step_ms


def test_memory_holds_and_too_little_is_refused():
    free = plan(PROFILE, 2, global_batch=32)
    limit = 0.6 * max(free.forecast.peak_bytes)
    tight = plan(PROFILE, 2, global_batch=32, memory_bytes=limit, micro_batches=[4, 8, 16, 32])
    assert max(tight.forecast.peak_bytes) <= limit
    with pytest.raises(UsageError, match="memory_bytes"):
        plan(PROFILE, 2, global_batch=32, memory_bytes=1000)


def test_what_no_schedule_would_run_is_refused():
    with pytest.raises(UsageError, match="a batch of 2 rows in 4 micro-batches for 4 stages"):
        plan(PROFILE, 4, global_batch=2)
    with pytest.raises(UsageError, match=r"in \[1, 2\] micro-batches for 4 stages"):
        plan(PROFILE, 4, global_batch=8, micro_batches=[1, 2])
    assert plan(PROFILE, 4, global_batch=8, micro_batches=[1, 4]).order.micro_batches == 4


def tied(size=2_000_000):
    """The first block's weights are used by the last as well."""
    first = replace(PROFILE.blocks[0], parameter_bytes=size, optimizer_bytes=2 * size, tied=("w",))
    last = replace(PROFILE.blocks[-1], tied=("w",))
    return replace(PROFILE, blocks=(first, *PROFILE.blocks[1:-1], last))


def free(profile):
    return replace(profile, blocks=tuple(replace(block, tied=()) for block in profile.blocks))


def test_weights_that_stages_share_are_held_by_each_and_summed():
    network = Network.uniform(4, latency_ms=1, bytes_per_s=1e8)  # two million bytes take 20 ms
    settings = {"global_batch": 16, "micro_batches": [8], "network": network, "families": ()}
    with_sum, without = plan(tied(), 4, **settings), plan(free(tied()), 4, **settings)
    assert with_sum.cuts == without.cuts
    copies = [
        ours - theirs
        for ours, theirs in zip(with_sum.forecast.peak_bytes, without.forecast.peak_bytes, strict=True)
    ]
    assert copies == [0, 0, 0, 4 * 2_000_000]
    # The last stage's gradients come while the first still goes back; the sum follows on that.
    assert with_sum.forecast.step_ms == pytest.approx(without.forecast.step_ms + 20 + 1)
    assert with_sum.forecast.busy_ms == without.forecast.busy_ms


def test_a_chain_is_cut_anew_where_a_copy_does_not_fit():
    settings = {"global_batch": 16, "micro_batches": [8], "families": ()}
    wide = plan(tied(), 2, **settings)
    limits = [1e9, wide.forecast.peak_bytes[1] - 1]
    assert plan(free(tied()), 2, memory_bytes=limits, **settings).cuts == wide.cuts == (4,)
    moved = plan(tied(), 2, memory_bytes=limits, **settings)
    assert moved.cuts > wide.cuts  # activations of fewer blocks leave room for the copy
    assert moved.forecast.peak_bytes[1] <= limits[1]


def test_a_copy_that_fits_nowhere_is_refused_with_what_it_needs():
    with pytest.raises(UsageError, match=r"stage 1 needs") as error:
        plan(tied(), 2, global_batch=16, memory_bytes=[1e9, 4 * 2_000_000])
    assert error.value.setting == "memory_bytes"
    assert int(error.value.works) > 4 * 2_000_000
