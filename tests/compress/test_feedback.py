import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.compress import LowRank, Quantizer, TopK, all_reduce
from plait.compress.feedback import KEPT, Feedback, merged


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=8))
def test_merged_stretches_cover_the_same(pairs):
    cut, stretches = 0, []
    for gap, length in pairs:  # stretches that do not overlap
        stretches.append((cut + gap, cut + gap + length))
        cut += gap + length
    found = merged(reversed(stretches))
    assert {i for start, stop in found for i in range(start, stop)} == {
        i for start, stop in stretches for i in range(start, stop)
    }
    assert all(one[1] < other[0] for one, other in itertools.pairwise(found))


def test_what_was_lost_is_carried_over_when_shares_change():
    feedback = Feedback(kept=torch.ones(6), owned=((0, 2),))
    feedback.settle([(1, 3)], 4)
    # Of the average over four: the first was lost of a sum, the third of one contribution to it.
    assert feedback.kept.tolist() == [4.0, 1.0, 0.25, 1.0, 1.0, 1.0]
    feedback.settle([(1, 2), (2, 3)], 4)
    assert feedback.kept.tolist() == [4.0, 1.0, 0.25, 1.0, 1.0, 1.0]
    feedback.settle([(0, 2)], 4)
    assert feedback.kept.tolist() == [1.0] * 6


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 5), st.sampled_from([4, 100, 1024]), st.integers(1, 3000), st.integers(0, 99))
def test_what_is_remembered_is_bounded(bits, bucket, count, seed):
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    numbers[::7] *= 100  # tails, with which few bits lose more than there is
    codec = Quantizer(bits=bits, bucket=bucket)
    payload = torch.empty(codec.payload_bytes(count), dtype=torch.uint8)
    feedback = Feedback(kept=torch.zeros(count + 5))
    feedback.compress(codec, numbers, payload, key=seed, first=0, start=5)
    assert feedback.kept[:5].eq(0).all()
    for start in range(0, count, bucket):
        part = slice(start, start + bucket)
        # Rounding at random can lose a little more than half the norm where no bound is applied.
        assert feedback.kept[5:][part].norm() <= 1.05 * KEPT * numbers[part].norm() + 1e-30


def test_it_does_not_grow_by_itself():
    generator, codec = torch.Generator().manual_seed(1), Quantizer(bits=1)
    feedback, payload = (
        Feedback(kept=torch.zeros(4096)),
        torch.empty(codec.payload_bytes(4096), dtype=torch.uint8),
    )
    largest = 0.0
    for step in range(200):
        gradient = torch.randn(4096, generator=generator)
        largest = max(largest, gradient.norm().item())
        feedback.add_to(gradient, 0)
        feedback.compress(codec, gradient, payload, key=step, first=0, start=0)
    assert feedback.kept.norm() < KEPT / (1 - KEPT) * largest


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_remembered(value):
    numbers = torch.randn(2048)
    numbers[5] = value
    codec = Quantizer(bits=2)
    feedback = Feedback(kept=torch.ones(2048))
    payload = torch.empty(codec.payload_bytes(2048), dtype=torch.uint8)
    feedback.compress(codec, numbers, payload, key=0, first=0, start=0)
    assert feedback.kept[:1024].eq(0).all()
    assert feedback.kept.isfinite().all()
    assert feedback.kept[1024:].ne(0).any()


def reduced(codec):
    """How far the mean of many sums of the same gradients is off, and that mean."""
    gradient = torch.randn(20_000, generator=torch.Generator().manual_seed(dist.get_rank()))
    exact = gradient.clone()
    dist.all_reduce(exact)
    feedback, mean = Feedback(kept=torch.zeros(20_000)), torch.zeros(20_000)
    for step in range(150):
        tensor = gradient.clone()
        all_reduce(tensor, codec=codec, step=step, feedback=feedback)
        mean += tensor / 150
    return ((mean - exact).norm() / exact.norm()).item(), mean


@pytest.mark.parametrize("codec", [TopK(keep=64), LowRank(rank=4)], ids=repr)
def test_what_is_dropped_arrives_in_time(ranks, codec):
    one, other = ranks(2, reduced, codec)
    assert torch.equal(one[1], other[1])
    assert one[0] < 0.35  # a single step lacks 0.8 or more
