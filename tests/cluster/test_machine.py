"""What a process may use of a machine: this one for real, and others from copies of their /proc and /sys."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from plait.cluster import Cluster, machine
from plait.errors import UsageError
from plait.lab.memory import MemoryGroup, can_limit

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


MEMINFO = {"proc/meminfo": "MemTotal:  16777216 kB\nMemFree: 1 kB\nMemAvailable:  12582912 kB"}


@pytest.fixture
def version2(tmp_path: Path) -> Path:
    """A process in /user/job: the job has 2.5 cores and 8 GiB, its parent 4 GiB."""
    return write(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "0::/user/job",
            "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate",
            "sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids",
            "sys/fs/cgroup/user/memory.max": str(4 * GIB),
            "sys/fs/cgroup/user/memory.current": str(3 * GIB),
            "sys/fs/cgroup/user/memory.stat": f"anon {GIB}\ninactive_file {GIB}\nactive_file {GIB}",
            "sys/fs/cgroup/user/cpu.max": "max 100000",
            "sys/fs/cgroup/user/job/memory.max": str(8 * GIB),
            "sys/fs/cgroup/user/job/memory.current": "0",
            "sys/fs/cgroup/user/job/cpu.max": "250000 100000",
        },
    )


@pytest.fixture
def version1(tmp_path: Path) -> Path:
    """A container whose mounts show only its own part of the hierarchy, with version 2 beside it."""
    return write(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "4:memory:/docker/c1\n3:cpu,cpuacct:/docker/c1\n1:name=systemd:/x\n0::/",
            "proc/self/mountinfo": "29 23 0:25 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
            "31 23 0:27 /docker/c1 /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
            "32 23 0:28 /docker/c1 /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
            "sys/fs/cgroup/unified/cgroup.controllers": "",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(6 * GIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(5 * GIB),
            "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
    )


def test_version_2_takes_the_lowest_limit_on_the_way_up(version2: Path) -> None:
    assert machine.cpu_quota(version2) == 2.5
    assert machine.memory_limit_bytes(version2) == 4 * GIB
    # 4 GiB, of which 3 are used, of which 2 are page cache.
    assert machine.memory_available_bytes(version2) == 3 * GIB


def test_version_1_in_a_container(version1: Path) -> None:
    group = machine.control_group("memory", version1)
    assert group is not None
    assert (group.version, group.directory) == (1, version1 / "sys/fs/cgroup/memory")
    assert machine.cpu_quota(version1) == 1.5
    assert machine.memory_limit_bytes(version1) == 6 * GIB
    assert machine.memory_available_bytes(version1) == 2 * GIB


def test_without_limits(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "4:memory:/\n2:cpu:/",
            "proc/self/mountinfo": "31 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            "32 23 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert machine.cpu_quota(root) is None
    assert machine.memory_limit_bytes(root) is None
    assert machine.memory_available_bytes(root) == 12 * GIB
    assert machine.control_group("io", root) is None


def test_a_group_outside_of_what_is_mounted(version2: Path) -> None:
    write(version2, {"proc/self/cgroup": "0::/../../job", "sys/fs/cgroup/memory.max": str(2 * GIB)})
    assert machine.memory_limit_bytes(version2) == 2 * GIB


def test_without_control_groups(tmp_path: Path) -> None:
    root = write(tmp_path, MEMINFO)
    assert machine.cpu_quota(root) is None
    assert machine.memory_available_bytes(root) == 12 * GIB
    assert machine.usable_cores(root) == tuple(sorted(os.sched_getaffinity(0)))


def test_a_quota_below_one_core_leaves_one(version2: Path) -> None:
    write(version2, {"sys/fs/cgroup/user/job/cpu.max": "20000 100000"})
    assert len(machine.usable_cores(version2)) == 1


def test_a_machine_without_proc_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="says no MemTotal"):
        machine.memory_total_bytes(tmp_path)


def test_file_systems(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/mountinfo": "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
            "2 1 0:9 / /mnt/two\\040words rw - xfs /dev/sdb rw"
        },
    )
    assert machine.file_system(Path("/mnt"), root) == "ext4"
    assert machine.file_system(Path("/mnt/two words/below"), root) == "xfs"
    assert machine.file_system(Path("/proc")) == "proc"


def test_detect_gives_a_device_a_core_and_all_fits_this_machine(tmp_path: Path) -> None:
    cluster = Cluster.detect(kind="cpu", directory=tmp_path)
    host = cluster.hosts[0].name
    assert host == socket.gethostname()
    cores = machine.usable_cores()
    assert [device.cores for device in cluster.devices] == [(core,) for core in cores]
    ram, disk = cluster.tiers_of(host)
    assert sum(device.memory_bytes for device in cluster.devices) <= ram.capacity_bytes
    assert ram.capacity_bytes <= machine.memory_total_bytes()
    assert (disk.name, disk.directory) == ("disk", str(tmp_path))
    assert ram.read_bytes_per_s is disk.read_bytes_per_s is cluster.devices[0].gflops is None


def test_detect_divides_the_cores_among_the_devices_asked_for() -> None:
    (device,) = Cluster.detect(kind="cpu", devices=1).devices
    assert device.cores == machine.usable_cores()
    assert device.threads == len(device.cores)


@pytest.mark.parametrize("devices", [0, -1, 10_000])
def test_devices_that_do_not_exist_are_refused(devices: int) -> None:
    with pytest.raises(UsageError, match=f"{devices} devices were asked of") as caught:
        Cluster.detect(kind="cpu", devices=devices)
    assert caught.value.works == f"1 to {len(machine.usable_cores())}"


def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    if machine.gpu_count():
        pytest.skip("this machine has GPUs")
    with pytest.raises(UsageError, match="which has 0 of kind cuda") as caught:
        Cluster.detect(kind="cuda", devices=1)
    assert caught.value.works == 'kind="cpu"'


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be used: No such file"):
        Cluster.detect(directory=tmp_path / "none")


def test_a_real_memory_limit_is_seen() -> None:
    if not can_limit():
        pytest.skip("control groups cannot be written here")
    code = (
        "import json; from plait.cluster import Cluster, machine;"
        "c = Cluster.detect(kind='cpu'); print(json.dumps([machine.memory_limit_bytes(),"
        "sum(d.memory_bytes for d in c.devices)]))"
    )
    with MemoryGroup("300MiB") as group:
        command = group.command([sys.executable, "-c", code])
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    limit, budgets = json.loads(done.stdout)
    assert limit == 300 << 20
    assert 0 < budgets < 300 << 20
