"""The controller on traces: the bound is held, background work comes back, and nothing flaps."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.burst.controller import LADDER, PHASELESS_LADDER, Control, Controller
from plait.burst.phases import Phase
from plait.errors import UsageError

TOP = len(LADDER) - 1


def play(slowdowns, *, steps=2000, noise=0.01, seed=0, alone=lambda step: 100.0, disturb=lambda step: 1.0):
    """Steps of a foreground that every level slows down by so much: controller, levels in force, slowdown."""
    draw, controller, levels, taken, wanted = random.Random(seed), Controller(), [], 0.0, 0.0
    for step in range(steps):
        milliseconds = alone(step) * slowdowns[controller.level] * disturb(step) * draw.gauss(1, noise)
        taken, wanted = taken + milliseconds, wanted + alone(step)
        levels.append(controller.level)
        controller.observe(step, milliseconds, controller.level)
    return controller, levels, taken / wanted


def switches(levels):
    return sum(a != b for a, b in pairwise(levels))


rising = st.lists(st.floats(0.0, 0.3), min_size=TOP, max_size=TOP).map(
    lambda found: [1.0, *sorted(1 + x for x in found)]
)


@settings(max_examples=60, deadline=None)
@given(rising, st.floats(0.0, 0.03), st.integers(0, 10**6))
def test_the_bound_is_held_whatever_the_levels_cost(slowdowns, noise, seed):
    _, levels, mean = play(slowdowns, noise=noise, seed=seed)
    # What is tried and found too slow counts too: it is little, since it is tried less and less.
    assert mean < 1.05 + 0.012 + noise / 4
    assert switches(levels) < 150


@settings(max_examples=40, deadline=None)
@given(rising, st.integers(0, 10**6))
def test_it_settles_at_the_highest_level_that_the_bound_allows(slowdowns, seed):
    near = [abs(x - 1.05) < 0.02 for x in slowdowns]
    _, levels, _ = play(slowdowns, seed=seed, noise=0.005)
    best = max(level for level, x in enumerate(slowdowns) if x <= 1.05)
    late = levels[1000:]
    if not any(near):
        assert sum(level == best for level in late) > 0.85 * len(late)


def test_a_cheap_background_runs_always_but_for_rare_measurements():
    controller, levels, _ = play([1.0, 1.0, 1.0, 1.01, 1.01, 1.02])
    paused = [step for step, level in enumerate(levels) if level == 0]
    assert paused[:8] == list(range(8)), "at first it is measured what a step takes alone"
    assert len(paused) - 8 <= 0.011 * len(levels)
    assert controller.preemptions == 0
    assert controller.baseline_ms == pytest.approx(100, rel=0.01)
    assert len(controller.ratios) > 1900


def test_far_too_slow_is_noticed_within_three_steps():
    _, levels, _ = play([1.0] * 6, disturb=lambda step: 2.0 if step >= 500 else 1.0)
    assert levels[500:504] != [TOP] * 4


def test_a_foreground_that_becomes_slower_by_itself_keeps_its_background():
    controller, levels, _ = play([1, 1, 1, 1, 1.01, 1.02], alone=lambda step: 100 if step < 1000 else 200)
    assert levels[1024:1400] == [TOP] * 376
    assert controller.baseline_ms == pytest.approx(200, rel=0.02)


def test_a_foreground_that_becomes_faster_is_measured_anew():
    controller, levels, mean = play(
        [1, 1, 1, 1, 1.01, 1.2], alone=lambda step: 200 if step < 1000 else 100, noise=0.005
    )
    assert controller.baseline_ms == pytest.approx(100, rel=0.02)
    assert levels[-1] == TOP - 1
    assert mean < 1.05


def test_a_foreground_that_is_faster_beside_background_is_not_asked_about_it_again_and_again():
    """A core that is kept busy wakes faster than one that sleeps."""
    _, levels, _ = play([1.0, 0.95, 0.95, 0.92, 0.9, 0.9])
    assert levels.count(0) < 0.03 * len(levels)


def test_after_a_passing_disturbance_it_is_back_within_forty_steps():
    _, levels, _ = play([1, 1, 1, 1, 1.01, 1.02], disturb=lambda step: 1.6 if 1000 <= step < 1010 else 1.0)
    assert 0 in levels[1000:1010]
    assert levels[1050:1300] == [TOP] * 250


def test_slow_steps_of_the_foregrounds_own_do_not_stop_the_background():
    """A checkpoint every hundred steps, say."""
    controller, _, _ = play([1, 1, 1, 1, 1.01, 1.02], disturb=lambda step: 5.0 if step % 100 == 99 else 1.0)
    assert controller.preemptions == 0


def test_rare_but_terrible_steps_that_the_background_causes_are_noticed():
    draw, controller = random.Random(0), Controller()
    for step in range(600):
        spike = controller.level == TOP and step % 8 == 0
        controller.observe(step, 100 * draw.gauss(1, 0.01) * (3 if spike else 1), controller.level)
    assert controller.preemptions > 0
    assert controller.level < TOP


def test_a_level_that_fails_is_tried_less_and_less_often():
    controller, levels, _ = play([1, 1, 1, 1, 1.01, 1.3], steps=4000)
    tried = [step for step in range(1, 4000) if levels[step] == TOP > levels[step - 1] > 0]
    gaps = [b - a for a, b in pairwise(tried)]
    assert len(tried) < 12
    assert gaps == sorted(gaps)
    reasons = [decision.reason for decision in controller.decisions]
    assert any("times what they take alone" in reason for reason in reasons)


@pytest.mark.parametrize("late", [0, 3, 205])
def test_hosts_that_do_not_talk_hold_the_bound_together(late):
    """Each slows the common foreground down, and may have started when the other ran already."""
    draw, hosts, taken = random.Random(late), (Controller(), Controller()), 0.0
    slowdowns = [1, 1, 1, 1, 1.01, 1.04]
    for step in range(3000):
        there = hosts if step >= late else hosts[:1]
        milliseconds = 100 * draw.gauss(1, 0.01) * math.prod(slowdowns[host.level] for host in there)
        taken += milliseconds
        for host in there:
            host.observe(step, milliseconds, host.level)
    assert taken / 3000 / 100 < 1.056
    assert all(host.baseline_ms == pytest.approx(100, rel=0.015) for host in hosts)
    assert max(host.level for host in hosts) >= TOP - 1


def test_a_step_with_more_than_one_level_does_not_count():
    controller = Controller()
    for step in range(50):
        controller.observe(step, 100.0, None)
    assert controller.baseline_ms is None
    assert controller.level == 0


def test_a_foreground_that_makes_no_steps_does_not_keep_the_background_waiting():
    controller = Controller()
    assert controller.silence() == 0, "nothing is known yet"
    for step in range(8):
        controller.observe(step, 100.0, controller.level)
    while not controller.measuring:
        step += 1
        controller.observe(step, 300.0, controller.level)
    assert controller.level == 0
    assert controller.silence() == TOP


def test_the_ladders_rise():
    for ladder in (LADDER, PHASELESS_LADDER):
        assert len(ladder) == TOP + 1
        room = [(len(level.phases), level.share) for level in ladder]
        assert room == sorted(room)
        assert (ladder[0].share, ladder[-1]) == (0.0, LADDER[-1])
    assert LADDER[-1].phases == frozenset(Phase)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_slowdown", 1.0), ("max_slowdown", math.nan), ("max_slowdown", math.inf), ("window", 1),
     ("settle", -1), ("align", 0), ("retry_steps", 0), ("most_retry_steps", 8), ("upkeep", 0.0),
     ("upkeep", 1.0)],
)  # fmt: skip
def test_a_control_that_cannot_work_is_refused(field, value):
    with pytest.raises(UsageError) as caught:
        Control(**{field: value})
    assert caught.value.setting == field
    assert caught.value.works
