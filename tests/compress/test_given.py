import numpy as np
import pytest

from plait.compress.given import NUMBER, WHOLE, entry, expect, saved
from plait.errors import FileError, UsageError


@pytest.mark.parametrize(
    ("value", "kinds"),
    [
        (True, (bool,)),
        (3, (WHOLE,)),
        (np.int64(3), (WHOLE,)),
        (3, (NUMBER,)),
        (np.float32(3), (NUMBER,)),
        (None, (str, None)),
        ("x", (str, None)),
    ],
)
def test_what_fits(value, kinds):
    expect(value, *kinds, setting="x", works="y")


@pytest.mark.parametrize(
    ("value", "kinds"),
    [
        (True, (WHOLE,)),
        (True, (int,)),
        (1, (bool,)),
        (3.0, (WHOLE,)),
        (None, (str,)),
        ("3", (NUMBER,)),
        (b"x", (str,)),
    ],
)
def test_what_does_not(value, kinds):
    with pytest.raises(UsageError, match=f"x is .*, of type {type(value).__name__} .*works: y"):
        expect(value, *kinds, setting="x", works="y")


def test_a_long_value_does_not_fill_the_screen():
    with pytest.raises(UsageError) as caught:
        expect("x" * 10_000, bool, setting="x", works="y")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("state", [None, 5, [], {}, {"format": "other"}])
def test_a_state_of_another_kind(state):
    with pytest.raises(FileError, match=r"a state of format .*not 'plait.x/1'.*state_dict"):
        saved(state, "plait.x/1")
    assert saved({"format": "plait.x/1"}, "plait.x/1")


@pytest.mark.parametrize(
    ("state", "match"),
    [(5, "no 'step'"), ({}, "no 'step'"), ({"step": "x"}, "step is 'x'"), ({"step": True}, "step is True")],
)
def test_a_field_of_a_state(state, match):
    with pytest.raises(FileError, match=match):
        entry(state, "step", int)
    assert entry({"step": 3}, "step", int) == 3
