"""Background work as real processes: behind a busy foreground on one core, paused, ended, limited."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plait.burst import leftover
from plait.burst.cgroup import find_trees
from plait.burst.process import Background, Work, check_threads, cores_of
from plait.errors import FileError, UsageError

SPIN = ("sh", "-c", "while :; do :; done")
pytestmark = pytest.mark.usefixtures("published")


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def used(pid):
    """Processor seconds of a process."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def autogroup():
    """The weight of this session, where sessions have one."""
    path = Path("/proc/self/autogroup")
    return path.read_text() if path.exists() else ""


def left_behind(label):
    folders = [tree.parent / label for tree in find_trees()]
    return [*leftover.members(label), *(folder for folder in folders if folder.exists())]


@pytest.mark.parametrize("session", ["the same session", "a session of its own"])
def test_a_busy_foreground_keeps_its_core(groups, session):
    """Processor time as the kernel counts it, so that other load on the machine does not matter."""
    core, ours = min(os.sched_getaffinity(0)), autogroup()
    own = session != "the same session"
    foreground = subprocess.Popen(SPIN, start_new_session=own)
    os.sched_setaffinity(foreground.pid, [core])
    # A command that makes a session of its own would have an autogroup of full weight.
    command = ("setsid", *SPIN) if own and shutil.which("setsid") else SPIN
    work = Background(Work(command=command, name="spin", cores=(core,)))
    try:
        assert ("cpu.idle" in work.protection) == groups
        work.keep_back()  # before it has stepped back by itself: this session must keep its weight
        until(lambda: work.keep_back() or used(foreground.pid) > 0.8)  # as the multiplexer does
        assert autogroup() == ours
        before, mine = used(foreground.pid), work.seconds()
        until(lambda: used(foreground.pid) - before > 0.7)
        assert work.seconds() - mine < 0.15 * (used(foreground.pid) - before)
    finally:
        foreground.kill()
        foreground.wait()
        work.end(grace_seconds=0)
    assert left_behind(work.label) == []


def test_a_promoted_one_shares_a_core_with_whoever_is_busy(groups):
    if os.getuid() != 0 and not groups:
        pytest.skip("only root may raise a priority")
    core = min(os.sched_getaffinity(0))
    other = subprocess.Popen(SPIN)
    os.sched_setaffinity(other.pid, [core])
    work = Background(Work(command=SPIN, name="spin", cores=(core,)))
    try:
        until(lambda: os.sched_getscheduler(work.pid) == os.SCHED_IDLE)
        work.promote()
        assert work.protection.startswith("normal priority, ")
        # What it ran while idle may be held against it, 341-fold by the weights: for one tick, 1.4 s.
        early = work.seconds()
        until(lambda: work.keep_back() or work.seconds() - early > 0.1)
        before, mine = used(other.pid), work.seconds()
        until(lambda: work.keep_back() or used(other.pid) - before > 0.3)
        assert work.seconds() - mine > 0.3 * (used(other.pid) - before)
        work.pause()
        assert work.paused  # by hand, and for a foreground that comes after all, it still can be
    finally:
        other.kill()
        other.wait()
        work.end(grace_seconds=0)
    assert left_behind(work.label) == []


def test_it_is_paused_where_it_is_and_goes_on(groups):
    work = Background(Work(command=SPIN, name="spin"))
    try:
        until(lambda: work.seconds() > 0)
        work.pause()
        time.sleep(0.1)  # what runs on another core stops a moment later
        before = work.seconds()
        time.sleep(0.2)
        assert work.seconds() - before < 0.02, "what waits for a core stops when it gets one"
        work.resume()
        until(lambda: work.seconds() > before + 0.02)
        work.pause()
    finally:
        work.end(grace_seconds=0)
    assert left_behind(work.label) == []


@pytest.fixture
def no_groups(monkeypatch):
    monkeypatch.setattr("plait.burst.cgroup.find_trees", list)


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.usefixtures("no_groups")
def test_a_process_that_is_new_at_a_pause_is_stopped_all_the_same(tmp_path):
    script = f"while ! [ -e {tmp_path}/go ]; do sleep 0.01; done; sleep 60 & echo $! > {tmp_path}/child; wait"
    work = Background(Work(command=("sh", "-c", script), name="family", idle=False))
    try:
        work.seconds()  # looks which processes there are
        (tmp_path / "go").touch()
        until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text().strip())
        work.pause()
        until(lambda: work.keep_back() or state((tmp_path / "child").read_text().strip()) == "T")
    finally:
        work.end(grace_seconds=0)


@pytest.mark.usefixtures("no_groups")
def test_a_process_that_took_over_a_number_is_not_stopped():
    other = subprocess.Popen(["sleep", "60"])
    work = Background(Work(command=SPIN, name="spin"))
    try:
        work._members, work._looked_at = {other.pid: 1}, time.monotonic() + 60
        work.pause()
        time.sleep(0.1)
        assert state(other.pid) == "S"
    finally:
        other.kill()
        other.wait()
        work.end(grace_seconds=0)


def test_work_that_has_ended_is_neither_signalled_nor_paused(monkeypatch):
    work = Background(Work(command=("true",), name="true"))
    assert work.wait(60) == 0
    with monkeypatch.context() as patched:
        patched.setattr(os, "kill", lambda *given: pytest.fail("the number may be somebody else's"))
        assert work.leave(1) == 0
    protection = work.protection
    work.end()
    work.pause()
    assert (work.paused, work.protection) == (False, protection)


def test_work_that_does_not_leave_in_time_is_held_back_again(groups, tmp_path):
    script = f"trap '' TERM; touch {tmp_path}/ready; while :; do sleep 0.01; done"
    work = Background(Work(command=("sh", "-c", script), name="stubborn", idle=False))
    try:
        until((tmp_path / "ready").exists)
        work.pause()
        assert work.leave(0.05) is None
        assert not work.paused
        work.pause()
        assert work.paused
    finally:
        work.end(grace_seconds=0)
    assert left_behind(work.label) == []


def test_the_watchdog_goes_last(monkeypatch):
    seen, remove = [], leftover.remove
    monkeypatch.setattr(
        leftover, "remove", lambda label: (seen.append(work._watchdog._process.poll()), remove(label))
    )
    work = Background(Work(command=SPIN, name="spin"))
    work.end(grace_seconds=0)
    assert seen == [None]
    assert work._watchdog._process.poll() is not None


def test_all_its_processes_end_with_it(groups, tmp_path):
    script = f"setsid sleep 60 & echo $! > {tmp_path}/child; sleep 60"
    work = Background(Work(command=("sh", "-c", script), name="family"))
    try:
        until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text().strip())
        child = int((tmp_path / "child").read_text())
        assert {work.pid, child} <= set(leftover.members(work.label))
        work.pause()
    finally:
        work.end()
    assert cores_of(child) == set()
    assert left_behind(work.label) == []
    assert work.exit_code == -signal.SIGTERM
    work.end()  # once more is nothing


def test_work_that_is_killed_or_fails_says_so(tmp_path):
    killed = Background(Work(command=SPIN, name="spin"))
    os.kill(killed.pid, signal.SIGKILL)
    failed = Background(Work(command=("sh", "-c", "echo words; exit 3"), name="sh", log=tmp_path / "log"))
    assert failed.wait(60) == 3
    assert killed.wait(60) == -signal.SIGKILL
    for work in (failed, killed):
        work.end()
        assert left_behind(work.label) == []
    assert (tmp_path / "log").read_text() == "words\n"


def test_it_is_told_its_threads_and_its_role(tmp_path, published):
    names = "$OMP_NUM_THREADS $MKL_NUM_THREADS $PLAIT_PUBLISH $EXTRA"
    work = Work(
        command=("sh", "-c", f"echo {names}; taskset -p $$ || true"), name="sh", threads=2,
        log=tmp_path / "log", environment={"EXTRA": "more"}, cores=(min(os.sched_getaffinity(0)),),
    )  # fmt: skip
    started = Background(work)
    started.wait(60)
    started.end()
    assert (tmp_path / "log").read_text().splitlines()[0] == "2 2 background more"
    assert not published.exists()


def test_more_memory_than_its_limit_is_its_end(groups):
    limit = 64 * 2**20
    command = ("dd", "if=/dev/zero", "of=/dev/null", "bs=300M", "count=1")
    if not groups:
        with pytest.raises(UsageError, match="can hold background work to 64"):
            Background(Work(command=command, name="large", memory_bytes=limit))
        return
    if not any("memory" in tree.uses for tree in find_trees()):
        pytest.skip("no memory groups may be made here")
    work = Background(Work(command=command, name="large", memory_bytes=limit, idle=False))
    assert work.wait(60) == -signal.SIGKILL
    work.end()
    assert work.oom_kills == 1
    assert left_behind(work.label) == []


def test_what_cannot_run_is_refused_before_anything_starts(tmp_path):
    cores = os.sched_getaffinity(0)
    for settings, setting in (
        ({"command": ()}, "command"),
        ({"command": ("no-such-program",)}, "command"),
        ({"command": SPIN, "cores": ()}, "cores"),
        ({"command": SPIN, "cores": (max(cores) + 1,)}, "cores"),
    ):
        with pytest.raises(UsageError) as caught:
            Work(name="none", **settings)
        assert caught.value.setting == setting
    with pytest.raises(UsageError, match="threads on"):
        check_threads(len(cores) + 1, None)
    with pytest.raises(UsageError, match="2 background threads on 1 core"):
        check_threads(2, [0])
    with pytest.raises(FileError, match="cannot be written"):
        Background(Work(command=SPIN, name="spin", log=tmp_path / "nowhere" / "log"))
    assert leftover.members("plait-background-") == []


KILLED = """
import os, sys, time
from plait.burst.process import Background, Work
work = Background(Work(command=("sh", "-c", "setsid sleep 60 & while :; do :; done"), name="spin"))
work.pause()
print(work.label, flush=True)
time.sleep(60)
"""


def test_an_owner_that_is_killed_leaves_nothing_behind(published):
    """Though its background is paused: frozen processes do not even die of SIGKILL in groups of version 1."""
    owner = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    label = owner.stdout.readline().strip()
    assert left_behind(label) != []
    assert leftover.owner_lives(label)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert not leftover.owner_lives(label)
    until(lambda: left_behind(label) == [] and not published.exists())


def test_what_even_the_watchdog_left_is_found_by_the_next(published):
    alive = leftover.new_label()
    *_, namespace, _, _, _ = alive.split("-")
    dead = f"plait-background-{namespace}-1-1-0123abcd"
    elsewhere = "plait-background-1-1-1-0123abcd"  # in another pid namespace: who knows
    (published / dead).mkdir(parents=True)
    (published / alive).mkdir()
    (published / elsewhere).mkdir()
    folders = [tree.parent / dead for tree in find_trees()]
    for folder in folders:
        folder.mkdir()
    assert dead in leftover.clean()
    assert not any(folder.exists() for folder in [published / dead, *folders])
    assert (published / alive).exists()
    assert (published / elsewhere).exists()
    assert leftover.owner_lives(elsewhere) is None
