"""The run directory: made once, written by one, read by anyone, and whole after every crash."""

import json
import math
import os
import subprocess
import sys

import pytest
from made_runs import create, job, row

from plait.engine.record import KINDS, Record, file_name, latest
from plait.errors import FileError, UsageError
from plait.evaluation import Evaluated


def test_a_run_is_made_written_and_read_again(tmp_path):
    with create(
        tmp_path / "runs" / "first", "gpt", "small", config={"strategy": "auto", "odd": math.inf}
    ) as made:
        made.event("planned", "side by side", devices=["a", "b"])
        made.event("started", "on 2 devices", job="gpt")
        assert made.step(row("gpt", 0, bits=4))
        assert made.folder("gpt").is_dir()
        assert made.task_folder("gpt and small").is_dir()
    again = Record.read(tmp_path / "runs" / "first")
    assert again.name == "first"
    assert again.config == {"strategy": "auto", "odd": None}
    assert [one.name for one in again.jobs] == ["gpt", "small"]
    assert again.jobs[0].to_json() == job("gpt").to_json()
    assert again.asked["small"]["batch"] == 16
    assert again.plan["format"] == "plait.workload/1"
    assert again.plan["ways"][0]["placements"]
    assert again.environment["torch"]
    assert again.rows() == {"gpt": [row("gpt", 0, bits=4)]}
    assert [(event["kind"], event.get("job"), event["text"]) for event in again.events()] == [
        ("planned", None, "side by side"),
        ("started", "gpt", "on 2 devices"),
    ]
    assert again.events()[0]["devices"] == ["a", "b"]
    assert {event["kind"] for event in again.events()} <= set(KINDS)


def test_a_step_without_a_time_gets_one(tmp_path):
    with create(tmp_path / "run", "gpt") as made:
        made.step({"job": "gpt", "step": 0})
        (only,) = made.history()
    assert only["time"] == pytest.approx(made.created, abs=60)


def test_steps_that_nobody_told_of_are_added(tmp_path):
    with create(tmp_path / "run", "gpt", "small") as made:
        for step, attempt in ((0, 0), (2, 1)):
            made.step(row("gpt", step, attempt=attempt, loss=float(step)))
        made.complete("gpt", [0.0, 1.5, 2.0])
        made.complete("small", [])
        found = made.rows()
        assert [(one["step"], one["loss"]) for one in found["gpt"]] == [(0, 0.0), (1, 1.5), (2, 2.0)]
        assert [one["attempt"] for one in made.history()] == [0, 1, 1]
        assert "small" not in found


def test_losses_that_are_not_finite_are_null(tmp_path):
    with create(tmp_path / "run", "gpt") as made:
        made.step(row("gpt", 0, loss=math.nan))
        made.step(row("gpt", 1, loss=math.inf, norm=-math.inf))
        found = made.rows()["gpt"]
    assert [one["loss"] for one in found] == [None, None]
    assert found[1]["norm"] is None
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))


def test_of_a_step_that_was_taken_again_the_last_counts(tmp_path):
    with create(tmp_path / "run", "gpt", "small") as made:
        for step in range(4):
            made.step(row("gpt", step, loss=1.0))
        made.step(row("small", 0))
        for step in range(2, 6):
            made.step(row("gpt", step, attempt=1, loss=2.0))
        assert not made.step(row("gpt", 4, loss=9.0))  # what the worker of attempt 0 had sent meanwhile
        assert made.step(row("small", 1))  # the other job's attempts are its own
        found = made.rows()
        assert len(made.history()) == 4 + 1 + 4 + 1
    assert [(one["step"], one["loss"]) for one in found["gpt"]] == [
        (0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0), (5, 2.0),
    ]  # fmt: skip
    assert [one["step"] for one in found["small"]] == [0, 1]


def test_a_resumed_run_counts_attempts_anew(tmp_path):
    with create(tmp_path / "run", "gpt") as made:
        made.step(row("gpt", 0, attempt=3, loss=1.0))
        made.step(row("gpt", 1, attempt=3, loss=1.0))
    with Record.open(tmp_path / "run") as again:
        assert again.step(row("gpt", 1, attempt=0, loss=2.0))
        assert [one["loss"] for one in again.rows()["gpt"]] == [1.0, 2.0]


def test_so_are_evaluations(tmp_path):
    judged = [Evaluated(step=step, loss=step / 4, metrics={"right": 1.0}) for step in (1, 2)]
    with create(tmp_path / "run", "gpt") as record:
        record.step({"job": "gpt", "step": 0, "attempt": 2, "loss": 1.0})
        record.step({"job": "gpt", "step": 0, "attempt": 2, "evaluation": judged[0].figures})
        record.complete("gpt", (1.0, 0.5), judged)
        found = [(one["step"], one.get("loss"), one.get("evaluation")) for one in record.history()]
    assert found[2:] == [(1, 0.5, None), (1, None, {"loss": 0.5, "right": 1.0})]


def test_evaluations_are_apart_from_steps(tmp_path):
    with create(tmp_path / "run", "gpt") as made:
        for step in range(4):
            made.step(row("gpt", step))
        made.step({"job": "gpt", "step": 1, "attempt": 0, "evaluation": {"loss": 0.5}})
        made.step({**row("gpt", 3), "evaluation": {"loss": 0.25}})
        assert [one["step"] for one in made.rows()["gpt"]] == [0, 1, 2, 3]
        judged = made.evaluations()["gpt"]
    assert [(one["step"], one["evaluation"]["loss"]) for one in judged] == [(1, 0.5), (3, 0.25)]


def test_latest_of_nothing():
    assert latest([]) == {}
    assert latest([{"job": "a", "step": 0, "evaluation": {}}]) == {}


@pytest.mark.parametrize(
    "torn", [b'{"time":1,"job":"gpt","st', b'{"job":"gpt","step":true}\n', b"\0\0\0", b'{"step":1}\n']
)
def test_a_torn_line_is_ignored_and_does_not_swallow_the_next(tmp_path, torn):
    with create(tmp_path / "run", "gpt") as made:
        made.step(row("gpt", 0))
        made.event("started", "once", job="gpt")
    for name in ("metrics.jsonl", "events.jsonl"):
        with (tmp_path / "run" / name).open("ab") as file:
            file.write(torn)
    with Record.open(tmp_path / "run") as again:
        again.step(row("gpt", 1))
        again.event("finished", "then", job="gpt")
        assert [one["step"] for one in again.rows()["gpt"]] == [0, 1]
        assert [event["kind"] for event in again.events()] == ["started", "finished"]


def test_a_directory_with_a_run_is_refused(tmp_path):
    create(tmp_path / "run", "gpt").close()
    with pytest.raises(FileError, match=r"holds a run already: it has config.json.*resume"):
        create(tmp_path / "run", "gpt")
    Record.open(tmp_path / "run").close()  # the refusal left nothing locked


def test_what_was_not_made_to_the_end_is_no_run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").write_text("{}")
    with pytest.raises(FileError, match=r"holds no run: it has no config.json.*plait run"):
        Record.open(tmp_path / "run")
    create(tmp_path / "run", "gpt").close()


def test_a_second_engine_is_refused_by_name_and_readers_are_not(tmp_path):
    with create(tmp_path / "run", "gpt") as made:
        made.step(row("gpt", 0))
        code = "import sys\nfrom plait.engine.record import Record\n"
        code += "print(len(Record.read(sys.argv[1]).rows()['gpt']))\n"
        code += "try:\n  Record.open(sys.argv[1])\nexcept ValueError as error:\n  print(error)"
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, check=True
        )
        rows, error = done.stdout.splitlines()
        assert rows == "1"
        assert f"is in use by process {os.getpid()}" in error
        with pytest.raises(UsageError, match=f"in use by process {os.getpid()}"):
            Record.open(tmp_path / "run")
        with pytest.raises(UsageError, match="in use"):
            create(tmp_path / "run", "gpt")
    Record.open(tmp_path / "run").close()


def test_the_lock_of_an_engine_that_was_killed_is_free(tmp_path):
    create(tmp_path / "run", "gpt").close()
    code = "import os, sys\nfrom plait.engine.record import Record\n"
    code += "record = Record.open(sys.argv[1])\nrecord.event('started', 'x')\nos.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=False)
    assert done.returncode == -9
    with Record.open(tmp_path / "run") as again:
        assert again.events()[-1]["kind"] == "started"


def test_a_changed_environment_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    create(tmp_path / "run", "gpt").close()
    with Record.open(tmp_path / "run") as same:
        assert same.events() == []
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with Record.open(tmp_path / "run") as other:
        (told,) = other.events()
        assert told["kind"] == "resumed"
        assert "OMP_NUM_THREADS 1, now 2" in told["text"]
        assert other.environment["variables"]["OMP_NUM_THREADS"] == "2"


def test_no_secret_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("PLAIT_ENGINE_TOKEN", "a-secret-of-mine")
    create(tmp_path / "run", "gpt").close()
    for file in (tmp_path / "run").rglob("*.json*"):
        assert "a-secret-of-mine" not in file.read_text()


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("gpt-small.2", "gpt-small.2"),
        ("a/b", "a%2Fb"),
        ("..", "%2E."),
        (".hidden", "%2Ehidden"),
        ("größe", "gr%C3%B6%C3%9Fe"),
        ("a\0b\n", "a%00b%0A"),
        ("50%", "50%25"),
    ],
)
def test_odd_names_stay_within_the_directory(tmp_path, name, called):
    assert file_name(name) == called
    with create(tmp_path / "run", "gpt") as made:
        assert made.folder(name) == tmp_path / "run" / "jobs" / called
        assert made.task_folder(name).is_dir()
        made.step(row(name, 0))
        assert list(made.rows()) == [name]


@pytest.mark.parametrize("name", ["", "x" * 201, "ß" * 50])
def test_names_that_no_folder_can_have(name):
    with pytest.raises(UsageError, match=r"cannot be called .*1 to 200 characters"):
        file_name(name)


@pytest.mark.parametrize("bad", [{"job": 3}, {"step": "1"}, {"step": True}, {"attempt": None}])
def test_rows_that_cannot_be_meant(tmp_path, bad):
    with create(tmp_path / "run", "gpt") as made, pytest.raises(UsageError, match="a row with job"):
        made.step({**row("gpt", 0), **bad})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "is no object"),
        ('{"format": "other/1"}', r"format.*plait.run/1"),
        ('{"format": "plait.run/1", "config": {}, "created": 1.0}', "'jobs' is missing"),
    ],
)
def test_a_damaged_config_is_named(tmp_path, text, message):
    create(tmp_path / "run", "gpt").close()
    (tmp_path / "run" / "config.json").write_text(text)
    with pytest.raises(FileError, match=message):
        Record.read(tmp_path / "run")


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot be written"):
        create(tmp_path / "file" / "run", "gpt")


def test_a_run_whose_directory_cannot_be_written_is_not_gone_on_with(tmp_path):
    with create(tmp_path / "run", "gpt"):
        pass
    (tmp_path / "run" / "lock").mkdir()  # as on a disk that may only be read; root may write everywhere else
    with pytest.raises(FileError, match="cannot be written"):
        Record.open(tmp_path / "run")
