"""Memory against a count of every tensor in every run."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import UsageError
from plait.pipeline.candidate import Candidate
from plait.pipeline.memory import StageMemory, fits, fitting, peak_bytes, stage_bytes
from plait.pipeline.orders import depth, kfkb, one_f_one_b, work_conserving
from plait.pipeline.validity import held, states

MEMORY = StageMemory(
    static_bytes=1000,
    saved_bytes_per_row=50,
    input_bytes_per_row=7,
    output_bytes_per_row=3,
    transient_bytes=20,
    transient_bytes_per_row=11,
)


def test_a_stage_of_1f1b_by_hand():
    # Stage 1 of 3 holds 2 in flight. Its worst moment: 2 in flight, and what its neighbours may have sent.
    candidate = Candidate(order=one_f_one_b(3, 6), global_batch=24)
    order = candidate.order
    worst = max(
        50 * (f - b) + 7 * (order.inputs_ahead(1, b) - f) + 3 * (order.gradients_ahead(1, f) - b)
        + 7 * (b - order.least_backwards(0, f))
        for f, b in states(order, 1)
    )  # fmt: skip
    assert stage_bytes(candidate, 1, MEMORY) == 1000 + 20 + 11 * 4 + worst * 4
    assert worst >= 2 * 50


SIZES = st.integers(0, 100)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_it_is_the_worst_state(stages, micro_batches, data):
    order = data.draw(
        st.sampled_from(
            [kfkb(stages, micro_batches, k) for k in range(1, micro_batches + 1)]
            + [depth(stages, micro_batches, 2), work_conserving(stages, micro_batches, 2)]
        )
    )
    memory = StageMemory(
        static_bytes=data.draw(SIZES),
        saved_bytes_per_row=data.draw(SIZES),
        input_bytes_per_row=data.draw(SIZES),
        output_bytes_per_row=data.draw(SIZES),
        transient_bytes_per_row=data.draw(SIZES),
    )
    candidate = Candidate(order=order, global_batch=micro_batches * 3)
    for stage in range(stages):
        worst = 0
        for state in states(order, stage):
            count = held(order, stage, *state)
            tensors = [memory.saved_bytes_per_row] * count.in_flight
            tensors += [memory.input_bytes_per_row] * (count.inputs + count.gradients_sent)
            tensors += [memory.output_bytes_per_row] * count.gradients
            worst = max(worst, sum(tensors))
        wanted = memory.static_bytes + 3 * (worst + memory.transient_bytes_per_row)
        assert stage_bytes(candidate, stage, memory) == wanted


def test_larger_k_takes_more_and_depth_less_than_k():
    memories = [MEMORY] * 4
    by_k = [peak_bytes(Candidate(order=kfkb(4, 16, k), global_batch=32), memories) for k in (1, 2, 4)]
    for smaller, larger in itertools.pairwise(by_k):
        assert all(a < b for a, b in zip(smaller, larger, strict=True))
    deep = peak_bytes(Candidate(order=depth(4, 16, 2), global_batch=32), memories)
    assert all(a <= b for a, b in zip(deep, by_k[1], strict=True))
    assert deep != by_k[1]


def test_what_fits():
    memories = [MEMORY] * 2
    known = [Candidate(order=kfkb(2, 8, k), global_batch=32) for k in (1, 2, 4, 8)]
    second = max(peak_bytes(known[1], memories))
    assert fitting(known, memories, [second] * 2) == tuple(known[:2])
    assert fits(known[1], memories, [second] * 2)
    assert not fits(known[1], memories, [second, second // 2])


def test_too_small_a_limit_says_the_smallest_that_works():
    memories = [MEMORY] * 2
    known = [Candidate(order=kfkb(2, m, k), global_batch=32) for m in (4, 8, 16) for k in (1, 2)]
    least = min(max(peak_bytes(candidate, memories)) for candidate in known)
    with pytest.raises(UsageError, match=f"stage 0 needs .* works: {least}$") as caught:
        fitting(known, memories, [least - 1] * 2)
    assert caught.value.setting == "memory_limit"
    assert fitting(known, memories, [least] * 2)


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match="static_bytes is -1"):
        StageMemory(static_bytes=-1)
    with pytest.raises(UsageError, match="no candidate"):
        fitting([], [], [])
