"""One command within a memory limit."""

import sys

import pytest

from plait.errors import LabError
from plait.lab.limited import run_limited
from plait.lab.memory import can_limit

limits = pytest.mark.skipif(not can_limit(), reason="no control group can be written here")


def python(code):
    return [sys.executable, "-c", code]


def test_what_a_command_prints_is_returned_and_its_environment_is_given():
    done = run_limited(python("import os; print(os.environ['GIVEN']); print(2)"), env={"GIVEN": "1"})
    assert done.lines == ("1", "2")
    assert done.peak_bytes is None


@limits
def test_the_peak_within_a_limit_is_measured():
    held = "import time; x = bytearray(b'1') * (60 << 20); time.sleep(0.5)"
    done = run_limited(python(held), memory="200MiB")
    assert 60 << 20 <= done.peak_bytes <= 100 << 20


@limits
def test_a_command_that_needs_more_is_an_error_with_the_limit():
    with pytest.raises(LabError, match=r"ran out of its 64.00 MiB.*works: more than 64.00 MiB"):
        run_limited(python("x = bytearray(b'1') * (200 << 20)"), memory="64MiB")


def test_the_last_words_of_a_command_that_fails_are_in_the_error():
    with pytest.raises(LabError, match=r"ended with 3: goodbye"):
        run_limited(python("import sys; print('goodbye', file=sys.stderr); sys.exit(3)"))
