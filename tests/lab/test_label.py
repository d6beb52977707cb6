from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from plait.lab.label import Label, start_ticks

labels = st.builds(
    Label,
    pid=st.integers(1, 2**22),
    started=st.integers(0, 2**40),
    pid_namespace=st.integers(1, 2**32),
    token=st.text("0123456789abcdef", min_size=6, max_size=6),
)


@given(labels, st.sampled_from(["", "-host0", "-switch", "-memory"]))
def test_a_name_gives_back_its_label(label: Label, rest: str) -> None:
    assert Label.find(f"{label}{rest}") == label


@given(st.text())
def test_other_names_have_no_label(text: str) -> None:
    assert Label.find("x" + text) is None
    assert Label.find("plait-" + text.replace("-", "")) is None


def test_labels_of_one_process_differ_and_are_alive() -> None:
    first, second = Label.new(), Label.new()
    assert first != second
    assert first.is_alive()
    assert second.is_alive()
    assert first.pid == os.getpid()


def test_a_later_process_with_the_same_number_is_not_the_owner() -> None:
    label = Label.new()
    assert not dataclasses.replace(label, started=label.started + 1).is_alive()


def test_an_owner_elsewhere_counts_as_alive() -> None:
    label = dataclasses.replace(Label.new(), pid_namespace=1, started=0)
    assert label.is_alive()


def test_an_owner_that_ended_is_dead_even_before_it_is_reaped() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "from plait.lab.label import Label; print(Label.new())"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    text = child.stdout.read()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and still a zombie
    label = Label.find(text)
    assert label is not None
    assert label.pid == child.pid
    assert not label.is_alive()
    child.communicate()
    assert not label.is_alive()
    assert start_ticks(child.pid) is None
