"""What jobs take on disk, counted before anything is defined."""

from types import SimpleNamespace

import pytest

from plait.spill import units
from plait.spill.plan import Shard
from plait.spill.room import kept_bytes, scratch_bytes

PAGE = 4096


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_gradients_that_wait_for_their_norm_are_counted(sketch, activations):
    plan = SimpleNamespace(shards=[Shard(first=i, end=i + 1, activations=activations) for i in range(3)])
    blocks = [{"weights": 4, "moments": 2}] * 3
    plain, _ = sketch(blocks)
    clipped, _ = sketch(blocks, clips=True)
    # Two values between three shards, of a page each, and their gradients while the middle one goes back.
    assert scratch_bytes(plain, plan) == 4 * PAGE
    # The gradients of all three, and at the first shard its value and that value's gradient.
    assert scratch_bytes(clipped, plan) == (3 * 4 + 2) * PAGE


def test_what_changes_has_two_slots_and_what_is_frozen_one(sketch):
    plan = SimpleNamespace(shards=[Shard(first=0, end=2)])
    description, _ = sketch([{"weights": 4, "trained": False}, {"weights": 8, "moments": 2}])
    sizes = {segment.key: segment.nbytes for segment in units.segments(description, plan)}
    assert kept_bytes(units.segments(description, plan)) == 2 * sum(sizes.values()) - 4 * PAGE
