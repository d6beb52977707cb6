"""A run over time: the plan's own timeline, what workers recorded, and what rows and events tell."""

import pytest
from made_runs import BEGIN, planned, row

from plait.engine.recording import Recorded
from plait.engine.timelines import (
    against_plan,
    between_steps,
    devices,
    left_out,
    measured,
    of_steps,
    sittings,
)
from plait.engine.timelines import planned as planned_timeline
from plait.timeline import Span, Timeline

MS = 1e3 * BEGIN


def recorded(spans, *, attempt=0, rank=0, dropped=0):
    return Recorded(task="gpt", attempt=attempt, rank=rank, timeline=Timeline.of(spans, dropped=dropped))


def worker(rank, steps, *, attempt=0, tracks="a/0 | a/1", details=("F0", "B0")):
    """What a worker leaves: 100 ms a step, of which two details fill half, and 10 ms between steps."""
    track, info = f"a/{rank}", {"attempt": attempt}
    spans = [Span(f"{track}: start", "start", MS - 50, MS, {"job": "gpt", "tracks": tracks, **info})]
    for step in steps:
        begin = MS + 110 * step
        spans.append(Span(track, "gpt", begin, begin + 100, {"step": step, **info}))
        spans += [
            Span(
                f"{track}: stage{rank}", name, begin + 20 * place, begin + 20 * place + 25, {"step": step + 1}
            )
            for place, name in enumerate(details)
        ]
    return recorded(spans, attempt=attempt, rank=rank)


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
    found = measured([row("gpt", step) for step in range(3)], events, plan)
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
    found = measured(history, [], {"ways": [{"placements": placements}]})
    assert set(found.tracks) == {"a/0 (background)", "a/1 (turns)", "a/7", "lost"}


def test_steps_that_do_not_tell_their_time_fill_what_is_between():
    history = [
        {"job": "a", "step": step, "attempt": 0, "time": BEGIN + step, "loss": 1.0} for step in range(3)
    ]
    found = measured(history, [], {})
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
    found = measured(history, events, {}, most=10)
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
    whole = measured(history, events, {})
    assert whole.makespan_ms == pytest.approx(1e3 * (day + 1), abs=0.1)
    first, second = sittings(whole)
    assert (first.start_ms, second.start_ms) == (0, 0)
    assert first.makespan_ms == pytest.approx(100, abs=0.1)
    assert [s.name for s in of(second, "events")] == ["resumed", "resumed"]
    assert second.makespan_ms == pytest.approx(1000, abs=1)


def test_nothing_has_happened():
    assert measured([], [], {}).spans == ()
    assert sittings(measured([], [], {})) == []


def test_rows_without_times_and_odd_ones_are_left_out():
    history = [
        {"job": "a", "step": 0, "loss": 1.0},
        row("a", 1, seconds=0.1),
        {**row("a", 2), "seconds": -5.0},
    ]
    found = measured(history, [{"kind": "started", "time": "yesterday"}], {})
    assert [s.info["step"] for s in found.spans] == [1, 2]


# --- what workers recorded -----------------------------------------------------------------------------


PLAN = {"ways": [{"placements": [{"job": "gpt", "how": "foreground", "devices": ["a/0", "a/1"]}]}]}


def told(timeline, track):
    return [(s.name, s.info.get("step"), s.info.get("attempt")) for s in of(timeline, track)]


def test_recorded_steps_take_the_place_of_rows():
    rows = [row("gpt", step) for step in range(3)]
    found = measured(rows, [], PLAN, [worker(0, range(3)), worker(1, range(3))])
    for track in ("a/0", "a/1"):
        assert told(found, track) == [("gpt", step, 0) for step in range(3)]
        assert [s.start_ms for s in of(found, track)] == pytest.approx([50, 160, 270], abs=0.01)
        assert [(s.start_ms, s.end_ms) for s in of(found, f"{track}: start")] == [(0, 50)]
    assert [s.name for s in of(found, "a/1: stage1")] == ["F0", "B0"] * 3
    assert sorted(devices(found)) == ["a/0", "a/1"]


def test_rows_tell_of_workers_and_steps_that_left_no_recording():
    rows = [row("gpt", step) for step in range(3)]
    found = measured(rows, [], PLAN, [worker(1, [0, 1])])
    assert told(found, "a/0") == [("gpt", step, 0) for step in range(3)]
    assert told(found, "a/1") == [("gpt", 0, 0), ("gpt", 1, 0), ("gpt", 2, 0)]


def test_a_job_that_went_on_with_fewer_devices_is_not_drawn_where_it_was_planned():
    rows = [row("gpt", 0), row("gpt", 1, attempt=1), row("gpt", 2, attempt=1)]
    found = measured(rows, [], PLAN, [worker(0, [1], attempt=1, tracks="a/0")])
    assert told(found, "a/1") == [("gpt", 0, 0)]
    assert [step for name, step, _ in told(found, "a/0") if name == "gpt"] == [0, 1, 2]


def test_of_many_details_the_latest_are_kept_on_all_devices_and_the_others_counted():
    both = [worker(0, range(10)), worker(1, range(10))]
    found = measured([], [], PLAN, both, most_details=12)
    for track in ("a/0: stage0", "a/1: stage1"):
        assert [s.info["step"] for s in of(found, track)] == [8, 8, 9, 9, 10, 10]
    assert found.dropped == 2 * 20 - 12
    assert len(of(found, "a/0")) == 10


def test_many_recorded_steps_are_stretches_by_device():
    found = measured([], [], PLAN, [worker(0, range(10)), worker(1, range(10))], most=10)
    for track in ("a/0", "a/1"):
        assert [s.info["steps"] for s in of(found, track)] == ["0 to 9"]


def test_the_last_steps_that_all_workers_have():
    both = [worker(0, range(5)), worker(1, range(4)), worker(0, range(2), attempt=-1)]
    found = of_steps(both, 2)
    assert found.tracks == ("stage0", "stage1")
    for track in found.tracks:
        assert [(s.name, s.info["step"]) for s in of(found, track)] == [
            ("F0", 3), ("B0", 3), ("F0", 4), ("B0", 4)
        ]  # fmt: skip
    assert of_steps([], 2).spans == ()


def test_a_step_of_which_the_beginning_was_overwritten_is_none_of_the_last_steps():
    one = worker(0, range(3))
    kept = [s for s in one.timeline.spans if s.name != "F0" or s.info["step"] > 1]
    found = of_steps([recorded(kept, dropped=1)], 5)
    assert {s.info["step"] for s in found.spans} == {2, 3}


def placed(name, end_ms, how="foreground"):
    return {"job": name, "how": how, "devices": ["a/0"], "start_ms": 0, "end_ms": end_ms}


def test_the_plan_is_compared_from_the_first_step_on_and_says_what_it_has_not():
    spans = [
        Span("a/0: start", "start", 0, 4000, {"job": "gpt", "attempt": 0}),
        Span("a/0", "gpt", 4000, 5000, {"step": 0, "attempt": 0}),
        Span("a/0", "gpt", 5000, 7000, {"steps": "1 to 2", "attempt": 0}),
        Span("a/0: stage0", "gpt", 7000, 7500, {"step": 2}),
        Span("a/0", "checkpoint", 7000, 8000, {"attempt": 0}),
        Span("a/0 (background)", "behind", 3000, 20000, {"step": 0, "attempt": 0}),
    ]
    whole = Timeline.of(spans)
    assert between_steps(whole, ["gpt"]) == 3000
    assert between_steps(whole, ["none"]) is None
    plan = {"ways": [{"placements": [placed("gpt", 2000), placed("behind", 9000, "background")]}]}
    has_not = (
        "The plan has the steps alone: no starting of workers, no checkpoints, no evaluations, no sweeps."
    )
    assert against_plan(plan, [whole]) == (
        f"{has_not} From the first step of the foreground job to the last, 2 s were planned "
        "and 3 s measured, 1.5 times as long."
    )
    assert against_plan(plan, [whole, whole]) == has_not
    assert against_plan(plan, []) == has_not
    assert against_plan(plan, [Timeline.of(spans[:1])]) == has_not


def test_why_spans_are_left_out_and_where_they_are():
    both = [worker(0, range(10)), worker(1, range(10))]
    assert left_out(measured([], [], PLAN, both), both) is None
    fewer = left_out(measured([], [], PLAN, both, most_details=12), both)
    assert "the page would be too large; the 28 before them are in tasks/*/timeline-*.json." in fewer
    assert "were not kept" not in fewer
    full = [recorded(both[0].timeline.spans, dropped=1234)]
    said = left_out(measured([], [], PLAN, full), full)
    assert said.startswith("1,234 older spans were not kept: each worker holds its latest 4,096, ")
