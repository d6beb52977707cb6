"""A run as it goes: lines, not too many, and a table that shows what there is."""

import io
import os
import pty
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from plait.engine.live import LINE_SECONDS, View, line
from plait.errors import UsageError

ROWS = [
    {"job": "gpt", "strategy": "data, 4 bits", "devices": ["a/0", "a/1"], "steps": 10},
    {"job": "small", "strategy": "spill", "devices": ["a/0"], "steps": None},
]


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def rendered(view, width=160):
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(view.table())
    return out.getvalue()


def test_a_line():
    row = {**ROWS[0], "step": 4, "loss": 1.23456, "samples_per_s": 31.4, "memory_bytes": 2**20, "bits": 4}
    assert line(row) == (
        "gpt: step 5/10, loss 1.235, 31.4 samples/s, memory 1.00 MiB, bits 4 (data, 4 bits on a/0 and 1 more)"
    )
    assert line({"job": "x", "step": 2, "wire_bytes": 2048}) == "x: step 3, 2.00 KiB sent a step"
    assert line({"job": "x", "step": 2, "loss": None}) == "x: step 3, loss not finite"
    assert line({"job": "x"}) == "x: "


def test_lines_about_a_job_are_apart_and_the_last_is_never_lost():
    said, clock = [], Clock()
    view = View(said.append, clock=clock)
    view.begin(ROWS)
    assert said == []
    for step in range(10):
        view.update("gpt", {"step": step, "loss": 1.0})
        clock.now_s += LINE_SECONDS / 4
    view.update("small", {"step": 0, "loss": 2.0})
    assert [text.split(",")[0] for text in said] == [
        "gpt: step 1/10", "gpt: step 5/10", "gpt: step 9/10", "small: step 1",
    ]  # fmt: skip
    view.end()
    assert [text.split(",")[0] for text in said[4:]] == ["gpt: step 10/10"]
    view.end()
    assert len(said) == 5


def test_what_is_done_for_a_job_is_shown_until_it_makes_a_step():
    said = []
    view = View(said.append, clock=Clock())
    view.begin(ROWS)
    assert "doing" not in rendered(view)
    for what in ("importing", "importing", "tracing the model"):
        view.doing("gpt", what)
    assert said == ["gpt: importing", "gpt: tracing the model"]
    assert "doing" in rendered(view)
    assert "tracing the model" in rendered(view)
    view.update("gpt", {"step": 0, "loss": 1.0})
    assert "tracing" not in rendered(view)
    view.doing("small", "importing")
    view.doing("small", "")  # as where it failed before its first step
    assert said[3:] == ["small: importing"]
    assert "doing" not in rendered(view)


def test_what_happens_to_a_job_is_said_after_its_last_step():
    said = []
    view = View(said.append, clock=Clock())
    view.begin(ROWS)
    for job in ("small", "gpt"):
        for step in range(2):
            view.update(job, {"step": step, "loss": 1.0})
    view.event("gpt: finished", {"gpt"})
    view.end()
    assert [text.split(",")[0] for text in said] == [
        "small: step 1", "gpt: step 1/10", "gpt: step 2/10", "gpt: finished", "small: step 2",
    ]  # fmt: skip


def test_an_evaluation_is_said_at_once_after_its_step_and_stays_in_the_table():
    said = []
    view = View(said.append, clock=Clock())
    view.begin(ROWS)
    for step in range(2):
        view.update("gpt", {"step": step, "loss": 1.0})
    view.update("gpt", {"step": 1, "evaluation": {"loss": 2.03125, "accuracy": None}})
    assert [text.partition(" (")[0] for text in said] == [
        "gpt: step 1/10, loss 1", "gpt: step 2/10, loss 1",
        "gpt: evaluated after step 2: loss 2.031, accuracy not finite",
    ]  # fmt: skip
    table = view.table()
    assert [column.header for column in table.columns][-1] == "evaluation"
    assert "loss 2.031, accuracy not finite" in [str(cell) for cell in table.columns[-1].cells]


def test_every_event_is_said_at_once():
    said = []
    view = View(said.append, clock=Clock())
    for place in range(5):
        view.event(f"gpt: restarted: {place}")
    view.event("a\x1b[31mred\x07 line\nand one more")
    assert said[:5] == [f"gpt: restarted: {place}" for place in range(5)]
    assert said[5] == "a\N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER} line\nand one more"


def test_a_job_that_nobody_announced_and_facts_without_a_step():
    said = []
    view = View(said.append, clock=Clock())
    view.update("trial-3", {"step": 0, "loss": 0.5, "evaluation": {"loss": 9.0}})
    view.update("trial-3", {"background_share": 0.25})
    view.end()
    assert said == ["trial-3: step 1, loss 0.5", "trial-3: step 1, loss 0.5, background 25%"]


def test_silence(capsys):
    with View(False) as view:
        view.begin(ROWS)
        view.update("gpt", {"step": 0})
        view.event("something")
    assert capsys.readouterr() == ("", "")


def test_lines_go_to_standard_error_where_it_is_no_terminal(capsys):
    with View() as view:
        view.begin(ROWS)
        view.update("gpt", {"step": 0, "loss": 1.0})
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gpt: step 1/10, loss 1 ")


def test_the_table_has_the_columns_that_rows_have():
    view = View(False)
    view.begin(ROWS)
    text = rendered(view)
    for word in ("gpt", "data, 4 bits", "a/0 and 1 more", "0/10", "small", "spill", "samples/s"):
        assert word in text
    for word in ("memory", "width", "background"):
        assert word not in text
    view.update("gpt", {"step": 4, "loss": 1.5, "memory_bytes": 2**30, "bits": 4, "k": 2, "width": 3})
    view.update("small", {"step": 0, "loss": None, "background_share": 0.5})
    text = rendered(view)
    for word in ("5/10", "1.5", "1.00 GiB", "not finite", "50%"):
        assert word in text
    heads = [cell.strip() for cell in text.splitlines()[1].strip("┃").split("┃")]
    assert heads[:6] == ["job", "strategy", "device", "step", "loss", "samples/s"]
    assert heads[6:] == ["memory", "bits", "k", "width", "background"]


def test_a_narrow_terminal_shows_whole_what_it_has_room_for():
    console = Console(width=64, record=True, file=io.StringIO(), force_terminal=True)
    view = View(console=console)
    view.begin(ROWS)
    found = {"memory_bytes": 2**30, "bits": 4, "k": 2, "width": 3, "wire_bytes": 2**20}
    view.update("gpt", {"step": 4, "loss": 1.5, "samples_per_s": 12345.0, **found})
    view.end()
    text = rendered(view, width=64)
    assert "…" not in text
    for word in ("gpt", "data, 4 bits", "5/10", "1.5", "12,345"):
        assert word in text
    assert "sent a step" not in text


def test_names_are_not_markup():
    view = View(False)
    view.begin([{"job": "[bold]x[/bold]", "strategy": "\x1b[2J"}])
    text = rendered(view)
    assert "[bold]x[/bold]" in text
    assert "\x1b" not in text


def test_more_jobs_than_lines_show_those_that_go_on():
    view = View(False)
    view.begin([{"job": f"job{place}", "steps": 2} for place in range(100)])
    for place in range(90):
        view.update(f"job{place}", {"step": 1})
    text = rendered(view)
    assert "job99" in text
    assert "and 81 more" in text


def test_what_cannot_be_shown():
    with pytest.raises(UsageError, match="show is 'loud'"):
        View("loud")


def test_a_table_on_a_console_with_threads_that_tell():
    out = io.StringIO()
    view = View(console=Console(file=out, force_terminal=True, width=120, height=30))
    view.begin(ROWS)

    def tell(job):
        for step in range(200):
            view.update(job, {"step": step, "loss": 1.0 / (step + 1)})
            if step % 50 == 0:
                view.event(f"{job} has come to {step}")

    threads = [threading.Thread(target=tell, args=(job,)) for job in ("gpt", "small")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    view.end()
    view.end()
    text = out.getvalue()
    for job in ("gpt", "small"):
        for step in (0, 50, 100, 150):
            assert f"{job} has come to {step}" in text
    assert "200/10" in text  # the last table


SCRIPT = """
from plait.engine.live import View
with View() as view:
    view.begin([{"job": "gpt", "strategy": "data", "devices": ["a/0"], "steps": 3}])
    for step in range(3):
        view.update("gpt", {"step": step, "loss": 1.0})
    view.event("gpt: finished: finished")
"""


def test_a_real_terminal_gets_the_table():
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"},
    )
    os.close(theirs)
    text = b""
    try:
        while part := os.read(ours, 4096):
            text += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0
    assert "│" in text.decode()
    assert "3/3" in text.decode()
    assert "gpt: finished: finished" in text.decode()
