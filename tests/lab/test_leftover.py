from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.lab import Lab, Leftover, clean
from plait.lab.label import VARIABLE, Label
from plait.lab.leftover import members, remove
from plait.lab.memory import find_hierarchy
from plait.lab.network import NAMESPACES

# A worker, and a grandchild of it that hides: no label in its environment, another session, no open pipe.
WORKER = """
import subprocess, time
subprocess.Popen(["sleep", "{marker}"], env={{}}, start_new_session=True, stdin=-3, stdout=-3, stderr=-3)
time.sleep(600)
"""
OWNER = """
import sys, time
from plait.lab import Lab
with Lab(hosts=2, {settings}) as lab:
    worker = lab.start(0, [sys.executable, "-S", "-c", {worker!r}])
    print(lab.label, flush=True)
    time.sleep(600)
"""


def command_lines() -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                found[int(entry)] = Path(f"/proc/{entry}/cmdline").read_bytes()
    return found


def running(text: str) -> list[int]:
    """Processes whose command line has the text as a word."""
    return [pid for pid, line in command_lines().items() if text.encode() in line.split(b"\0")]


def wait_for(what: object, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def left(label: Label) -> list[str]:
    """Everything on this machine that carries the label."""
    folders = [NAMESPACES]
    hierarchy = find_hierarchy()
    folders += [] if hierarchy is None else [hierarchy.root]
    names = [path.name for folder in folders if folder.exists() for path in folder.iterdir()]
    return [name for name in names if name.startswith(str(label))] + [str(pid) for pid in members(label)]


@contextlib.contextmanager
def owner_of_a_lab(settings: str, marker: str) -> Iterator[tuple[subprocess.Popen[str], Label]]:
    """A process with an open lab, in which a worker has a grandchild."""
    code = OWNER.format(settings=settings, worker=WORKER.format(marker=marker))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            label = Label.find(owner.stdout.readline())
            assert label is not None
            wait_for(lambda: running(marker))
            yield owner, label
        finally:
            owner.kill()


def kill_watchdog(label: Label) -> None:
    dogs = [pid for pid in running(str(label)) if b"plait.lab.watchdog" in command_lines().get(pid, b"")]
    assert len(dogs) == 1
    os.kill(dogs[0], signal.SIGKILL)
    wait_for(lambda: dogs[0] not in running(str(label)))


def test_after_kill_9_of_lab_and_watchdog_the_next_lab_removes_everything(
    namespaces: None, memory_groups: None
) -> None:
    marker = f"600.{os.getpid()}1"
    with owner_of_a_lab('rate="1gbit", memory="64MiB"', marker) as (owner, label):
        kill_watchdog(label)
        # Three namespaces, two memory groups, the worker and its grandchild.
        assert len(left(label)) == 7
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        with Lab(hosts=2) as lab:
            assert left(label) == []
            assert running(marker) == []
            assert lab.run(["true"]).exit_code == 0


def test_after_kill_9_the_watchdog_removes_everything(namespaces: None, memory_groups: None) -> None:
    marker = f"600.{os.getpid()}2"
    with owner_of_a_lab('memory="64MiB"', marker) as (owner, label):
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        wait_for(lambda: not left(label) and not running(marker))
        wait_for(lambda: not running(str(label)))  # and the watchdog itself has gone


def test_a_loopback_lab_that_was_killed_is_removed_too() -> None:
    # Without namespaces the label in the environment is what finds a process, and grandchildren inherit it.
    worker = ["sleep", f"600.{os.getpid()}3"]
    code = "import time\nfrom plait.lab import Lab\nwith Lab(hosts=2, loopback=True) as lab:\n"
    code += f"    lab.start(0, {worker!r})\n    print(lab.label, flush=True)\n    time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        label = Label.find(owner.stdout.readline())
        assert label is not None
        kill_watchdog(label)
        assert len(members(label)) == 1
        owner.kill()
        owner.wait()
        clean()
        assert members(label) == set()
    assert running(worker[1]) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(namespaces: None, number: signal.Signals) -> None:
    # SIGINT ends the block in order; SIGTERM kills the process at once, and the watchdog cleans up.
    marker = f"600.{os.getpid()}4{number.value}"
    with owner_of_a_lab("", marker) as (owner, label):
        owner.send_signal(number)
        owner.wait(60)
        wait_for(lambda: not left(label) and not running(marker))


def test_what_is_alive_is_not_cleaned(namespaces: None) -> None:
    with Lab(hosts=1) as lab:
        process = lab.start(0, ["sleep", "600"])
        assert lab.label not in {leftover.label for leftover in clean()}
        assert process.poll() is None


def test_a_process_is_found_by_its_environment_and_removed() -> None:
    label = Label.new()
    process = subprocess.Popen(["sleep", "600"], env={**os.environ, VARIABLE: str(label)})
    assert members(label) == {process.pid}
    assert remove(label) == Leftover(label=str(label), processes=1, namespaces=(), groups=())
    assert process.wait() == -signal.SIGKILL
    assert remove(label) == Leftover(label=str(label), processes=0, namespaces=(), groups=())
