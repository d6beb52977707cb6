"""Progress: lines that are few, and a table that fits the terminal."""

import io

from rich.console import Console

from plait.spill.progress import Lines, LiveTable, Row, progress


def row(name, step, state="device 0", loss=0.5):
    return Row(name=name, state=state, step=step, steps=10, loss=loss, seconds_left=1.5 * (10 - step))


def test_lines_come_at_the_end_of_a_job_and_now_and_then():
    lines, now = [], [0.0]
    shown = Lines(lines.append, clock=lambda: now[0])
    for step in range(10):
        shown.update(row("a", step))
        now[0] += 4.0
    shown.update(row("a", 10, "finished"))
    shown.update(row("a", 10, "finished"))
    shown.say("done")
    assert lines == [
        "a: 3 of 10 steps, device 0, loss 0.5, 10.5 s of computing left",
        "a: 6 of 10 steps, device 0, loss 0.5, 6 s of computing left",
        "a: 9 of 10 steps, device 0, loss 0.5, 1.5 s of computing left",
        "a: 10 of 10 steps, finished, loss 0.5",
        "done",
    ]


def test_a_live_table_shows_every_job_while_there_is_room():
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=12)
    with LiveTable(console) as table:
        for i in range(20):
            table.update(row(f"job-{i}", i % 10, "finished" if i < 10 else "waiting", loss=None))
        table.say("[plain] text")
    text = console.file.getvalue()
    assert "job-19" not in text  # no more than the terminal holds
    assert "job-10" in text  # those that run come first
    assert "and 14 more" in text
    assert "[plain] text" in text


def test_what_a_user_asks_for(capsys):
    lines = []
    with progress(lines.append) as shown:
        shown.say("to a function")
    with progress(False) as shown:
        shown.say("nothing")
    with progress(None) as shown:
        shown.say("to standard error")
    assert lines == ["to a function"]
    assert capsys.readouterr() == ("", "to standard error\n")
