from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plait.errors import LabError, UsageError
from plait.lab import MemoryGroup
from plait.lab.memory import Hierarchy, find_hierarchy, remove_group

V1 = "36 25 0:31 / {root} rw,relatime - cgroup cgroup rw,memory\n"
V1_OTHER = "35 25 0:30 / {root}-cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
V2 = "30 23 0:26 / {root} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
MIB = 2**20


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def test_version_2_is_found_by_its_controllers(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(V1_OTHER.format(root=tmp_path) + V2.format(root=tmp_path))
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    assert find_hierarchy(mounts) == Hierarchy(version=2, root=tmp_path)
    (tmp_path / "cgroup.controllers").write_text("hugetlb\n")
    assert find_hierarchy(mounts) is None


def test_version_1_is_found_beside_an_empty_version_2(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(V2.format(root=tmp_path / "unified") + V1.format(root=tmp_path / "memory"))
    assert find_hierarchy(mounts) == Hierarchy(version=1, root=tmp_path / "memory")
    assert find_hierarchy(tmp_path / "absent") is None


@pytest.fixture
def version_2(tmp_path: Path) -> Hierarchy:
    """A folder that looks like the top of a version 2 hierarchy whose children have no memory control yet."""
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    (tmp_path / "cgroup.subtree_control").write_text("cpu\n")
    return Hierarchy(version=2, root=tmp_path)


def test_version_2_is_spoken(version_2: Hierarchy) -> None:
    with MemoryGroup("64MiB", name="one", hierarchy=version_2) as group:
        assert (version_2.root / "cgroup.subtree_control").read_text() == "+memory"
        assert group.directory == version_2.root / "one"
        assert (group.directory / "memory.max").read_text() == str(64 * MIB)
        (group.directory / "memory.stat").write_text("anon 5000\nfile 90000\nshmem 700\n")
        (group.directory / "memory.peak").write_text("98765\n")
        (group.directory / "memory.events").write_text("low 0\nmax 12\noom 3\noom_kill 2\n")
        (group.directory / "cgroup.procs").write_text("")
        assert group.peak_bytes == 98765
        assert group.peak_resident_bytes == 5700
        assert group.oom_kills == 2
        (group.directory / "memory.stat").write_text("anon 100\nshmem 0\n")
        assert group.peak_resident_bytes == 5700  # a peak does not fall
        child = subprocess.Popen(["sleep", "60"])
        group.add(child.pid)
        assert (group.directory / "cgroup.procs").read_text() == str(child.pid)
        child.kill()
        child.wait()
        for file in group.directory.iterdir():  # the kernel's files vanish with a group, these do not
            file.unlink()
    assert not group.directory.exists()
    assert (group.peak_bytes, group.peak_resident_bytes, group.oom_kills) == (98765, 5700, 2)


def test_version_2_without_a_mark_falls_back_to_what_was_seen(version_2: Hierarchy) -> None:
    with MemoryGroup("64MiB", name="old", hierarchy=version_2) as group:
        (group.directory / "memory.stat").write_text("anon 5000\nshmem 700\n")
        assert group.peak_bytes == 5700
        for file in group.directory.iterdir():
            file.unlink()


def test_swap_is_no_way_around() -> None:
    assert Hierarchy(version=2, root=Path("/x")).limits(7) == {"memory.max": 7, "memory.swap.max": 0}
    limits = Hierarchy(version=1, root=Path("/x")).limits(7)
    assert limits == {"memory.limit_in_bytes": 7, "memory.memsw.limit_in_bytes": 7}


def test_a_command_in_the_group_is_limited_and_measured(memory_groups: None) -> None:
    with MemoryGroup("64MiB") as group:
        modest = subprocess.Popen(
            group.command(python("x = b'x' * (24 * 2**20); input()")), stdin=subprocess.PIPE
        )
        deadline = time.monotonic() + 30
        while group.peak_resident_bytes < 24 * MIB and time.monotonic() < deadline:
            time.sleep(0.01)
        modest.communicate(b"\n")
        assert modest.returncode == 0
        assert 24 * MIB < group.peak_resident_bytes < 64 * MIB
        assert 24 * MIB < group.peak_bytes <= 64 * MIB
        assert group.oom_kills == 0
        greedy = subprocess.run(group.command(python("x = b'x' * 2**28")), check=False)
        assert greedy.returncode == -signal.SIGKILL
    assert group.oom_kills == 1
    assert group.peak_bytes >= 63 * MIB
    assert not group.directory.exists()


def test_a_running_process_can_be_moved_in(memory_groups: None) -> None:
    child = subprocess.Popen(["sleep", "60"])
    with MemoryGroup("64MiB") as group:
        group.add(child.pid)
        assert str(child.pid) in (group.directory / "cgroup.procs").read_text().split()
    assert child.wait(30) == -signal.SIGKILL  # leaving the group ended it
    assert not group.directory.exists()


def test_a_group_ends_what_runs_in_it_when_its_block_fails(memory_groups: None) -> None:
    children: list[subprocess.Popen[bytes]] = []

    def fail() -> None:
        with MemoryGroup("64MiB") as group:
            children.append(subprocess.Popen(group.command(["sleep", "60"])))
            raise KeyError(group.directory)

    with pytest.raises(KeyError) as caught:
        fail()
    assert not caught.value.args[0].exists()
    # Killed if it was inside already, else refused at the door.
    assert children[0].wait(30) != 0


def test_a_group_that_is_gone_is_removed_without_fuss(tmp_path: Path) -> None:
    remove_group(tmp_path / "gone")
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match="cannot remove"):
        remove_group(tmp_path)


@pytest.mark.parametrize("limit", [0, "1MiB", "31MiB", "-1GiB", "much", "16777216TiB", "1e30GiB"])
def test_limits_that_no_python_fits_into_or_no_kernel_counts_are_refused(limit: str | int) -> None:
    with pytest.raises(UsageError) as caught:
        MemoryGroup(limit)
    assert caught.value.setting == "memory"
    assert caught.value.works is not None


def test_the_owner_cannot_be_in_its_own_group(version_2: Hierarchy) -> None:
    group = MemoryGroup("64MiB", name="one", hierarchy=version_2)
    with pytest.raises(UsageError, match=f"process {os.getpid()}"):
        group.add(os.getpid())


def test_a_process_that_does_not_exist_is_said(memory_groups: None) -> None:
    with MemoryGroup("64MiB") as group, pytest.raises(LabError, match="No such process"):
        group.add(2**22 + 1)


def test_a_hierarchy_that_may_not_be_written_is_said(tmp_path: Path) -> None:
    with (
        pytest.raises(LabError, match="cannot make a memory group") as caught,
        MemoryGroup("64MiB", hierarchy=Hierarchy(version=1, root=tmp_path / "absent")),
    ):
        pass
    assert caught.value.setting == "memory"
