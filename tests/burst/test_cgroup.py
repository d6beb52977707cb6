"""Control groups of both versions: what is found, what is written."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plait.burst.cgroup import Group, Tree, find_trees
from plait.errors import UsageError

MOUNTS_1 = """\
32 31 0:29 / {root}/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
37 31 0:34 / {root}/freezer rw,relatime - cgroup cgroup rw,freezer
40 31 0:37 / {root}/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / {root}/unified rw,relatime - cgroup2 cgroup2 rw
"""


def machine(root, mounts, membership):
    (root / "mountinfo").write_text(mounts.format(root=root))
    (root / "membership").write_text(membership)
    return find_trees(root / "mountinfo", root / "membership")


def test_version_1_makes_groups_within_the_callers_own(tmp_path):
    for name in ("cpu,cpuacct/mine", "freezer", "systemd", "unified"):
        (tmp_path / name).mkdir(parents=True)
    own = "3:cpu,cpuacct:/mine\n2:freezer:/\n1:name=systemd:/\n0::/\n"
    parts = [
        Tree(version=1, parent=tmp_path / "cpu,cpuacct/mine", uses=frozenset({"idle", "time"})),
        Tree(version=1, parent=tmp_path / "freezer", uses=frozenset({"freeze"})),
    ]
    assert machine(tmp_path, MOUNTS_1.rpartition("41")[0], own) == parts
    # Beside version 1, version 2 can freeze and count, even where it holds no controller.
    both = [Tree(version=2, parent=tmp_path / "unified", uses=frozenset({"freeze", "time"}))]
    both.append(Tree(version=1, parent=tmp_path / "cpu,cpuacct/mine", uses=frozenset({"idle"})))
    assert machine(tmp_path, MOUNTS_1, own) == both


def test_version_2_makes_them_beside_it(tmp_path):
    (tmp_path / "top/user/mine").mkdir(parents=True)
    (tmp_path / "top/user/cgroup.controllers").write_text("cpu io memory\n")
    mounts = "41 31 0:38 /user {root}/top/user rw - cgroup2 cgroup2 rw\n"
    (tree,) = machine(tmp_path, mounts, "0::/user/mine\n")
    assert tree == Tree(
        version=2, parent=tmp_path / "top/user", uses=frozenset({"idle", "freeze", "time", "memory"})
    )


def test_a_machine_without_any_or_where_none_may_be_made(tmp_path):
    assert machine(tmp_path, "", "") == []
    group = Group("plait-none", trees=[])
    assert (group.is_idle, group.can_freeze, group.entrances, group.processes(), group.seconds()) == (
        False, False, [], [], None,
    )  # fmt: skip
    group.remove()
    gone = Tree(version=1, parent=tmp_path / "gone", uses=frozenset({"idle", "freeze"}))
    assert not Group("plait-none", trees=[gone]).is_idle


def test_version_2_in_its_own_words(tmp_path, monkeypatch):
    """In a folder, where files do not appear by themselves: they are there as the kernel would have them."""
    (tmp_path / "cgroup.subtree_control").write_text("")
    names = ("cpu.idle", "cgroup.freeze", "cpu.stat", "memory.max", "memory.events", "cgroup.procs")
    real = os.mkdir

    def mkdir(path, *args, **kwargs):
        real(path, *args, **kwargs)
        for name in names:
            (tmp_path / "plait-2" / name).write_text("")

    monkeypatch.setattr(os, "mkdir", mkdir)
    tree = Tree(version=2, parent=tmp_path, uses=frozenset({"idle", "freeze", "time", "memory"}))
    group = Group("plait-2", memory_bytes=2**30, trees=[tree])
    monkeypatch.undo()
    folder = tmp_path / "plait-2"
    assert group.entrances == [str(folder / "cgroup.procs")]
    assert (group.is_idle, group.can_freeze) == (True, True)
    assert (folder / "cpu.idle").read_text() == "1"
    assert (folder / "memory.max").read_text() == str(2**30)
    group.freeze(True)
    assert (folder / "cgroup.freeze").read_text() == "1"
    group.freeze(False)
    assert (folder / "cgroup.freeze").read_text() == "0"
    (folder / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    (folder / "memory.events").write_text("low 0\noom_kill 3\n")
    assert (group.seconds(), group.oom_kills()) == (2.5, 3)
    (folder / "cgroup.procs").write_text("0\n12\n")  # 0: a process of another pid namespace
    assert group.processes() == [12]


def test_a_memory_limit_that_nothing_can_hold_is_refused(tmp_path):
    tree = Tree(version=1, parent=tmp_path, uses=frozenset({"idle"}))
    with pytest.raises(UsageError) as caught:
        Group("plait-1", memory_bytes=2**30, trees=[tree])
    assert caught.value.setting == "memory"
    assert not (tmp_path / "plait-1").exists()


@pytest.mark.parametrize("within", ["", "made/within"])
def test_the_real_ones_freeze_count_and_kill(within):
    """With what runs in groups that the background has made in them."""
    trees = find_trees()
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    freezers = [Path(words[4]) for words in mounts if words[-3] == "cgroup" and "freezer" in words[-1]]
    if os.geteuid() == 0:  # beside version 2, that of version 1 is not used, but there
        trees += [Tree(version=1, parent=folder, uses=frozenset({"freeze"})) for folder in freezers]
    tried = [[tree] for tree in trees if {"freeze"} <= tree.uses]
    if not tried:
        pytest.skip("no control groups may be made here")
    for chosen in tried:
        group = Group(f"plait-test-{os.getpid()}", trees=chosen)
        process = subprocess.Popen(["sleep", "60"])
        try:
            for entrance in map(Path, group.entrances):
                (entrance.parent / within).mkdir(parents=True, exist_ok=True)
                (entrance.parent / within / entrance.name).write_text(str(process.pid))
            assert group.processes() == [process.pid]
            group.freeze(True)
            time.sleep(0.05)
            entrances = group.entrances
            group.remove()
            assert process.wait(30) == -9
        finally:
            process.kill()
            process.wait()
            group.remove()
        assert not any(os.path.exists(entrance) for entrance in entrances)


LARGE = """
import time
held = b"x" * (400 << 20)  # to give it back takes a while
print("ready", flush=True)
time.sleep(300)
"""


def test_killed_processes_of_an_idle_group_die_though_the_core_is_busy():
    trees = [tree for tree in find_trees() if "idle" in tree.uses]
    if not trees:
        pytest.skip("no control groups may be made here")
    core = min(os.sched_getaffinity(0))
    group = Group(f"plait-test-{os.getpid()}", trees=trees)
    process = subprocess.Popen([sys.executable, "-S", "-c", LARGE], stdout=subprocess.PIPE)
    busy = []
    try:
        assert group.is_idle
        assert process.stdout.readline() == b"ready\n"
        # Each in a session of its own, for those of one session may share one weight.
        spin = ("sh", "-c", "while :; do :; done")
        busy = [subprocess.Popen(spin, start_new_session=True) for _ in range(4)]
        for each in (process, *busy):
            os.sched_setaffinity(each.pid, [core])
        for entrance in map(Path, group.entrances):
            entrance.write_text(str(process.pid))
        group.remove()
        assert process.wait(60) == -9
    finally:
        for each in (*busy, process):
            each.kill()
            each.wait()
        process.stdout.close()
        group.remove()
