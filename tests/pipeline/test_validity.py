"""What ends and what is held, against every run that there can be."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import UsageError
from plait.pipeline.orders import depth, kfkb, listed, per_link_depth, work_conserving
from plait.pipeline.validity import check, held, peaks, states


def every_state(order):
    """All states of all stages together that some timing leads to; a message may be on its way for ever."""
    last = order.stages - 1
    start = ((0, 0),) * order.stages
    seen, left = {start}, [start]
    while left:
        state = left.pop()
        for stage, (forwards, backwards) in enumerate(state):
            for kind in order.choices(stage, forwards, backwards):
                if kind == "F" and stage > 0 and state[stage - 1][0] <= forwards:
                    continue
                if kind == "B" and stage < last and state[stage + 1][1] <= backwards:
                    continue
                done = (forwards + 1, backwards) if kind == "F" else (forwards, backwards + 1)
                after = (*state[:stage], done, *state[stage + 1 :])
                if after not in seen:
                    seen.add(after)
                    left.append(after)
    return seen


SMALL = [
    order
    for stages, micro_batches in itertools.product((1, 2, 3, 4), (1, 2, 3, 4, 5))
    for order in [
        *(kfkb(stages, micro_batches, k) for k in range(1, micro_batches + 1)),
        *(depth(stages, micro_batches, delta) for delta in (0, 2)),
        per_link_depth(stages, micro_batches, [(1, 0, 3)[i] for i in range(stages - 1)]),
        *(work_conserving(stages, micro_batches, cap) for cap in (1, 2, 4)),
        work_conserving(stages, micro_batches, [(3, 1, 2, 2)[i] for i in range(stages)]),
    ]
]


@pytest.mark.parametrize("order", SMALL, ids=str)
def test_what_is_held_is_the_worst_of_all_runs(order):
    check(order)
    reached = every_state(order)
    for stage in range(order.stages):
        worst = {}
        for state in reached:
            forwards, backwards = state[stage]
            before = state[stage - 1] if stage > 0 else (forwards, backwards)
            after = state[stage + 1] if stage < order.stages - 1 else (forwards, backwards)
            counts = (
                forwards - backwards,
                before[0] - forwards,
                after[1] - backwards,
                forwards - after[0],
                backwards - before[1],
            )
            worst[state[stage]] = tuple(map(max, worst.get(state[stage], counts), counts))
        assert set(worst) == set(states(order, stage))
        for local, counts in worst.items():
            assert held(order, stage, *local) == counts
        assert peaks(order, stage) == tuple(map(max, *worst.values()))
        assert peaks(order, stage).in_flight == order.in_flight(stage)


@pytest.mark.parametrize("order", SMALL, ids=str)
def test_every_run_ends(order):
    end = ((order.micro_batches,) * 2,) * order.stages
    last = order.stages - 1
    for state in every_state(order):
        stuck = all(
            not any(
                (kind == "F" and (stage == 0 or state[stage - 1][0] > state[stage][0]))
                or (kind == "B" and (stage == last or state[stage + 1][1] > state[stage][1]))
                for kind in order.choices(stage, *state[stage])
            )
            for stage in range(order.stages)
        )
        assert stuck == (state == end)


@st.composite
def lists(draw):
    stages, micro_batches = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    steps = []
    for _ in range(stages):
        text, ahead, forwards = "", 0, 0
        while len(text) < 2 * micro_batches:
            may = [kind for kind, can in (("F", forwards < micro_batches), ("B", ahead > 0)) if can]
            kind = draw(st.sampled_from(may))
            text += kind
            forwards += kind == "F"
            ahead += 1 if kind == "F" else -1
        steps.append(text)
    return listed(steps)


@settings(max_examples=300, deadline=None)
@given(lists())
def test_a_deadlock_is_found_just_where_there_is_one(order):
    ends = ((order.micro_batches,) * 2,) * order.stages in every_state(order)
    if ends:
        check(order)
    else:
        with pytest.raises(UsageError, match="wait for each other"):
            check(order)


def test_a_deadlock_is_told_stage_by_stage():
    order = listed(["FBFB", "FFBB"])
    with pytest.raises(UsageError, match="stage 0 for the input of B0; stage 1 for the input of F1"):
        check(order)
