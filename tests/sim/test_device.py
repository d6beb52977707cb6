"""One thing at a time, what matters more first."""

import math
import statistics
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import UsageError
from plait.sim import Device, Simulation, Trace


def test_work_of_one_priority_goes_in_order():
    simulation, ends = Simulation(), []
    device = Device(simulation, "device")
    for name, length in (("a", 3), ("b", 2)):
        device.run(name, length, lambda name=name: ends.append((name, simulation.now_ms)))
    simulation.run()
    assert ends == [("a", 3), ("b", 5)]
    assert [(s.name, s.start_ms, s.end_ms) for s in simulation.timeline.spans] == [("a", 0, 3), ("b", 3, 5)]


def test_what_matters_more_suspends_what_runs_which_goes_on_from_where_it_was():
    simulation, ends = Simulation(), []
    device = Device(simulation, "device")
    device.run("background", 10, lambda: ends.append(("background", simulation.now_ms)), priority=-1)
    device.run("later background", 1, lambda: ends.append(("later", simulation.now_ms)), priority=-1)
    simulation.at(4, lambda: device.run("a", 5, lambda: ends.append(("a", simulation.now_ms))))
    simulation.run()
    assert ends == [("a", 9), ("background", 15), ("later", 16)]
    assert [(s.name, s.start_ms, s.end_ms) for s in simulation.timeline.spans] == [
        ("background", 0, 4), ("a", 4, 9), ("background", 9, 15), ("later background", 15, 16),
    ]  # fmt: skip
    assert (device.busy_ms(-1), device.busy_ms(0), device.busy_ms(), device.idle_ms) == (11, 5, 16, 0)


def test_a_switch_is_lost_to_the_one_that_comes():
    simulation, ends = Simulation(), []
    device = Device(simulation, "device", switch_ms=1)
    device.run("background", 10, lambda: ends.append(("background", simulation.now_ms)), priority=-1)
    simulation.at(4, lambda: device.run("a", 5, lambda: ends.append(("a", simulation.now_ms))))
    # It comes in the middle of the switch: only what is left of that is lost to it.
    simulation.at(4.5, lambda: device.run("b", 1, lambda: ends.append(("b", simulation.now_ms)), priority=1))
    simulation.run(until_ms=20)
    assert ends == [("b", 6), ("a", 11), ("background", 17)]
    assert (device.switching_ms, device.busy_ms(), device.idle_ms) == (1, 16, 3)


def test_nothing_is_switched_where_the_other_had_not_begun():
    simulation, ends = Simulation(), []
    device = Device(simulation, "device", switch_ms=1)
    device.run("background", 10, lambda: None, priority=-1)
    device.run("a", 5, lambda: ends.append(simulation.now_ms))
    simulation.run()
    assert ends == [5]
    assert device.switching_ms == 0


def test_who_waits_for_a_work_chooses_before_the_queue_does():
    simulation, ends = Simulation(), []
    device = Device(simulation, "device", switch_ms=1)
    device.run("a", 2, lambda: device.run("b", 2, lambda: ends.append(("b", simulation.now_ms)), priority=1))
    device.run("background", 3, lambda: ends.append(("background", simulation.now_ms)), priority=-1)
    device.run("c", 1, lambda: ends.append(("c", simulation.now_ms)))
    simulation.run()
    assert ends == [("b", 4), ("c", 5), ("background", 8)]


def test_what_ends_at_the_moment_that_another_comes_has_ended():
    simulation, ends = Simulation(), []
    device = Device(simulation, "device", switch_ms=1)
    simulation.at(5, lambda: device.run("a", 5, lambda: ends.append(("a", simulation.now_ms)), priority=1))
    device.run("background", 5, lambda: ends.append(("background", simulation.now_ms)))
    simulation.run()
    assert ends == [("background", 5), ("a", 10)]


def test_a_straggler_and_one_that_comes_and_goes():
    simulation, ends = Simulation(), []
    slow = Device(simulation, "slow", speed=0.5)
    trace = Device(simulation, "trace", speed=Trace.of([(0, 1.0), (4, 0.0), (6, 2.0)]))
    slow.run("a", 4, lambda: ends.append(("slow", simulation.now_ms)))
    work = trace.run("a", 10, lambda: ends.append(("trace", simulation.now_ms)))
    simulation.at(5, lambda: ends.append(("left", work.left_ms)))
    simulation.run()
    assert ends == [("left", 6), ("slow", 8), ("trace", 9)]


def test_work_can_be_called_off():
    simulation, ends = Simulation(), []
    device = Device(simulation, "device")
    running = device.run("a", 10, lambda: ends.append("a"))
    waiting = device.run("b", 10, lambda: ends.append("b"))
    last = device.run("c", 1, lambda: ends.append(("c", simulation.now_ms)))
    simulation.at(2, waiting.cancel)
    simulation.at(3, running.cancel)
    simulation.at(5, last.cancel)
    simulation.run()
    assert ends == [("c", 4)]
    assert (running.left_ms, waiting.left_ms, last.left_ms) == (7, 10, 0)
    assert (running.done, waiting.done, last.done) == (False, False, True)
    assert (running.cancelled, last.cancelled) == (True, False)
    assert device.busy_ms() == 4


def brute_force(works):
    """When each of (arrival, length, priority) ends, a millisecond at a time."""
    left = [length for _, length, _ in works]
    ends, now = [None] * len(works), 0
    while None in ends:
        there = [i for i, (arrival, _, _) in enumerate(works) if arrival <= now and left[i] > 0]
        if there:
            one = min(there, key=lambda i: (-works[i][2], works[i][0], i))
            left[one] -= 1
            if left[one] == 0:
                ends[one] = now + 1
        now += 1
    return ends


WORKS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6), st.integers(-1, 2)), min_size=1, max_size=8)


@settings(deadline=None)
@given(WORKS)
def test_as_a_brute_force_has_it(works):
    simulation = Simulation()
    device = Device(simulation, "device")
    ends = [None] * len(works)

    def run(place, length, priority):
        device.run(f"{place}", length, lambda: ends.__setitem__(place, simulation.now_ms), priority=priority)

    for place, (arrival, length, priority) in enumerate(works):
        simulation.at(arrival, lambda args=(place, length, priority): run(*args))
    simulation.run()
    assert ends == brute_force(works)


@settings(deadline=None)
@given(WORKS, st.sampled_from([0.0, 0.3, 2.0]), st.sampled_from([1.0, 0.5, Trace.of([(0, 1), (7, 0.25)])]))
def test_work_in_is_work_out(works, switch, speed):
    simulation, done = Simulation(), []
    device = Device(simulation, "device", switch_ms=switch, speed=speed)
    for place, (arrival, length, priority) in enumerate(works):
        simulation.at(
            arrival,
            lambda args=(f"{place}", length, lambda place=place: done.append(place)), p=priority: device.run(
                *args, priority=p
            ),
        )
    simulation.run()
    assert sorted(done) == list(range(len(works)))
    spans = simulation.timeline.spans
    # Never two things at a time.
    assert all(one.end_ms <= other.start_ms + 1e-9 for one, other in pairwise(spans))
    area = speed.area if isinstance(speed, Trace) else lambda start, end: (end - start) * speed
    for place, (arrival, length, _) in enumerate(works):
        its = [span for span in spans if span.name == f"{place}"]
        assert math.fsum(area(s.start_ms, s.end_ms) for s in its) == pytest.approx(length)
        assert its[0].start_ms >= arrival
    assert device.busy_ms() == pytest.approx(math.fsum(span.duration_ms for span in spans))
    assert sum(device.busy_ms(p) for p in range(-1, 3)) == pytest.approx(device.busy_ms())
    assert device.busy_ms() + device.switching_ms + device.idle_ms == pytest.approx(simulation.now_ms)


def test_jitter_has_mean_one_and_the_deviation_asked_for():
    simulation = Simulation(seed=3)
    device = Device(simulation, "device", jitter=0.2)
    lengths = [device.run("a", 1, lambda: None).work_ms for _ in range(20_000)]
    assert statistics.mean(lengths) == pytest.approx(1, abs=0.01)
    assert statistics.stdev(lengths) == pytest.approx(0.2, abs=0.01)


def test_equal_seeds_are_equal_and_another_device_changes_nothing():
    def lengths(seed, *names):
        simulation = Simulation(seed=seed)
        devices = {name: Device(simulation, name, jitter=0.1) for name in names}
        return {
            name: [device.run("a", 1, lambda: None).work_ms for _ in range(3)]
            for name, device in devices.items()
        }

    assert lengths(0, "a") == lengths(0, "a")
    assert lengths(0, "b", "a")["a"] == lengths(0, "a")["a"]
    assert lengths(1, "a") != lengths(0, "a")


def test_background_that_is_suspended_often_does_not_fill_the_future():
    simulation = Simulation()
    device = Device(simulation, "device")
    device.run("background", 1e9, lambda: None, priority=-1)

    def step():
        assert simulation.coming < 8
        if simulation.now_ms < 2000:
            device.run("a", 0.5, lambda: simulation.after(0.5, step))

    step()
    simulation.run(until_ms=2001)
    assert device.busy_ms(-1) == pytest.approx(1001)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"speed": 0.0}, "speed 0.0"),
        ({"speed": math.nan}, "speed nan"),
        ({"speed": 1e7}, "speed 10000000.0 .*works: 1.0, or from 1e-06 to 1e[+]06"),
        ({"speed": 1e-7}, "speed 1e-07"),
        ({"jitter": -0.1}, "jitter -0.1"),
        ({"jitter": 1e308}, "jitter 1e[+]308 .*works: 0.05, 10 at most"),
        ({"switch_ms": -1.0}, "switches in -1.0 ms"),
    ],
)
def test_what_cannot_be_is_refused(settings, says):
    with pytest.raises(UsageError, match=says):
        Device(Simulation(), "device", **settings)


@pytest.mark.parametrize("length", [-1, math.inf, math.nan])
def test_work_has_a_length(length):
    with pytest.raises(UsageError, match="work 'a' of"):
        Device(Simulation(), "device").run("a", length, lambda: None)
