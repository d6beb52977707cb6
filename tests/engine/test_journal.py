"""Lines of JSON: whole or skipped, whatever cut them short."""

import json
import math
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.engine.journal import Journal, lines, plain
from plait.errors import FileError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=50)
@given(rows=st.lists(st.dictionaries(st.text(), JSON, max_size=4), max_size=5), cut=st.integers(0, 40))
def test_a_file_cut_anywhere_keeps_the_lines_before_and_those_that_follow(rows, cut, tmp_path_factory):
    path = tmp_path_factory.mktemp("journal") / "rows.jsonl"
    journal = Journal(path)
    for row in rows:
        journal.add(row)
    journal.close()
    assert list(lines(path)) == rows
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - cut] if cut < len(whole) else b"")
    kept = path.read_bytes().count(b"\n")
    again = Journal(path)
    again.add({"next": 1})
    again.close()
    found = list(lines(path))
    assert found[:kept] == rows[:kept]
    assert found[-1] == {"next": 1}
    assert len(found) <= kept + 2  # what was cut by its newline alone is whole


def test_what_is_no_row_is_skipped(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a":1}\n[1]\n\n\xff\xfe\n{"b":\n' + b"[" * 100_000 + b'\n\0\0\0\n{"c":NaN}\n{"d":2}')
    assert list(lines(path)) == [{"a": 1}, {"c": None}, {"d": 2}]
    assert list(lines(tmp_path / "none")) == []


def test_lines_of_threads_stay_whole(tmp_path):
    journal = Journal(tmp_path / "rows.jsonl")

    def add(which):
        for i in range(200):
            journal.add({"which": which, "i": i, "text": "x" * 100})

    threads = [threading.Thread(target=add, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    found = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for which in range(4):
        assert [row["i"] for row in found if row["which"] == which] == list(range(200))


def test_plain_data():
    odd = {1: math.nan, "b": (math.inf, -1.5), "c": np.float32(0.5), "d": np.int64(3), "e": {"f"}, "g": b"x"}
    assert plain(odd) == {"1": None, "b": [None, -1.5], "c": 0.5, "d": 3, "e": ["f"], "g": "b'x'"}
    assert plain(True) is True


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(FileError, match="No such file"):
        Journal(tmp_path / "none" / "rows.jsonl")
    journal = Journal(tmp_path / "rows.jsonl")
    journal.close()
    with pytest.raises(FileError, match="Bad file descriptor"):
        journal.add({"a": 1})


def test_a_disk_that_is_full_loses_that_line_alone(tmp_path):
    """A limit on the file's size is what a test can have of a full disk; the kernel writes what fits."""
    import resource
    import signal

    path = tmp_path / "rows.jsonl"
    journal = Journal(path)
    journal.add({"a": 1})
    size = path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, before[1]))
        for _ in range(2):  # the first is cut short, of the second nothing is written
            with pytest.raises(FileError, match="File too large"):
                journal.add({"lost": "x" * 50})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.stat().st_size == size + 5
    journal.add({"b": 2})
    journal.close()
    assert list(lines(path)) == [{"a": 1}, {"b": 2}]
