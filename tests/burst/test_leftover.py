"""What cannot be removed at once: who goes on with it, from when, and until nothing is left."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from plait.burst import leftover
from plait.burst.cgroup import Group, find_trees
from plait.burst.phases import start_ticks
from plait.burst.process import Background, Work
from plait.errors import WorkerError

pytestmark = pytest.mark.usefixtures("published")


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def label_of(pid, started):
    """A name for something that another process owns."""
    namespace = leftover.new_label().split("-")[2]
    return f"plait-background-{namespace}-{pid}-{started}-0123abcd"


@pytest.fixture
def undying():
    """A block in which a process survives SIGKILL: frozen, by a group of version 1 that is not its own."""
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    freezers = [Path(words[4]) for words in mounts if words[-3] == "cgroup" and "freezer" in words[-1]]
    if os.geteuid() != 0 or not freezers or any(tree.parent == freezers[0] for tree in find_trees()):
        pytest.skip("no freezer of version 1 apart from what background work uses")
    folder = freezers[0] / f"plait-test-undying-{os.getpid()}"

    @contextmanager
    def frozen(pid):
        folder.mkdir()
        try:
            (folder / "cgroup.procs").write_text(str(pid))
            (folder / "freezer.state").write_text("FROZEN")
            until(lambda: (folder / "freezer.state").read_text() == "FROZEN\n")
            yield
        finally:
            (folder / "freezer.state").write_text("THAWED")

    yield frozen
    until(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


@pytest.fixture
def tries(monkeypatch):
    """What came of each removal in this process; none takes long to fail."""
    seen, remove = [], leftover.remove

    def counted(label):
        try:
            remove(label)
        except WorkerError as error:
            seen.append(str(error))
            raise
        seen.append("removed")

    monkeypatch.setattr("plait.burst.cgroup._REMOVE_SECONDS", 0.05)
    monkeypatch.setattr(leftover, "_KILL_SECONDS", 0.05)
    monkeypatch.setattr(leftover, "_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(leftover, "remove", counted)
    return seen


@pytest.mark.usefixtures("tries")
def test_the_watchdog_goes_on_where_the_owner_gives_up(groups, undying, published):
    work = Background(Work(command=("sleep", "300"), name="sleep"))
    watchdog = work._watchdog._process
    until(lambda: not groups or work.pid in work._group.processes())
    with undying(work.pid):
        with pytest.raises(WorkerError, match=f"{work.pid}"):
            work.end(grace_seconds=0)
        assert watchdog.poll() is None
        assert (published / work.label).exists()
    assert watchdog.wait(60) == 0, "it does not wait for the owner's end"
    assert work.wait(60) in (-signal.SIGTERM, -signal.SIGKILL), "both were sent while it could not die"
    assert not any((tree.parent / work.label).exists() for tree in find_trees())
    assert not published.exists()
    work.end()  # once more is nothing


@pytest.mark.parametrize("has_groups", [True, False])
def test_the_watchdog_tries_until_nothing_is_left(tries, undying, published, has_groups):
    label = label_of(1, 1)  # an owner that is gone
    (published / label).mkdir(parents=True)
    process = subprocess.Popen(["sleep", "300"], env={**os.environ, leftover.VARIABLE: label})
    group = Group(label, trees=None if has_groups else [])
    for entrance in map(Path, group.entrances):
        entrance.write_text(str(process.pid))
    thread = threading.Thread(target=leftover.watch, args=(label, -1), daemon=True)
    with undying(process.pid):
        thread.start()
        until(lambda: len(tries) >= 2)
        assert all(str(process.pid) in words for words in tries)
        assert (published / label).exists()
    thread.join(60)
    assert tries[-1] == "removed"
    assert process.wait(60) == -signal.SIGKILL
    assert not any(os.path.exists(entrance) for entrance in group.entrances)
    assert not published.exists()


@pytest.mark.parametrize("sign", ["an order", "the owner's end"])
def test_the_watchdog_begins_at(sign, tries, published):
    """And not where the pipe is merely closed: the owner may have closed all that it did not know."""
    owner = subprocess.Popen(["sleep", "300"])
    label = label_of(owner.pid, start_ticks(owner.pid))
    (published / label).mkdir(parents=True)
    orders, order = os.pipe()
    if sign != "an order":
        os.close(order)
    thread = threading.Thread(target=leftover.watch, args=(label, orders), daemon=True)
    thread.start()
    try:
        time.sleep(0.1)
        assert tries == []
        if sign == "an order":
            os.write(order, b".")
            os.close(order)
            thread.join(60)
            assert tries == ["removed"]
    finally:
        owner.kill()
        owner.wait()
    thread.join(60)
    os.close(orders)
    assert tries == ["removed"]
    assert not published.exists()


STEPPED_BACK = """
import os, time
os.setsid()
with open("/proc/self/autogroup", "w") as file:
    file.write("19")
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
print("ready", flush=True)
time.sleep(300)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/autogroup"), reason="sessions have no weight here")
@pytest.mark.usefixtures("tries")
def test_what_is_killed_gets_time_to_die_where_no_group_holds_it(undying):
    """It takes processor time, and what has stepped back gets next to none while the cores are busy."""
    label = label_of(1, 1)
    environment = {**os.environ, leftover.VARIABLE: label}
    command = [sys.executable, "-S", "-c", STEPPED_BACK]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    assert process.stdout.readline() == b"ready\n"
    weight = Path(f"/proc/{process.pid}/autogroup")
    assert weight.read_text().endswith("nice 19\n")
    with undying(process.pid):
        with pytest.raises(WorkerError, match=rf"\[{process.pid}\] of {label} were killed and still run"):
            leftover.remove(label)
        assert weight.read_text().endswith("nice 0\n")
        assert os.sched_getscheduler(process.pid) == os.SCHED_OTHER
    assert process.wait(60) == -signal.SIGKILL
    process.stdout.close()
