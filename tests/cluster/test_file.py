"""Cluster files: what is written is read back equal, and what is wrong is said with file and key."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.cluster import Cluster, Device, Host, Link, Tier
from plait.cluster.file import parse, to_toml
from plait.errors import FileError

EXAMPLE = """\
format = "plait.cluster/1"

[[hosts]]
name = "node0"
egress = "2gbit"

[[hosts]]
name = "node1"
address = "10.0.0.2"

[[devices]]
name = "node0/0"
host = "node0"
memory = "24GiB"
cores = [0, 1]
threads = 2
gflops = 118.5

[[devices]]
name = "node1/0"
host = "node1"
kind = "cuda"
memory = 8589934592

[[tiers]]
name = "disk"
host = "node0"
capacity = "1TiB"
read = "1.5GB/s"
write = "1.2GB/s"
directory = "/data"
direct = true

[[links]]
bandwidth = "1gbit"
latency = "40us"

[[links]]
from = "node1"
to = "node0"
bandwidth = "500mbit"
"""

CLUSTER = Cluster(
    hosts=(Host(name="node0", egress_bytes_per_s=2.5e8), Host(name="node1", address="10.0.0.2")),
    devices=(
        Device(name="node0/0", host="node0", memory_bytes=24 << 30, cores=(0, 1), threads=2, gflops=118.5),
        Device(name="node1/0", host="node1", kind="cuda", memory_bytes=8 << 30),
    ),
    tiers=(
        Tier(
            name="disk",
            host="node0",
            capacity_bytes=1 << 40,
            read_bytes_per_s=1.5e9,
            write_bytes_per_s=1.2e9,
            directory="/data",
            direct=True,
        ),
    ),
    links=(
        Link(bandwidth_bytes_per_s=1.25e8, latency_ms=0.04),
        Link(source="node1", target="node0", bandwidth_bytes_per_s=6.25e7),
    ),
)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(EXAMPLE)
    assert Cluster.load(path) == Cluster.load(str(path)) == CLUSTER


def test_a_file_is_written_in_human_units(tmp_path: Path) -> None:
    CLUSTER.save(tmp_path / "cluster.toml")
    text = (tmp_path / "cluster.toml").read_text()
    for line in ('memory = "24GiB"', 'bandwidth = "1gbit"', 'latency = "40us"', 'read = "1.5GB/s"'):
        assert line in text
    assert Cluster.load(tmp_path / "cluster.toml") == CLUSTER


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda name: name.strip() and name != "*"
)
# Any float for what is written as a bare number; a time passes through a unit, which keeps twelve digits.
figures = st.floats(1e-3, 1e15)
rates = st.floats(0.125, 1e15)
times = st.just(0.0) | st.floats(1e-6, 1e6).map(lambda time: float(f"{time:.9g}"))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    hosts = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    devices = draw(
        st.lists(names.filter(lambda name: name not in hosts), min_size=1, max_size=4, unique=True)
    )
    links = [Link(bandwidth_bytes_per_s=draw(rates), latency_ms=draw(times))]
    links += [Link(source=host, target=host, bandwidth_bytes_per_s=draw(rates)) for host in hosts]
    return Cluster(
        hosts=tuple(
            Host(name=name, address=draw(st.none() | names), egress_bytes_per_s=draw(st.none() | rates))
            for name in hosts
        ),
        devices=tuple(
            Device(
                name=name,
                host=draw(st.sampled_from(hosts)),
                kind=draw(st.sampled_from(["cpu", "cuda"])),
                memory_bytes=draw(st.integers(1, 1 << 50)),
                threads=draw(st.integers(1, 64)),
                gflops=draw(st.none() | figures),
                cores=(i,) if draw(st.booleans()) else (),
            )
            for i, name in enumerate(devices)
        ),
        tiers=tuple(
            Tier(
                name="disk",
                host=host,
                capacity_bytes=draw(st.integers(1, 1 << 50)),
                read_bytes_per_s=draw(st.none() | rates),
                write_bytes_per_s=draw(st.none() | rates),
                directory=draw(st.none() | names),
                direct=draw(st.none() | st.booleans()),
            )
            for host in hosts
        ),
        links=tuple(links),
    )


@given(cluster=clusters())
def test_what_is_written_is_read_back_equal(cluster: Cluster) -> None:
    assert parse(to_toml(cluster)) == cluster


@pytest.mark.parametrize(
    ("old", "new", "says", "works"),
    [
        # Wrong keys: named with their path, and the known ones are listed.
        (
            'memory = "24GiB"',
            'memroy = "24GiB"',
            "devices[0].memroy is not a key",
            "name, host, memory, kind",
        ),
        ("[[tiers]]", "[[teirs]]", "teirs is not a key", "format, hosts, devices, tiers, links"),
        ('latency = "40us"', 'lag = "40us"', "links[0].lag is not a key", "from, to, bandwidth, latency"),
        ('egress = "2gbit"', "[hosts.nic]", "hosts[0].nic is not a key", "name, address, egress"),
        # Missing ones.
        ('format = "plait.cluster/1"', "", "format is missing", 'format = "plait.cluster/1"'),
        ('memory = "24GiB"', "", "devices[0].memory is missing", None),
        # Values that cannot be.
        ("plait.cluster/1", "plait.cluster/9", "format: ", None),
        ('"24GiB"', '"lots"', "devices[0].memory: 'lots' is not a size", "2GiB"),
        ('"24GiB"', '"-24GiB"', "devices[0].memory: a size cannot be negative: '-24GiB'", "2GiB"),
        ('"24GiB"', "true", "devices[0].memory: True is neither", None),
        ('"24GiB"', "1.5", "devices[0].memory: 1.5 is neither", None),
        ('"1gbit"', '"-1gbit"', "links[0].bandwidth: a rate must be above zero: '-1gbit'", "1gbit"),
        ('"1gbit"', "0", "links[0].bandwidth: a rate must be above zero: 0", "1gbit"),
        ('"1gbit"', '"1"', "links[0].bandwidth: '1' has no unit of rate", "1gbit"),
        ('"1gbit"', '"1e-300B/s"', "links[0].bandwidth: '1e-300B/s' is less than the smallest rate", "1gbit"),
        ('"40us"', '"-40us"', "links[0].latency: a duration cannot be negative", "40us"),
        ('"1.2GB/s"', '"0MB/s"', "tiers[0].write: a rate must be above zero", "1gbit"),
        ("threads = 2", "threads = 0", "device 'node0/0' has 0 threads", "1"),
        ("threads = 2", 'threads = "2"', "devices[0].threads: ", None),
        ("threads = 2", "threads = 2.5", "devices[0].threads: ", None),
        ('kind = "cuda"', 'kind = "tpu"', "devices[1].kind: ", None),
        ("direct = true", 'direct = "yes"', "tiers[0].direct: ", None),
        # Things that do not fit together.
        ('host = "node1"', 'host = "node9"', "device 'node1/0' is on host 'node9'", "node0, node1"),
        ('to = "node0"', 'to = "node9"', "is on host 'node9', which is not there", "node0, node1"),
        ('from = "node1"\n', "", "names one end only", "both ends"),
    ],
)
def test_faults_name_file_and_key(tmp_path: Path, old: str, new: str, says: str, works: str | None) -> None:
    assert EXAMPLE.count(old) >= 1
    path = tmp_path / "cluster.toml"
    path.write_text(EXAMPLE.replace(old, new, 1))
    with pytest.raises(FileError) as caught:
        Cluster.load(path)
    assert caught.value.what.startswith(f"{path}: ")
    assert says in caught.value.what
    assert caught.value.setting
    if works is not None:
        assert works in str(caught.value.works)


def test_hosts_without_a_link_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(EXAMPLE.split("[[links]]")[0])
    with pytest.raises(FileError, match=r"cluster\.toml: host 'node1' cannot be reached from 'node0'"):
        Cluster.load(path)


@pytest.mark.parametrize("end", [EXAMPLE.index("24GiB") + 2, EXAMPLE.index("[0, 1]") + 3])
def test_a_truncated_file_is_named_with_the_line(tmp_path: Path, end: int) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(EXAMPLE[:end])
    line = EXAMPLE[:end].count("\n") + 1
    with pytest.raises(FileError, match=rf"cluster\.toml: is not TOML: .*at line {line}\b"):
        Cluster.load(path)


@given(end=st.integers(0, len(EXAMPLE)))
def test_any_truncation_is_a_cluster_or_a_file_error(end: int) -> None:
    with contextlib.suppress(FileError):
        parse(EXAMPLE[:end])


@pytest.mark.parametrize("value", ["[" * 5000 + "]" * 5000, "1" * 5000])
def test_a_file_beyond_the_parsers_limits_is_named(tmp_path: Path, value: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(f"format = {value}\n")
    with pytest.raises(FileError, match=r"cluster\.toml: cannot be read as TOML: ") as caught:
        Cluster.load(path)
    assert caught.value.setting == "cluster file"


def test_several_faults_are_counted() -> None:
    with pytest.raises(FileError, match="and 1 more fault"):
        parse(EXAMPLE.replace('"24GiB"', "true").replace('"1gbit"', "-1"))


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be written: No such file"):
        CLUSTER.save(tmp_path / "none" / "cluster.toml")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"none\.toml: cannot be read: No such file"):
        Cluster.load(tmp_path / "none.toml")
    with pytest.raises(FileError, match="cannot be read: Is a directory"):
        Cluster.load(tmp_path)
    (tmp_path / "picture.toml").write_bytes(b"\x89PNG\xff")
    with pytest.raises(FileError, match="is not UTF-8 text"):
        Cluster.load(tmp_path / "picture.toml")
