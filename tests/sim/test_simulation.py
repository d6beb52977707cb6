"""Time, events in their order, alarms, spans and random streams."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import UsageError
from plait.sim import Simulation
from plait.sim.simulation import Alarm
from plait.timeline import Span


def test_events_come_by_time_and_those_of_one_time_in_the_order_asked_for():
    simulation, seen = Simulation(), []

    def first():
        seen.append((simulation.now_ms, "first"))
        simulation.at(3, lambda: seen.append((simulation.now_ms, "third")))
        simulation.after(0, lambda: seen.append((simulation.now_ms, "now")))

    simulation.at(3, lambda: seen.append((simulation.now_ms, "second")))
    simulation.at(1, first)
    simulation.run()
    assert seen == [(1, "first"), (1, "now"), (3, "second"), (3, "third")]
    assert simulation.events == 4


@given(st.lists(st.integers(0, 20), max_size=40))
def test_time_never_goes_back(times):
    simulation, seen = Simulation(), []
    for place, at in enumerate(times):
        simulation.at(at, lambda place=place: seen.append((simulation.now_ms, place)))
    simulation.run()
    assert seen == sorted((at, place) for place, at in enumerate(times))


def test_what_settles_comes_after_all_of_its_moment():
    simulation, seen = Simulation(), []

    def first():
        simulation.settle(settled)
        seen.append("first")

    def settled():
        seen.append("settled")
        if seen.count("settled") == 1:
            simulation.at(1, lambda: seen.append("another of this moment"))
            simulation.settle(settled)

    simulation.at(1, first)
    simulation.at(1, lambda: seen.append("second"))
    simulation.at(2, lambda: seen.append("later"))
    simulation.run()
    assert seen == ["first", "second", "settled", "another of this moment", "settled", "later"]


def test_a_run_stops_at_its_time_and_goes_on_later():
    simulation, seen = Simulation(), []
    for at in (1, 2, 3):
        simulation.at(at, lambda at=at: seen.append(at))
    simulation.run(until_ms=2)
    assert (seen, simulation.now_ms, simulation.coming) == ([1, 2], 2, 1)
    simulation.run(until_ms=2.5)
    assert (seen, simulation.now_ms) == ([1, 2], 2.5)
    simulation.run()
    assert (seen, simulation.now_ms) == ([1, 2, 3], 3)
    simulation.run(until_ms=10)
    assert simulation.now_ms == 10


def test_what_has_no_end_is_an_error_where_so_many_events_are_allowed():
    simulation = Simulation()

    def again():
        simulation.after(1, again)

    again()
    with pytest.raises(UsageError, match=r"100 events until 100\.0 ms, and 1 more are to come"):
        simulation.run(most_events=100)
    assert simulation.events == 100


def test_what_is_not_wanted_does_not_count_against_that():
    simulation = Simulation()
    simulation.at(1, lambda: None)
    simulation.at(2, lambda: None, wanted=lambda _: False)
    simulation.run(most_events=1)
    assert simulation.events == 1


def test_an_event_that_is_not_wanted_when_it_comes_does_not_move_the_clock():
    simulation, asked = Simulation(), []
    simulation.at(1, lambda: None)
    simulation.at(5, lambda: pytest.fail("not wanted"), wanted=lambda at: asked.append(at))
    simulation.run()
    assert (simulation.now_ms, simulation.events, asked) == (1, 1, [5])


@given(st.lists(st.tuples(st.integers(0, 30), st.one_of(st.none(), st.integers(0, 40))), max_size=20))
def test_an_alarm_rings_when_it_was_set_for_last_and_at_no_other_time(changes):
    simulation, rung = Simulation(), []
    alarm = Alarm(simulation, lambda: rung.append(simulation.now_ms))
    expected, due = [], math.inf
    for at, delay in sorted(changes, key=lambda change: change[0]):
        if due < at:
            expected.append(due)
            due = math.inf
        # A change asked for before the alarm's own event comes first where both are at one time.
        due = math.inf if delay is None else at + delay
        simulation.at(at, alarm.clear if delay is None else lambda due=due: alarm.set(due))
    simulation.run()
    assert rung == expected + [due] * (due < math.inf)


def test_an_alarm_that_is_put_off_again_and_again_does_not_fill_the_future():
    simulation, rung = Simulation(), []
    alarm = Alarm(simulation, lambda: rung.append(simulation.now_ms))

    def put_off():
        alarm.set(simulation.now_ms + (1e6 if simulation.now_ms % 2 else 2))
        if simulation.now_ms < 1000:
            simulation.after(1, put_off)
        assert simulation.coming < 6

    put_off()
    simulation.run()
    assert rung == [1002]
    assert simulation.now_ms == 1002


def test_spans_are_kept_up_to_a_number_and_the_rest_counted():
    simulation = Simulation(spans=2)
    for at in range(5):
        simulation.note("track", f"{at}", at, at + 1)
    assert simulation.timeline.spans == (Span("track", "3", 3, 4), Span("track", "4", 4, 5))
    assert simulation.timeline.dropped == 3


def test_a_random_stream_depends_on_the_seed_and_its_own_name_alone():
    def draws(seed, *names):
        simulation = Simulation(seed=seed)
        streams = {name: simulation.jitter(name) for name in names}
        return {name: [stream.random() for _ in range(3)] for name, stream in streams.items()}

    assert draws(1, "a")["a"] == draws(1, "b", "a")["a"]
    assert draws(1, "a")["a"] != draws(2, "a")["a"]
    assert draws(1, "a", "b")["a"] != draws(1, "a", "b")["b"]
    assert isinstance(Simulation().jitter("a"), random.Random)


@pytest.mark.parametrize("at", [-1.0, 0.5, math.inf, math.nan])
def test_no_event_is_in_the_past_or_at_no_time(at):
    simulation = Simulation()
    simulation.at(1, lambda: simulation.at(at, lambda: None))
    with pytest.raises(UsageError, match=r"and it is 1 ms"):
        simulation.run()


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match="0 spans"):
        Simulation(spans=0)
    simulation = Simulation()
    simulation.run(until_ms=5)
    with pytest.raises(UsageError, match="until 4 ms"):
        simulation.run(until_ms=4)
