"""Measured figures: they arrive where they belong, leave nothing behind, and are never invented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.cluster import Cluster, Device, Host, Link, disk
from plait.cluster.compute import measure_compute
from plait.cluster.disk import REQUEST_BYTES, measure_disk, move_at_once, probe_disk
from plait.cluster.machine import file_system, usable_cores
from plait.cluster.measure import join, measure_memory
from plait.cluster.network import Meeting, Wire
from plait.errors import UsageError, WorkerError

QUICK: dict[str, Any] = {"seconds": 0.02, "disk_bytes": "16MiB", "timeout": "60s"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return Cluster.detect(kind="cpu", devices=1, directory=tmp_path)


def test_parts_fill_in_their_own_figures_only(here: Cluster, tmp_path: Path) -> None:
    measured = here.measure(["memory", "disk"], **QUICK)
    ram, disk = measured.tiers
    for tier in (ram, disk):
        assert tier.read_bytes_per_s
        assert tier.write_bytes_per_s
    assert (ram.direct, disk.direct) != (None, None)
    assert measured.devices == here.devices
    assert measured.links == ()
    assert list(tmp_path.iterdir()) == []


def test_everything_at_once(here: Cluster) -> None:
    measured = here.measure(**QUICK)
    assert all(device.gflops for device in measured.devices)
    (link,) = measured.links
    assert link.source == link.target == here.hosts[0].name
    again = measured.measure(["network"], **QUICK)
    assert len(again.links) == 1  # replaced, not added
    assert again.devices == measured.devices


def test_memory_with_every_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in ("0", "1"):
        monkeypatch.setenv("PLAIT_NATIVE", setting)
        read, copy = measure_memory(usable_cores(), seconds=0.02)
        assert read > 0
        assert copy > 0


def test_both_directions_at_once_move_what_they_are_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: dict[str, list[int]] = {"_read": [], "_write": []}
    for way, seen in moved.items():
        real = getattr(disk, way)

        def noted(fd: int, buffer: Any, offset: int, real: Any = real, seen: list[int] = seen) -> None:
            seen.append(offset // REQUEST_BYTES)
            real(fd, buffer, offset)

        monkeypatch.setattr(disk, way, noted)
    size = 3 * REQUEST_BYTES
    assert move_at_once(tmp_path, read_bytes=size + 1, written_bytes=REQUEST_BYTES, size_bytes=size) > 0
    assert moved == {"_read": [0, 1, 2, 0], "_write": [0, 1, 2, 0]}  # written once whole, and then again
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_disk_in_memory_is_said_to_be_none(at_once: int) -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or file_system(shared) != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    before = set(shared.iterdir())
    speed = measure_disk(shared, size_bytes=64 << 20, at_once=at_once)
    assert speed.direct is False
    assert speed.read_bytes_per_s > 0
    assert {path for path in set(shared.iterdir()) - before if "plait-measure" in path.name} == set()


@pytest.mark.parametrize("size", [0, 1 << 20, 1 << 60])
def test_sizes_that_cannot_be_measured_are_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(UsageError, match=r"cannot be measured in .* free") as caught:
        measure_disk(tmp_path, size_bytes=size)
    assert caught.value.setting == "disk_bytes, directory"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("free_mib", [0, 1, 2, 5, 40, 4000])
def test_a_disk_that_is_nearly_full_is_probed_with_what_it_has(
    tmp_path: Path, free_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.cluster.disk.disk_free_bytes", lambda directory: free_mib << 20)
    speed = probe_disk(tmp_path, most_bytes=32 << 20)
    assert (speed is None) == (free_mib < 2)
    assert speed is None or min(speed.read_bytes_per_s, speed.write_bytes_per_s) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written: Not a directory"):
        measure_disk(tmp_path / "file", size_bytes=16 << 20)


def test_a_device_that_does_not_exist_is_noticed(capfd: pytest.CaptureFixture[str]) -> None:
    device = Device(name="a/0", host="a", memory_bytes=1, cores=(4095,))
    with pytest.raises(WorkerError, match="measures device 'a/0' ended"):
        measure_compute([device], seconds=0.02, timeout_s=60.0)


@pytest.mark.parametrize("parts", [[], ["memory", "tape"]])
def test_parts_that_do_not_exist_are_refused(here: Cluster, parts: list[Any]) -> None:
    with pytest.raises(UsageError, match="cannot be measured") as caught:
        here.measure(parts)
    assert caught.value.works == "memory, compute, disk, network"


def test_a_cluster_of_several_hosts_needs_a_process_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    cluster = Cluster.uniform(hosts=3, memory="1GiB", bandwidth="1gbit")
    with pytest.raises(UsageError, match="has 3 hosts, and processes were started on 1") as caught:
        cluster.measure(["network"])
    assert "--nnodes 3" in str(caught.value.works)


def test_a_rank_measures_the_host_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "2"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    cluster = Cluster.uniform(hosts=2, memory="1GiB", bandwidth="1gbit")
    measured = cluster.measure(["memory"], **QUICK)
    assert measured == cluster.only("node1")


def part(name: str) -> Cluster:
    return Cluster(
        hosts=(Host(name=name),),
        devices=(Device(name=f"{name}/0", host=name, memory_bytes=1 << 30),),
        links=(Link(bandwidth_bytes_per_s=1.0), Link(source=name, target=name, bandwidth_bytes_per_s=1e9)),
    )


def test_joining_keeps_names_that_differ_and_numbers_those_that_do_not() -> None:
    wires = tuple(
        Wire(source=a, target=b, bandwidth_bytes_per_s=1e8 + a, latency_ms=0.012345 * (b + 1))
        for a in range(3)
        for b in range(3)
        if a != b
    )
    brought = tuple(part(name).to_toml() for name in ("x", "y", "x"))
    cluster = join(Meeting(brought=brought, addresses=("10.0.0.1", "10.0.0.2", "10.0.0.3"), wires=wires))
    assert [host.name for host in cluster.hosts] == ["x-0", "y", "x-2"]
    assert [host.address for host in cluster.hosts] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert [device.name for device in cluster.devices] == ["x-0/0", "y/0", "x-2/0"]
    # The wires were measured, so what was said of any two hosts is gone; four digits are kept.
    assert all("*" not in (link.source, link.target) for link in cluster.links)
    assert cluster.link("x-2", "y").bandwidth_bytes_per_s == 1e8
    assert cluster.link("x-2/0", "y/0").latency_ms == 0.02469
    assert cluster.link("y", "y").bandwidth_bytes_per_s == 1e9
