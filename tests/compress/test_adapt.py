"""When bits change and when they do not; that a run's decisions can be kept, resumed and repeated."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.cluster import Link
from plait.compress.adapt import Adaptation, Decision, Log, Replay, Tuner
from plait.compress.allocation import Exposed, allocate
from plait.compress.observation import WIDTHS, LayerError, average
from plait.errors import FileError, UsageError

QUICK = Adaptation(warmup_steps=2, every_steps=3, observe_steps=2)


def layer(name, scale, count=4096):
    """A layer whose gradients have this magnitude."""
    return LayerError(
        name=name,
        count=count,
        widths=WIDTHS,
        squared_error=tuple(count * (scale / (2**bits - 1)) ** 2 for bits in WIDTHS),
        payload_bytes=tuple(32 + count * bits // 8 for bits in WIDTHS),
        exact_bytes=4 * count,
        squared_norm=count * scale**2,
    )


def model(a=1.0, b=1.0, c=1.0):
    return [layer("a", a), layer("b", b), layer("c", c, count=65536)]


GRADIENTS = [model(a=math.exp(math.sin(step / 4)), b=math.exp(math.cos(step / 3))) for step in range(40)]
"""Forty steps in which the layers' magnitudes wander."""


def run(tuner, gradients, start=0):
    """(step, bits) of every change in a run; ``gradients`` has one model a step."""
    changes = []
    for step, layers in enumerate(gradients, start=start):
        if tuner.observes(step):
            tuner.observe(layers)
        plan = tuner.decide(step)
        if plan is not None:
            changes.append((step, plan.bits))
    return changes


@pytest.mark.parametrize(
    ("config", "observed", "decided"),
    [
        (QUICK, ".oo.oo.oo.o", "..d..d..d.."),
        (Adaptation(warmup_steps=0, every_steps=4, observe_steps=2), "o..oo..oo..", "d...d...d.."),
        (Adaptation(warmup_steps=1, every_steps=2, observe_steps=2), "ooooooooooo", ".d.d.d.d.d."),
        (Adaptation(warmup_steps=6, every_steps=2, observe_steps=1), "......o.o.o", "......d.d.d"),
    ],
)
def test_steps_at_which_gradients_are_observed_and_bits_decided(config, observed, decided):
    assert "".join("o" if config.observes(step) else "." for step in range(11)) == observed
    assert "".join("d" if config.decides(step) else "." for step in range(11)) == decided


@given(warmup=st.integers(0, 9), every=st.integers(1, 9), observe=st.integers(1, 9), step=st.integers(0, 40))
def test_every_decision_has_its_observations(warmup, every, observe, step):
    config = Adaptation(warmup_steps=warmup, every_steps=every, observe_steps=min(observe, every))
    if config.decides(step):
        first = max(0, step - config.observe_steps + 1)
        assert all(config.observes(before) for before in range(first, step + 1))


def test_bits_follow_the_gradients_and_not_their_noise():
    tuner = Tuner(QUICK)
    calm = [model(a=1.0 + 0.01 * (step % 2), b=0.1) for step in range(12)]
    swapped = [model(a=0.1, b=1.0, c=1.0 + 0.01 * (step % 2)) for step in range(9)]
    changes = run(tuner, calm + swapped)
    assert [step for step, _ in changes] == [2, 14]
    (_, before), (_, after) = changes
    assert before["a"] > before["b"]
    assert after["a"] < after["b"]
    assert before["c"] == after["c"]
    assert [decision.step for decision in tuner.log.decisions] == [2, 5, 8, 11, 14, 17, 20]
    assert [decision.changed for decision in tuner.log.decisions] == [
        step in (2, 14) for step in (2, 5, 8, 11, 14, 17, 20)
    ]
    assert "allowed" in tuner.log.decisions[4].why
    assert tuner.log.decisions[5].why.startswith("kept")


def test_every_plan_in_force_keeps_the_budget_of_its_time():
    tuner = Tuner(replace(QUICK, alpha=0.8))
    run(tuner, [model(a=math.exp(math.sin(step / 5)), b=math.exp(math.cos(step / 3))) for step in range(60)])
    assert len({tuple(decision.plan.bits.items()) for decision in tuner.log.decisions}) > 2
    for decision in tuner.log.decisions:
        assert decision.plan.holds
        assert decision.plan.alpha == 0.8


def test_a_new_plan_leaves_the_margin_and_is_the_best_that_does():
    tuner = Tuner(replace(QUICK, margin=0.2))
    run(tuner, [model(b=0.1)] * 3)
    best = allocate(model(b=0.1), 0.8)
    assert tuner.plan.bits == best.bits
    assert tuner.plan.squared_error <= 0.8 * tuner.plan.reference_error


def test_without_a_margin_and_a_gain_the_best_plan_is_always_taken():
    tuner = Tuner(Adaptation(warmup_steps=0, every_steps=1, observe_steps=1, margin=0.0, gain=0.0))
    for step, layers in enumerate(GRADIENTS):
        tuner.observe(layers)
        tuner.decide(step)
        assert tuner.plan.holds
        assert tuner.plan.payload_bytes == allocate(layers).payload_bytes


def test_a_saving_below_the_gain_changes_nothing():
    # c alone weighs 16 times as much as a, so what a saves is little of the whole.
    for gain, changed in ((0.5, [2]), (0.0, [2, 5])):
        tuner = Tuner(replace(QUICK, alpha=2.0, gain=gain))
        changes = run(tuner, [model()] * 3 + [model(a=1e-3, b=1e-3)] * 3)
        assert [step for step, _ in changes] == changed


def test_a_decision_is_made_from_the_mean_of_what_was_observed():
    tuner = Tuner(QUICK)
    first, second = model(a=2.0, b=0.1), model(a=0.1, b=2.0)
    run(tuner, [model(a=1e9), first, second])  # step 0 is not observed
    assert tuner.plan.bits == allocate(average([first, second]), 0.95).bits
    assert tuner.plan.bits != allocate(second, 0.95).bits


def test_steps_that_are_not_finite_are_left_out():
    broken = [replace(one, squared_error=(math.inf,) * 8, squared_norm=math.inf) for one in model()]
    tuner = Tuner(QUICK)
    run(tuner, [model(), broken, model()])
    assert tuner.plan.nonfinite == ()
    only = Tuner(QUICK)
    run(only, [broken] * 3)
    assert only.plan.nonfinite == ("a", "b", "c")
    assert set(only.plan.bits.values()) == {None}


def test_relative_errors_do_not_tell_large_gradients_from_small_ones():
    for error, alike in (("relative", True), ("total", False)):
        tuners = [Tuner(replace(QUICK, error=error, alpha=2.0)) for _ in range(2)]
        run(tuners[0], [model()] * 3)
        run(tuners[1], [model(a=1e-3, b=50.0)] * 3)
        assert (tuners[0].plan.bits == tuners[1].plan.bits) == alike


@pytest.mark.parametrize("error", ["relative", "total"])
def test_a_layer_without_a_gradient_and_one_that_is_not_finite_can_be_decided_on(error):
    broken = replace(layer("b", 1.0), squared_error=(math.inf,) * 8, squared_norm=math.inf)
    tuner = Tuner(replace(QUICK, error=error))
    run(tuner, [[layer("a", 0.0), broken, layer("c", 1.0)]] * 3)
    assert tuner.plan.nonfinite == ("b",)
    assert tuner.plan.bits["a"] <= 3


def test_the_time_that_is_exposed_can_be_what_counts():
    tuner = Tuner(replace(QUICK, margin=0.0))
    link = Link(bandwidth_bytes_per_s=1e8)
    tuner.observe(model())
    plan = tuner.decide(2, cost=Exposed(ready_ms=(0.0, 0.0, 50.0), link=link, world=2))
    # The first two are sent while c is still being computed.
    assert (plan.bits["a"], plan.bits["b"]) == (None, None)
    assert plan.exposed_ms == pytest.approx(plan.bits["c"] * 65536 / 8 / 1e5, rel=0.01)


@pytest.mark.parametrize("stop", [0, 1, 2, 3, 4, 20])
def test_a_resumed_run_decides_as_one_that_was_not_interrupted(stop):
    whole, first = Tuner(QUICK), Tuner(QUICK)
    run(whole, GRADIENTS)
    run(first, GRADIENTS[:stop])
    state = json.loads(json.dumps(first.state_dict()))
    second = Tuner(QUICK)
    second.load_state_dict(state)
    assert second.plan == first.plan
    run(second, GRADIENTS[stop:], start=stop)
    assert second.log == whole.log


def test_a_replay_gives_the_same_bits_at_the_same_steps(tmp_path):
    tuner = Tuner(QUICK)
    changes = run(tuner, GRADIENTS)
    assert len(changes) > 2
    path = tmp_path / "bits.json"
    tuner.log.save(path)
    for replay in (Replay(path), Replay(str(path)), Replay(tuner.log)):
        # Other gradients change nothing.
        assert run(replay, [model(a=9.0)] * 40) == changes
        assert not any(replay.observes(step) for step in range(40))


def test_the_log_says_what_was_in_force_when(tmp_path):
    tuner = Tuner(QUICK)
    run(tuner, GRADIENTS)
    log = tuner.log
    assert Log.from_json(json.loads(json.dumps(log.to_json()))) == log
    log.save(tmp_path / "bits.json")
    assert Log.load(tmp_path / "bits.json") == log
    assert log.plan_at(2) is None
    assert log.plan_at(3) == log.decisions[0].plan
    assert log.plan_at(1000) == log.decisions[-1].plan
    written = json.loads((tmp_path / "bits.json").read_text())
    assert written["format"] == "plait.compress.bits/1"
    first = written["decisions"][0]
    assert first["step"] == 2
    assert first["plan"]["bits"] == log.decisions[0].plan.bits
    assert {"payload_bytes", "squared_error", "alpha"} < set(first["plan"])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda data: data.update(format="plait.compress.bits/9"), "'plait.compress.bits/9'"),
        (lambda data: data["decisions"][1].pop("step"), r"decisions\.1\.step"),
        (lambda data: data["decisions"][1].update(step=0), "ascending"),
        (lambda data: data["decisions"][1].update(extra=0), r"decisions\.1\.extra"),
        (lambda data: data["decisions"][1]["plan"]["bits"].update(a=12), "12 bits"),
        (lambda data: data["decisions"][1]["plan"].pop("alpha"), r"decisions\.1\.plan\.alpha"),
    ],
)
def test_a_wrong_log_is_named_with_the_field(tmp_path, change, match):
    tuner = Tuner(QUICK)
    run(tuner, GRADIENTS[:9])
    data = json.loads(json.dumps(tuner.log.to_json()))
    change(data)
    path = tmp_path / "bits.json"
    path.write_text(json.dumps(data))
    with pytest.raises(FileError, match=match) as caught:
        Replay(path)
    assert str(path) in str(caught.value)


def test_a_missing_log_is_named(tmp_path):
    with pytest.raises(FileError, match=r"nowhere\.json cannot be read"):
        Replay(tmp_path / "nowhere.json")


def _observe_other_layers():
    tuner = Tuner(QUICK)
    tuner.observe(model())
    tuner.observe(model()[::-1])


def _decide_on_other_layers():
    tuner = Tuner(QUICK)
    run(tuner, [model()] * 3)
    tuner.observe([layer("new", 1.0)])
    tuner.decide(5)


def _two_decisions_after_a_step():
    plan = allocate(model())
    Log(decisions=(Decision(step=3, changed=True, why="", plan=plan),) * 2)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (lambda: Adaptation(alpha=0), "alpha is 0 .*works: 1.0"),
        (lambda: Adaptation(alpha=math.nan), "alpha is nan"),
        (lambda: Adaptation(reference_bits=9), "9 bits .*works: 4"),
        (lambda: Adaptation(least_bits=5), "at least 5 bits.*works: 1 to 4"),
        (lambda: Adaptation(least_bits=0), "at least 0 bits.*works: 1 to 4"),
        (lambda: Adaptation(warmup_steps=-1), "warmup_steps is -1"),
        (lambda: Adaptation(every_steps=0), "every_steps is 0"),
        (lambda: Adaptation(every_steps=3, observe_steps=4), "4 steps .* every 3 .*works: 1 to 3"),
        (lambda: Adaptation(error="mean"), "an error that is 'mean' .*works: total, relative"),
        (lambda: Adaptation(margin=1.0), "margin is 1.0"),
        (lambda: Adaptation(gain=-0.1), "gain is -0.1"),
        (lambda: Adaptation(alpha="2"), "alpha is '2', of type str.*works: 1.0"),
        (lambda: Adaptation(alpha=True), "alpha is True"),
        (lambda: Adaptation(margin=None), "margin is None.*works: 0.05"),
        (lambda: Adaptation(gain="x"), "gain is 'x'"),
        (lambda: Adaptation(reference_bits=1.5), "reference_bits is 1.5, of type float.*works: 4"),
        (lambda: Adaptation(reference_bits=True), "reference_bits is True"),
        (lambda: Adaptation(least_bits="3"), "least_bits is '3'"),
        (lambda: Tuner(QUICK).observes(-1), "step is -1"),
        (lambda: Tuner(QUICK).decide(2), "no gradient was observed before the decision after step 2"),
        (_observe_other_layers, "name 'a' in one observation and 'c' in another"),
        (_decide_on_other_layers, "layer 'new' has no width"),
        (_two_decisions_after_a_step, r"steps \[3, 3\]"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, match):
    with pytest.raises(UsageError, match=match):
        wrong()


def _observed():
    tuner = Tuner(QUICK)
    run(tuner, GRADIENTS[:5])
    return json.loads(json.dumps(tuner.state_dict()))


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda state: state.pop("log"), "no 'log'"),
        (lambda state: state.update(log=5), "log is 5"),
        (lambda state: state["log"].pop("decisions"), None),
        (lambda state: state["log"].update(decisions=5), "decisions"),
        (lambda state: state.update(seen="x"), "seen is 'x'"),
        (lambda state: state.update(seen=[["x"]]), r"observations\.0\.0"),
        (lambda state: state["seen"][0][0].pop("widths"), r"observations\.0\.0\.widths"),
        (lambda state: state["seen"][0][0].update(count=-1), "count is -1"),
        (lambda state: state["seen"].append(state["seen"][0][1:]), "'a' in one observation"),
    ],
)
def test_a_damaged_state_changes_nothing(damage, match):
    state, tuner = _observed(), Tuner(QUICK)
    assert len(state["seen"]) > 0
    damage(state)
    if match is None:  # a run without decisions is one
        tuner.load_state_dict(state)
        assert tuner.log == Log()
        return
    with pytest.raises((FileError, UsageError), match=match):
        tuner.load_state_dict(state)
    assert tuner.state_dict() == Tuner(QUICK).state_dict()
