"""A run's page: what is on it, whatever a run has left behind, and tried in a real browser."""

import re
from html import escape

import pytest
from made_runs import BEGIN, create, full_run, job, made_folder, planned, row

from plait.engine.record import Record
from plait.engine.report import report
from plait.engine.result import JobResult
from plait.engine.task import Task
from plait.engine.trials import save_trials
from plait.errors import FileError


@pytest.fixture
def full(tmp_path):
    return full_run(tmp_path / "first")


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


def test_a_directory_that_holds_no_run(tmp_path):
    with pytest.raises(FileError, match=r"holds no run"):
        report(tmp_path)


def test_the_jobs_can_be_read_back_to_repeat_the_run(full):
    again = Record.read(full).jobs
    assert [one.digest for one in again] == [job(name).digest for name in ("gpt", "small")]
