"""Planning for a profile, end to end."""

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


def test_a_batch_smaller_than_the_stages_still_has_a_plan():
    assert plan(PROFILE, 4, global_batch=2).order.micro_batches == 2
