"""A run's page: what is on it, whatever a run has left behind, and tried in a real browser."""

import math
import re
from html import escape
from pathlib import Path

import pytest
from made_runs import BEGIN, create, job, planned, row

from browser import WHY_NOT, Browser, contrast, installed
from plait.engine.record import Record
from plait.engine.report import report
from plait.engine.result import JobResult
from plait.engine.task import Task
from plait.engine.timelines import devices
from plait.engine.timelines import planned as planned_timeline
from plait.engine.trials import save_trials
from plait.errors import FileError
from plait.timeline import Span, Timeline


@pytest.fixture
def full(tmp_path):
    """A run in which all sorts of things happened."""
    config = {"strategy": "auto", "compress": 4, "engine": "local", "command": ["plait", "run", "my jobs.py"]}
    with create(tmp_path / "first", "gpt", "small", config=config) as made:
        made.event("planned", "side by side: 2 jobs end after 1 s", time=BEGIN)
        made.event("started", "on 2 devices", job="gpt", time=BEGIN)
        for step in range(6):
            made.step(row("gpt", step, wire_bytes=1 << 20, memory_bytes=3 << 20, bits=4))
        made.event("failed", "worker 1 was killed by signal 9", job="gpt", time=BEGIN + 0.7, rank=1)
        made.event("restarted", "from step 4", job="gpt", time=BEGIN + 1.0)
        for step in range(4, 10):
            loss = math.nan if step == 7 else None
            made.step(
                row("gpt", step, attempt=1, loss=loss, at_s=BEGIN + 1.2 + step / 10, wire_bytes=1 << 20)
            )
        made.step({"job": "gpt", "step": 9, "attempt": 1, "time": BEGIN + 2.2, "evaluation": {"loss": 0.3}})
        made.event("decision", "2 bits: the wire is slow", job="gpt", time=BEGIN + 1.5, bits=2)
        made.event("finished", "after 1 restart", job="gpt", time=BEGIN + 2.3)
        JobResult(name="gpt", end="finished", strategy="data", losses=(1.0,) * 10).save(made.folder("gpt"))
    return tmp_path / "first"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if installed() is None:
        pytest.skip(WHY_NOT)
    made = Browser(tmp_path_factory.mktemp("browser"))
    yield made
    made.close()


def cells(page, head):
    """The rows of the table that has this column, as text."""
    for table in re.findall(r"<table>.*?</table>", page, re.S):
        if f">{head}<" in table:
            rows = table.split("<tbody>")[1].split("<tr")[1:]
            return [[c.strip() for c in re.findall(r"<td[^>]*>([^<]*)", found)] for found in rows]
    raise AssertionError(f"no table with {head}")


def test_what_is_on_the_page(full):
    path = report(full)
    assert path == full / "report.html"
    page = path.read_text()
    heads = re.findall(r"<h2>([^<]*)</h2>", page)
    assert heads == [
        "What ran",
        "Losses",
        "Throughput",
        "Predicted and measured",
        "Over time",
        "Bytes",
        "Decisions, and why",
        "Failures and restarts",
        "What else happened",
        "Environment",
        "How to repeat it",
    ]
    assert "2 jobs (1 finished, 1 not begun)" in page
    plan = Record.read(full).plan
    assert escape(plan["why"]) in page
    for name, compared in plan["jobs"].items():  # each has half of what it is compared on
        where = planned("gpt", "small").placement(name)
        said = (
            f"{name}: {where.option.name} on 2 devices, beside others, {where.option.step_ms:.4g} ms a step"
        )
        assert escape(f"{said}; alone on all: {compared['why']}") in page
    assert "plait run &#x27;my jobs.py&#x27;" in page
    assert "strategy=&#x27;auto&#x27;, compress=4)" in page
    assert f"plait run --resume {full}" in page
    assert not list(full.glob("*.partial"))


def test_the_title_and_how_long_it_took(full):
    page = report(full).read_text()
    assert "<h1>Run of gpt, small</h1>" in page
    assert f"in {full}, begun 2023-11-14 22:13:20 UTC; last heard of after 2.3 s.</p>" in page
    JobResult(name="small", end="stopped", strategy="data").save(made_folder(full, "jobs", "small"))
    assert "UTC; it took 2.3 s.</p>" in report(full).read_text()


def test_facts_have_a_column_where_there_are_any(tmp_path):
    with create(tmp_path / "run", "gpt") as made:
        made.event("decision", "2 bits")
        made.event("failed", "rank 1 is gone", rank=1)
    page = report(tmp_path / "run").read_text()
    assert page.count("<th>facts") == 1


def test_what_jobs_that_spill_read_and_wrote(tmp_path):
    told = {
        "memory_bytes": 3 << 20, "disk_bytes": 4 << 20, "read_bytes": 5 << 20, "written_bytes": 6 << 20,
        "busy_seconds": 1.0, "seconds": 2.0,
    }  # fmt: skip
    facts = {"foretold": told, "measured": told | {"read_bytes": 7 << 20}}
    jobs = [job("a"), job("b")]
    with Record.create(tmp_path / "run", config={}, plan={}, jobs=jobs) as made:
        its = tuple(one.to_json() for one in jobs)
        task = Task(name="turns", kind="spill", strategy="spill", jobs=its, devices=("x",))
        task.save(made.task_folder("turns"))
        for name in "ab":
            JobResult(name=name, end="finished", strategy="spill", facts=facts).save(made.folder(name))
    found = cells(report(tmp_path / "run").read_text(), "foretold")
    assert [one for one in found if one[1] == "read"] == [["turns", "read", "5.00 MiB", "7.00 MiB"]]
    assert [one[2] for one in found if one[1] == "peak memory"] == ["3.00 MiB"]


def test_what_ran_and_how_it_went(full):
    page = report(full).read_text()
    made = planned("gpt", "small")
    gpt, small = cells(page, "restarts")
    where = made.placement("gpt")
    assert gpt == [
        "gpt",
        "foreground",
        where.option.name,
        ", ".join(where.devices),
        "10 of 10",
        "0.4",
        "1",
        "finished",
    ]
    assert small[4:] == ["0 of 10", "—", "0", "not begun"]
    assert "1 loss was not finite" in page


def test_predicted_against_measured(full):
    page = report(full).read_text()
    planned_ms = planned("gpt", "small").placement("gpt").option.step_ms
    gpt, small = cells(page, "measured / planned")
    assert gpt[2:] == [f"{planned_ms:.4g}", "100", f"{100 / planned_ms:.4g}", "10"]
    assert small[3:] == ["—", "—", "0"]
    (rate,) = cells(page, "samples/s")
    assert rate == ["gpt", "160", "10 of 10"]


def test_bytes_and_events(full):
    page = report(full).read_text()
    (sent,) = cells(page, "sent a step")
    assert sent[0] == "gpt"
    assert sent[1] == "1.00 MiB"
    assert sent[3:] == ["10.00 MiB", "3.00 MiB"]
    part = page[page.index("Decisions, and why") : page.index("Failures and restarts")]
    assert "2 bits: the wire is slow" in part
    assert "bits=2" in part
    part = page[page.index("Failures and restarts") : page.index("What else")]
    assert [found[1] for found in cells(part, "why")] == ["failed", "restarted"]
    assert "rank=1" in part
    assert "killed by signal 9" in part


def test_the_page_in_a_browser(full, browser, tmp_path):
    browser.open(report(full))
    assert browser.errors == []
    assert [url.split(":")[0] for url in browser.requests] == ["file"]
    titles = browser.eval("[...document.querySelectorAll('svg.plotted .head')].map(t => t.textContent)")
    assert titles == ["Loss", "Throughput", "Sent a step"]
    curves = browser.eval(
        "[...document.querySelectorAll('svg.plotted')].map(p => p.querySelectorAll('.series[d^=M]').length)"
    )
    assert curves == [4, 2, 2]  # each, and its name below
    _, _, width, height = browser.box("svg.plotted .series")
    assert width > 100
    assert height > 20
    told = browser.eval("[...document.querySelectorAll('svg.plotted title')].map(t => t.textContent)")
    assert "gpt: 4 at 0" in told
    assert "gpt, evaluated: 0.3 at 9" in told
    assert browser.eval("document.querySelector('caption').textContent") == "Evaluations"
    panels = browser.eval("[...document.querySelectorAll('.timeline .title')].map(t => t.textContent)")
    assert [panel.split(":")[0] for panel in panels] == ["planned", "measured"]


def test_zoom_and_hover_in_a_browser(full, browser):
    browser.open(report(full))
    browser.eval("document.querySelector('svg.timeline').scrollIntoView()")
    x, y, width, height = browser.box(".span")
    browser.mouse("Moved", x + width / 2, y + height / 2)
    tip = browser.eval("document.querySelector('.tip').innerText")
    assert tip.startswith(("gpt: ", "small: "))
    assert browser.eval("getComputedStyle(document.querySelector('.tip')).display") == "block"
    browser.mouse("Wheel", x + width / 2, y + height / 2, deltaX=0, deltaY=-300)
    assert browser.eval("document.querySelector('.scaled').getAttribute('transform')").startswith("scale(2.7")
    for clicks in (1, 2):
        for kind in ("Pressed", "Released"):
            browser.mouse(kind, x + width / 2, y + height / 2, clickCount=clicks)
    assert browser.eval("document.querySelector('.scaled').getAttribute('transform')").startswith("scale(1 ")
    assert browser.errors == []
    assert [url.split(":")[0] for url in browser.requests] == ["file"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_can_be_read_on_light_and_on_dark(full, browser, scheme):
    browser.prefer(scheme)
    browser.open(report(full))

    def colour(selector, what):
        return browser.eval(f"getComputedStyle(document.querySelector({selector!r})).{what}")

    ground = colour("body", "backgroundColor")
    assert (contrast(ground, "rgb(255, 255, 255)") < 1.1) == (scheme == "light")
    for selector in ("p", "td", "th", "pre", "caption"):
        assert contrast(ground, colour(selector, "color")) >= 7
    assert contrast(ground, colour("svg.plotted .back", "fill")) == 1
    assert contrast(ground, colour("svg.plotted text", "fill")) >= 7
    assert contrast(ground, colour("svg.plotted .series", "stroke")) >= 3
    browser.prefer("")


def test_odd_names_are_words_not_code(browser, tmp_path):
    bad = '<img src=x onerror="window.bad=1"></script><script>window.bad=1</script>\x01 ∞'
    with Record.create(
        tmp_path / "run",
        config={"command": [bad], bad: bad},
        plan={"why": bad, "remarks": [bad]},
        jobs=[job("gpt")],
    ) as made:
        for step in range(3):
            made.step(row(bad, step, device=bad))
        made.event("decision", bad, job=bad, fact=bad, time=BEGIN)
        made.event(bad, bad, time=BEGIN)
    browser.open(report(tmp_path / "run"))
    assert browser.errors == []
    assert browser.eval("window.bad") is None
    assert browser.eval("document.images.length") == 0
    assert browser.eval("document.body.innerText.includes('onerror')")
    assert browser.eval("[...document.querySelectorAll('svg.plotted')].length") == 2


def test_a_run_of_which_nothing_is_known_yet(tmp_path):
    create(tmp_path / "run", "gpt").close()
    page = report(tmp_path / "run").read_text()
    assert "1 job (1 not begun)" in page
    assert "Nothing to draw was recorded." in page
    assert "planned: " in page  # the plan's timeline


def test_no_plan_and_no_jobs(tmp_path):
    Record.create(tmp_path / "run", config={}, plan={}, jobs=[]).close()
    page = report(tmp_path / "run").read_text()
    assert "The plan does not say." in page
    assert "Nothing was planned, and nothing has happened." in page


def made_folder(*parts):
    folder = Path(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_files_that_are_damaged_are_told_and_the_rest_is_shown(full):
    (full / "plan.json").write_text("{")
    (full / "environment.json").unlink()
    Task(name="gpt", kind="train", strategy="data", jobs=(job("gpt").to_json(),), devices=("x",)).save(
        made_folder(full, "tasks", "gpt")
    )
    (full / "tasks" / "gpt" / "timeline-0-0.json").write_text('{"format": "other"}')
    (full / "jobs" / "gpt" / "result.json").write_text("[]")
    with (full / "metrics.jsonl").open("ab") as file:
        file.write(b'{"job":"gpt","step":1')
    page = report(full).read_text()
    assert page.count("Not all could be read") == 4
    assert "gpt: 4 at 0" in page
    assert "measured: " in page


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


@pytest.mark.parametrize(
    ("placed", "why"),
    [
        ({"how": "foreground", "option": "burst", "devices": ["a", "b"]}, "burst wins"),
        (
            {"how": "foreground", "option": "data", "devices": ["a"], "step_ms": 12.34567},
            "data on 1 device, beside others, 12.35 ms a step; alone on all: burst wins",
        ),
        (
            {"how": "background", "option": "data", "devices": ["a"], "step_ms": 5, "done": 0.29},
            "it is in the background, and gets what is idle on a (a step takes 5 ms of that), "
            "29% of its steps by when the foreground ends, counted from when both have started",
        ),
        (
            {"how": "alternated", "option": "spill", "devices": ["a", "b"], "step_ms": 5},
            "it takes turns with others on 2 devices, 5 ms a step by itself",
        ),
    ],
)
def test_why_a_job_runs_as_it_does(tmp_path, placed, why):
    options = [{"name": "burst", "devices": 2}, {"name": "data", "devices": 2}]
    plan = {
        "why": "all of it",
        "ways": [{"placements": [{"job": "gpt", **placed}]}],
        "jobs": {"gpt": {"chosen": "burst", "why": "burst wins", "options": options}},
    }
    Record.create(tmp_path / "run", config={}, plan=plan, jobs=[job("gpt")]).close()
    page = report(tmp_path / "run").read_text()
    assert f"<p>gpt: {escape(why)}.</p>" in page


def test_trials_of_a_sweep_have_their_settings_and_what_they_are_made_from_is_no_job(tmp_path):
    with Record.create(
        tmp_path / "run", config={}, plan={}, jobs=[job("gpt"), job("swept", steps=4)]
    ) as made:
        folder = made.task_folder("swept-sweep")
        Task(
            name="swept-sweep",
            kind="search",
            strategy="spill",
            jobs=(job("swept").to_json(),),
            devices=("a/0", "a/1"),
        ).save(folder)
        save_trials(folder, {"swept-10": {"lr": 0.1, "model": object}, "swept-2": {"lr": 0.2}})
        made.event("started", "on 2 devices", job="swept-sweep")
        made.event("restarted", "from the last commit", job="swept-sweep")
        for name in ("swept-10", "swept-2"):
            made.step(row(name, 1))
    page = report(tmp_path / "run").read_text()
    gpt, second, tenth = cells(page, "settings")
    assert gpt[0] == "gpt"
    assert second == ["swept-2", "trial", "spill", "a/0, a/1", "2 of 4", "2", "1", "not ended", "lr 0.2"]
    assert tenth[0] == "swept-10"
    assert tenth[-1] == escape("lr 0.1, model <class 'object'>")
    shown = f"[job for job in Record.read({str(tmp_path / 'run')!r}).jobs if job.name in ['gpt']]"
    assert escape(f"plait.run({shown})") in page
    (folder / "trials.json").write_text("{}")
    assert "field &#x27;format&#x27; is None" in report(tmp_path / "run").read_text()


def test_a_sweep_beside_jobs_is_said_to_be_no_part_of_the_comparison(tmp_path):
    with create(tmp_path / "run", "gpt") as made:
        Task(
            name="swept-sweep",
            kind="search",
            strategy="spill",
            jobs=(job("swept").to_json(),),
            devices=("a/0",),
            priority="background",
        ).save(made.task_folder("swept-sweep"))
    assert (
        escape(
            "swept-sweep: a sweep is no part of the plan's times and comparisons; "
            "its trials take turns on a/0, in the background."
        )
        in report(tmp_path / "run").read_text()
    )


def test_evaluations_are_told_in_numbers(tmp_path):
    with create(tmp_path / "run", "gpt") as made:
        for step in range(50):
            found = {"loss": 1 / (step + 1), **({"accuracy": 0.5} if step > 40 else {})}
            made.step({"job": "gpt", "step": step, "attempt": 0, "time": BEGIN + step, "evaluation": found})
    page = report(tmp_path / "run").read_text()
    assert "<caption>The last 40 of 50 evaluations</caption>" in page
    rows = cells(page, "after steps")
    assert rows[0] == ["gpt", "11", "0.09091", "—"]
    assert rows[-1] == ["gpt", "50", "0.02", "0.5"]


def test_many_steps_make_no_large_page(tmp_path):
    with create(tmp_path / "run", "gpt") as made:
        for step in range(6000):
            made.step(row("gpt", step, seconds=0.01))
    path = report(tmp_path / "run")
    page = path.read_text()
    assert "Loss, means of up to 30 steps" in page
    assert "steps=0 to 5999" in page
    assert path.stat().st_size < 500_000


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


def test_jobs_of_a_task_share_its_fate(tmp_path):
    with Record.create(tmp_path / "run", config={}, plan={}, jobs=[job("a"), job("b")]) as made:
        task = Task(
            name="turns",
            kind="spill",
            strategy="spill",
            jobs=(job("a").to_json(), job("b").to_json()),
            devices=("x",),
        )
        task.save(made.task_folder("turns"))
        made.event("started", "on 1 device", job="turns")
        made.event("restarted", "from the last commit", job="turns")
        made.step(row("a", 0))
    found = cells(report(tmp_path / "run").read_text(), "restarts")
    assert [(one[0], *one[-2:]) for one in found] == [("a", "1", "not ended"), ("b", "1", "not ended")]


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


def test_being_asked_to_stop_is_no_failure(tmp_path):
    with create(tmp_path / "run", "gpt") as made:
        made.event("stopping", "asked to stop: jobs end at a checkpoint")
        made.event("stopped", "stopped", job="gpt")
    page = report(tmp_path / "run").read_text()
    failures, asked = page.index(">Failures and restarts<"), page.index(">Stopped by the user ")
    assert "<p>None.</p>" in page[failures:asked]
    assert page.count("asked to stop: ") == 2  # the table, and the mark in the timeline
    assert page.rindex("asked to stop: ") > asked
    assert "What else happened" not in page


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


def test_a_directory_that_holds_no_run(tmp_path):
    with pytest.raises(FileError, match=r"holds no run"):
        report(tmp_path)


def test_the_jobs_can_be_read_back_to_repeat_the_run(full):
    again = Record.read(full).jobs
    assert [one.digest for one in again] == [job(name).digest for name in ("gpt", "small")]
