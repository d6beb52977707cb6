"""The multiplexer for real: the test is the foreground, processes of a shell are the background."""

import os
import subprocess
import sys
import time

import pytest

from plait.burst import leftover
from plait.burst.controller import Control
from plait.burst.multiplex import Multiplexer, _Levels
from plait.burst.occupancy import with_idle
from plait.burst.phases import Phase, Publisher
from plait.burst.process import Work
from plait.errors import UsageError, WorkerError
from plait.timeline import Timeline

SPIN = ("sh", "-c", "while :; do :; done")
FOREGROUND = """
import time
from plait.burst.phases import Publisher
publisher = Publisher()
for step in range(10**6):
    publisher.begin_step(step)
    time.sleep(0.005)
"""
pytestmark = pytest.mark.usefixtures("published")


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def publisher(published):
    made = Publisher(device=1)
    yield made
    made.close()


def test_it_measures_then_runs_and_reports(publisher):
    timeline = Timeline()
    multiplexer = Multiplexer(control=Control(max_slowdown=50), timeline=timeline)
    # Not idle, or it would get nothing on a machine that is busy with other tests.
    works = [multiplexer.add(Work(command=SPIN, name=name, idle=False)) for name in ("one", "two")]
    seen = set()
    step = 0
    # Other load of the machine may make any single step ten times as long, so the bound is far off.
    until(lambda: all(work.seconds() > 0 for work in works))
    while (report := multiplexer.report(works[0])).slowdown is None or report.slowdown.steps < 20:
        publisher.begin_step(step)
        seen.add((report.level, works[0].paused, works[1].paused))
        time.sleep(0.01)
        publisher.phase(Phase.COLLECTIVE)
        time.sleep(0.01)
        step += 1
        assert step < 1000
    assert ("off", True, True) in seen
    assert ("always", False, False) in seen
    assert (report.preemptions, report.max_slowdown) == (0, 50)
    assert 19 < report.baseline_ms < 10_000  # a step sleeps for 20 ms, and nobody knows how long it waits
    assert 19 < report.slowdown.maximum * report.baseline_ms < 10_000
    assert 0 < report.paused < 1
    assert 0 < report.share < 1.2
    assert report.decisions[0].level == 5
    assert "times what it takes alone" in str(report)
    multiplexer.stop()
    for work in works:
        assert work.exit_code is not None
        assert leftover.members(work.label) == []
    with pytest.raises(UsageError, match="was stopped"):
        multiplexer.add(Work(command=SPIN, name="late"))
    drawn = with_idle(timeline)
    assert {"device1/foreground", "device1/background", "device1/idle"} == set(drawn.tracks)
    assert {span.name for span in drawn.spans if span.track == "device1/foreground"} >= {
        "compute",
        "collective",
    }


def test_steps_without_a_foreground_are_told_apart():
    multiplexer = Multiplexer()
    work = multiplexer.add(Work(command=(sys.executable, "-c", FOREGROUND), name="steps", idle=False))
    until(lambda: multiplexer.report(work).alone_steps > 0)
    assert multiplexer.report(work).steps == 0
    multiplexer.stop()


def test_what_slows_the_foreground_down_is_paused_while_it_computes(publisher):
    """It computes ten times as long while the background runs: of that, any machine can be sure."""
    multiplexer = Multiplexer(max_slowdown=1.5)
    work = multiplexer.add(Work(command=SPIN, name="spin", idle=False))
    ran = {Phase.COMPUTE: 0, Phase.COLLECTIVE: 0}
    step, tries = 0, 0
    until(lambda: work.seconds() > 0)
    while ran[Phase.COLLECTIVE] < 20:
        publisher.begin_step(step)
        time.sleep(0.01)  # a moment in which it can be paused
        gated = multiplexer.report(work).level == "not while computing"
        time.sleep(0.005 if work.paused else 0.2)
        ran[Phase.COMPUTE] += gated and not work.paused
        publisher.phase(Phase.COLLECTIVE)
        time.sleep(0.01)
        ran[Phase.COLLECTIVE] += gated and not work.paused
        step += 1
        tries += 1
        assert tries < 1000
    report = multiplexer.report(work)
    assert report.preemptions >= 1
    assert ran[Phase.COMPUTE] <= 10, "the loop may see the phase late on a busy machine, but not always"
    assert any("times what they take alone" in decision.reason for decision in report.decisions)
    multiplexer.stop()


@pytest.mark.parametrize("outlive", [True, False])
def test_a_foreground_that_is_killed(outlive, published):
    foreground = subprocess.Popen([sys.executable, "-c", FOREGROUND])
    multiplexer = Multiplexer(outlive=outlive, control=Control(max_slowdown=50))
    work = multiplexer.add(Work(command=SPIN, name="spin"))
    try:
        until(lambda: multiplexer.report(work).baseline_ms is not None)
    finally:
        foreground.kill()
        foreground.wait()
    if outlive:
        until(lambda: not list(published.glob("foreground-*")))
        until(lambda: not work.paused)
        before = work.seconds()
        until(lambda: work.seconds() > before)
        assert work.exit_code is None
    else:
        until(lambda: work.exit_code is not None)
    multiplexer.stop()
    assert leftover.members(work.label) == []
    assert not published.exists()


def test_one_that_cannot_be_ended_does_not_keep_the_others(monkeypatch):
    multiplexer = Multiplexer()
    works = [multiplexer.add(Work(command=SPIN, name=name)) for name in ("one", "two")]

    def fail(grace_seconds):
        raise WorkerError("the group cannot be removed")

    monkeypatch.setattr(works[0], "end", fail)
    with pytest.raises(WorkerError, match="the group cannot be removed"):
        multiplexer.stop()
    assert works[1].exit_code is not None
    monkeypatch.undo()
    works[0].end()
    assert works[0].exit_code is not None


def test_a_foreground_on_other_cores_is_none_of_its_business(publisher):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core only")
    work = Work(command=SPIN, name="spin", cores=(cores[-1],))
    multiplexer = Multiplexer()
    os.sched_setaffinity(0, cores[:1])
    try:
        publisher.begin_step(0)
        started = multiplexer.add(work)
        until(lambda: started.seconds() > 0)
        time.sleep(0.7)  # a second look for foreground processes
        assert multiplexer.report(started).seconds == 0
        assert not started.paused
    finally:
        os.sched_setaffinity(0, cores)
        multiplexer.stop()


def test_background_work_of_a_run_makes_room_for_that_run_alone(monkeypatch):
    publishers = []
    for run in ("other", "ours"):
        monkeypatch.setenv("PLAIT_RUN", run)
        publishers.append(Publisher())
    multiplexer = Multiplexer()
    try:
        multiplexer.add(Work(command=("sleep", "60"), name="sleep", idle=False))
        assert list(multiplexer._foregrounds) == [publishers[1].path]
    finally:
        multiplexer.stop()
        for each in publishers:
            each.close()


def test_which_level_was_in_force():
    levels = _Levels(5)
    begin = time.monotonic_ns()
    levels.change(0)
    between = time.monotonic_ns()
    levels.change(3)
    end = time.monotonic_ns()
    assert levels.now == 3
    assert levels.during(begin - 10, begin) == 5
    assert levels.during(begin, end) is None
    assert levels.during(between, end) is None
    assert levels.during(end, end + 1) == 3
