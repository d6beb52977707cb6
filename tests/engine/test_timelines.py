"""A run over time: the plan's own timeline, and what rows and events tell."""

import pytest
from made_runs import BEGIN, planned, row

from plait.engine.timelines import measured
from plait.engine.timelines import planned as planned_timeline


def of(timeline, track):
    return [span for span in timeline.spans if span.track == track]


def test_the_plan_is_drawn_where_the_planner_draws_it():
    made = planned("gpt", "small")
    found, own = planned_timeline(made.to_json()), made.timeline
    assert [(s.track, s.start_ms, s.end_ms) for s in found.spans] == [
        (s.track, s.start_ms, s.end_ms) for s in own.spans
    ]
    assert {s.name for s in found.spans} == {"gpt", "small"}
    assert planned_timeline({}).spans == ()


def test_a_span_a_step_on_every_device_of_the_job():
    plan = {"ways": [{"placements": [{"job": "gpt", "how": "foreground", "devices": ["a/0", "a/1"]}]}]}
    events = [{"time": BEGIN, "kind": "started", "job": "gpt", "text": "go"}]
    (found,) = measured([row("gpt", step) for step in range(3)], events, plan)
    for track in ("a/0", "a/1"):
        assert [s.start_ms for s in of(found, track)] == pytest.approx([0, 100, 200], abs=0.01)
        assert [s.duration_ms for s in of(found, track)] == pytest.approx([100, 100, 100], abs=0.01)
        assert [s.info["step"] for s in of(found, track)] == [0, 1, 2]
    (mark,) = of(found, "events")
    assert (mark.name, mark.duration_ms, mark.info["text"]) == ("started", 0, "go")


def test_a_rows_own_device_counts_and_background_has_tracks_of_its_own():
    placements = [
        {"job": "behind", "how": "background", "devices": ["a/0"]},
        {"job": "turns", "how": "alternated", "devices": ["a/1"]},
    ]
    history = [row("behind", 0), row("turns", 0), row("free", 0, device="a/7"), row("lost", 0)]
    (found,) = measured(history, [], {"ways": [{"placements": placements}]})
    assert set(found.tracks) == {"a/0 (background)", "a/1 (turns)", "a/7", "lost"}


def test_steps_that_do_not_tell_their_time_fill_what_is_between():
    history = [
        {"job": "a", "step": step, "attempt": 0, "time": BEGIN + step, "loss": 1.0} for step in range(3)
    ]
    (found,) = measured(history, [], {})
    assert [(s.start_ms, s.end_ms) for s in found.spans] == [(0, 0), (0, 1000), (1000, 2000)]


def test_many_steps_are_stretches_cut_by_attempts_events_and_pauses():
    history = [row("a", step) for step in range(10)]  # ends at 1 s
    history += [
        row("a", step, attempt=1, at_s=BEGIN + 2 + step / 10) for step in range(5, 10)
    ]  # at 2.5 to 2.9 s
    history += [
        row("a", step, attempt=1, at_s=BEGIN + 9 + step / 10) for step in range(10, 20)
    ]  # after a pause
    events = [{"time": BEGIN + 10.45, "kind": "decision", "job": "a", "text": "2 bits"}]
    (found,) = measured(history, events, {}, most=10)
    told = [(s.info["steps"], s.info["attempt"]) for s in of(found, "a")]
    assert told == [("0 to 9", 0), ("5 to 9", 1), ("10 to 14", 1), ("15 to 19", 1)]
    first = of(found, "a")[0]
    assert first.duration_ms == pytest.approx(1000, abs=0.1)


def test_a_resumed_run_is_drawn_in_parts_without_the_days_between():
    day = 86_400
    history = [row("a", 0), row("a", 1, at_s=BEGIN + day + 1)]
    events = [
        {"time": BEGIN + day, "kind": "resumed", "text": "not all is as it was"},
        {"time": BEGIN + day + 0.1, "kind": "resumed", "text": "1 of 1 tasks are left"},
    ]
    first, second = measured(history, events, {})
    assert first.makespan_ms == pytest.approx(100, abs=0.1)
    assert [s.name for s in of(second, "events")] == ["resumed", "resumed"]
    assert second.makespan_ms == pytest.approx(1000, abs=1)


def test_nothing_has_happened():
    assert measured([], [], {}) == []


def test_rows_without_times_and_odd_ones_are_left_out():
    history = [
        {"job": "a", "step": 0, "loss": 1.0},
        row("a", 1, seconds=0.1),
        {**row("a", 2), "seconds": -5.0},
    ]
    (found,) = measured(history, [{"kind": "started", "time": "yesterday"}], {})
    assert [s.info["step"] for s in found.spans] == [1, 2]
