from __future__ import annotations

import os

import pytest

from plait.errors import UsageError
from plait.lab.cores import parse_cores

FIRST = min(os.sched_getaffinity(0))
LAST = max(os.sched_getaffinity(0))


def test_none_is_all_cores() -> None:
    assert parse_cores(None, 3) == [None, None, None]


def test_one_entry_holds_for_every_host() -> None:
    assert parse_cores(f"{FIRST}", 3) == [(FIRST,)] * 3
    assert parse_cores([[FIRST]], 3) == [(FIRST,)] * 3


def test_host_by_host() -> None:
    both = tuple(sorted({FIRST, LAST}))
    assert parse_cores(f"{LAST}:{FIRST},{LAST}", 2) == [(LAST,), both]
    assert parse_cores([[LAST], [FIRST, LAST]], 2) == [(LAST,), both]
    assert parse_cores(f"{FIRST}-{FIRST}:{LAST}", 2) == [(FIRST,), (LAST,)]


@pytest.mark.parametrize(
    ("cores", "says"),
    [
        ("4095", r"cores \[4095\] do not exist"),
        ([[4095]], r"cores \[4095\] do not exist"),
        ("99999999999", "no machine has"),
        ("0-99999999999", "no machine has"),
        ("-1", "neither a core nor a range"),
        ("1-0", "neither a core nor a range"),
        ("", "neither a core nor a range"),
        ("all", "neither a core nor a range"),
        ([[]], "without a core"),
        (f"{FIRST}:{FIRST}:{FIRST}", "3 of 2 hosts"),
    ],
)
def test_wrong_cores_are_refused(cores: str | list[list[int]], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        parse_cores(cores, 2)
    assert caught.value.setting == "cores"
    assert caught.value.works is not None
