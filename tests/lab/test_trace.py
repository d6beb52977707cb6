from __future__ import annotations

import threading
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import FileError
from plait.lab import Trace
from plait.lab.trace import Follower, Step

TEXT = """
# the preempted network
0, 1gbit
2.5   500mbit      # half
4     100mbit  1
6     none     1
"""


def test_reads_lines_with_blanks_or_commas() -> None:
    assert Trace.parse(TEXT) == Trace(
        steps=(
            Step(seconds=0.0, rate_bytes_per_second=125e6),
            Step(seconds=2.5, rate_bytes_per_second=62.5e6),
            Step(seconds=4.0, rate_bytes_per_second=12.5e6, host=1),
            Step(seconds=6.0, rate_bytes_per_second=None, host=1),
        )
    )


def test_plays_once_or_for_ever() -> None:
    once = Trace.parse("0 1gbit\n1 2gbit")
    assert [step.seconds for step in once.play()] == [0.0, 1.0]
    again = Trace.parse("0 1gbit\n1 2gbit\n3 repeat")
    assert [step.seconds for step in islice(again.play(), 6)] == [0.0, 1.0, 3.0, 4.0, 6.0, 7.0]


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 100)), min_size=1, max_size=20),
    st.booleans(),
)
def test_time_never_goes_back(lines: list[tuple[int, int]], repeat: bool) -> None:
    ordered = sorted(lines)
    text = "".join(f"{tenths / 10} {rate}mbit\n" for tenths, rate in ordered)
    text += f"{ordered[-1][0] / 10 + 1} repeat" if repeat else ""
    seconds = [step.seconds for step in islice(Trace.parse(text).play(), 50)]
    assert seconds == sorted(seconds)
    assert len(seconds) == (50 if repeat else len(lines))


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("0 1gbit\n1 fast", 2, "'fast' is not a rate"),
        ("0 -1gbit", 1, "must be above zero"),
        ("0 0mbit", 1, "must be above zero"),
        ("\n\nsoon 1gbit", 3, "'soon' is not a number of seconds"),
        ("nan 1gbit", 1, "does not come after"),
        ("inf 1gbit", 1, "does not come after"),
        ("-1 1gbit", 1, "second -1 does not come after second 0"),
        ("5 1gbit\n4 1gbit", 2, "second 4 does not come after second 5"),
        ("0 1gbit two", 1, "'two' is not the number of a host"),
        ("0 1gbit -1", 1, "'-1' is not the number of a host"),
        ("0", 1, "1 fields"),
        ("0 1gbit 1 1", 1, "4 fields"),
        ("0 1gbit\n1 repeat\n2 1gbit", 3, "after `repeat`"),
        ("1 repeat", 1, "after the last change"),
        ("0 1gbit\n0 repeat", 2, "after the last change"),
        ("0 1bit", 1, "cannot run at '1bit'"),
    ],
)
def test_a_wrong_line_is_named(text: str, line: int, says: str) -> None:
    with pytest.raises(FileError) as caught:
        Trace.parse(text, name="rates.txt")
    assert f"rates.txt, line {line}: " in caught.value.what
    assert says in caught.value.what
    assert caught.value.setting == "trace"
    assert caught.value.works is not None
    Trace.parse(caught.value.works)


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(FileError, match="no line with a rate"):
        Trace.parse("# nothing\n\n")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="absent"):
        Trace.load(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileError, match="binary"):
        Trace.load(tmp_path / "binary")
    (tmp_path / "good").write_text("0 1gbit")
    assert Trace.load(tmp_path / "good").steps[0].rate_bytes_per_second == 125e6


def test_a_host_that_does_not_exist_is_refused() -> None:
    trace = Trace.parse("0 1gbit 3")
    trace.check_hosts(4)
    with pytest.raises(FileError, match=r"host 3 .* 3 hosts"):
        trace.check_hosts(3)


def test_follower_applies_every_step_in_order() -> None:
    seen: list[Step] = []
    done = threading.Event()

    def apply(step: Step) -> None:
        seen.append(step)
        if len(seen) == 5:
            done.set()

    follower = Follower(Trace.parse("0 1mbit\n0.01 2mbit\n0.12 repeat"), apply)
    assert done.wait(30)
    follower.stop()
    follower.check()
    assert [step.rate_bytes_per_second for step in seen[:5]] == [125e3, 250e3, 125e3, 250e3, 125e3]


def test_follower_keeps_what_ended_it() -> None:
    called = threading.Event()

    def apply(step: Step) -> None:
        called.set()
        raise OSError("no such link")

    follower = Follower(Trace.parse("0 1mbit"), apply)
    assert called.wait(30)
    follower.stop()
    with pytest.raises(OSError, match="no such link"):
        follower.check()
    follower.check()  # said once
