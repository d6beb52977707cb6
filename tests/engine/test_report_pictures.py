"""The pictures on a run's page: curves, and timelines as planned and as measured."""

import math
import re

import pytest
from made_runs import BEGIN, create, full_run, job, made_folder, planned, row

from plait.engine.record import Record
from plait.engine.report import report
from plait.engine.task import Task
from plait.engine.timelines import devices
from plait.engine.timelines import planned as planned_timeline
from plait.timeline import Span, Timeline


@pytest.fixture
def full(tmp_path):
    return full_run(tmp_path / "first")


def test_what_workers_recorded_is_drawn_below_the_plan_and_kept(full):
    device = planned("gpt", "small").placement("gpt").devices[0]
    task = Task(name="gpt", kind="train", strategy="data", jobs=(job("gpt").to_json(),), devices=(device,))
    folder = made_folder(full, "tasks", "gpt")
    task.save(folder)
    begin_ms = 1e3 * (BEGIN + 1.5)
    spans = [
        Span(device, "gpt", begin_ms, begin_ms + 100, {"step": 4, "attempt": 1}),
        Span(f"{device}: compress", "pack layer3", begin_ms + 10, begin_ms + 40),
    ]
    Timeline.of(spans).save(folder / "timeline-1-0.json")
    page = report(full).read_text()
    assert page.index(">planned: ") < page.index(">measured: ")
    assert "were planned" not in page  # one job has not begun
    assert not re.search(r"% (shorter|longer) than", page)
    assert "pack layer3: 30 ms, from 1.51 s" in page
    kept = Timeline.load(full / "timeline.json")
    (packed,) = (span for span in kept.spans if span.name == "pack layer3")
    assert packed.start_ms == pytest.approx(1510, abs=0.1)  # since the run began
    assert (
        f"of {len(devices(planned_timeline(Record.read(full).plan)))} tracks" in page
    )  # details do not count


def test_many_jobs_have_several_plots(tmp_path):
    names = [f"trial-{place}" for place in range(20)]
    with Record.create(tmp_path / "run", config={}, plan={}, jobs=[job(name) for name in names]) as made:
        for name in names:
            for step in range(2):
                made.step({"job": name, "step": step, "attempt": 0, "time": BEGIN + step, "loss": 1.0})
    page = report(tmp_path / "run").read_text()
    assert len(re.findall(r'class="head"[^>]*>Loss<', page)) == 3
    assert "steps that were timed" not in page
    assert "No step was timed by itself: trial-0, trial-1, trial-2, trial-3 and 16 more." in page


def test_losses_that_no_axis_holds(tmp_path):
    with Record.create(tmp_path / "run", config={}, plan={}, jobs=[job(name) for name in "abc"]) as made:
        for step, loss in enumerate([1e300, -1e300, 1e20]):
            made.step(row("a", step, loss=loss))
        made.step(row("b", 0, loss=1.0))
        made.step(row("b", 1, loss=1.0 + 2**-52))
        made.step(row("c", 0, loss=math.nan))
    page = report(tmp_path / "run").read_text()
    assert page.count('class="plotted"') == 2  # of losses, and of throughput


def test_a_resumed_run_has_a_part_for_each_time(tmp_path):
    with create(tmp_path / "run", "gpt") as made:
        made.step(row("gpt", 0))
    with Record.open(tmp_path / "run") as again:
        again.event("resumed", "1 of 1 tasks are left", time=BEGIN + 1e6)
        again.step(row("gpt", 1, at_s=BEGIN + 1e6 + 1))
    page = report(tmp_path / "run").read_text()
    assert "measured, part 1: " in page
    assert "measured, part 2: " in page
    assert not re.search(r"% (shorter|longer) than", page)
    assert "were planned" not in page  # no part is the whole
    assert "no starting of workers" in page


def test_the_plan_is_compared_once_all_of_it_is_done(tmp_path):
    with create(tmp_path / "run", "gpt") as made:
        for step in range(10):
            made.step(row("gpt", step))
        assert "were planned" not in report(tmp_path / "run").read_text()
        made.event("finished", "finished", job="gpt")
    assert "From the first step of the job to the last, " in report(tmp_path / "run").read_text()


def test_a_job_has_one_colour_in_all_pictures(tmp_path):
    names = [f"trial-{place}" for place in range(10)]
    with Record.create(tmp_path / "run", config={}, plan={}, jobs=[job(name) for name in names]) as made:
        for name in ("trial-9", "trial-3", "trial-0"):
            for step in range(2):
                evaluation = {"evaluation": {"loss": 2.0}} if name == "trial-3" else {}
                timed = {} if name == "trial-0" else {"samples_per_s": 3.0, "seconds": 0.1}
                told = {"job": name, "step": step, "attempt": 0, "time": BEGIN + step, "loss": 1.0}
                made.step({**told, **timed, **evaluation})
    page = report(tmp_path / "run").read_text()
    plots = re.findall(r'<svg[^>]*class="plotted".*?</svg>', page, re.S)
    strokes = [re.findall(r'class="series" stroke="([^"]*)"', plot) for plot in plots]
    colours = [set(each) for each in strokes]
    losses, later, rates, last = colours
    assert losses == {"#0072b2", "#cc79a7"}  # trial-0, and trial-3 with its evaluation
    assert rates == {"#cc79a7"}
    assert later == last == {"#d55e00"}
    drawn = {name: place for place, name in re.findall(r'class="span (f\d+)"[^>]*data-name="([^"]*)"', page)}
    assert drawn == {"trial-0": "f0", "trial-3": "f3", "trial-9": "f9"}
