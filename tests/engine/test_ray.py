"""Workers on a real Ray cluster: two nodes of a CPU each on this machine, with authentication."""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from plait import reference
from plait.cluster import Cluster, Device, Host, Link
from plait.engine.launcher import LOST, MODULE
from plait.engine.ray_cluster import cluster_of, ray_cluster
from plait.engine.ray_connection import Node
from plait.engine.ray_launcher import RayLauncher
from plait.engine.result import JobResult
from plait.engine.task import Task
from plait.errors import FileError, UsageError
from plait.worker import Place
from reference_jobs import job

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

PROGRAM = """
import os, signal, subprocess, sys, time

what = sys.argv[1]
if what == "say":
    print(sys.argv[2], os.environ["RANK"], os.environ.get("PLAIT_HERE"), os.getcwd())
    sys.exit(3)
if what == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    child = subprocess.Popen(["sleep", "600"])
    print("pids", os.getppid(), os.getpid(), child.pid, flush=True)
    time.sleep(600)
"""


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(found, what, seconds=240):
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, f"{what} has not come about in {seconds} s"
        time.sleep(0.01)
    return value


def ended(worker):
    until(lambda: worker.poll() is not None, f"the end of the worker on {worker.name}")
    return worker.poll()


def pids(log):
    """Of the actor, the worker and the worker's child, once the worker has said so."""

    def said():
        lines = log.read_text().split("\n")[:-1]  # whole ones
        return [line.split()[1:] for line in lines if line.startswith("pids")]

    return [int(pid) for pid in until(said, f"the first word in {log}")[-1]]


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory):
    """A token and a program of these tests' own, and nothing that the user has set."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "part.py").write_text(PROGRAM)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH"):
            patch.delenv(name, raising=False)
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(16))
        patch.syspath_prepend(folder)
        ray._raylet.Config.initialize("")  # it has read the variables when it was imported
        yield


@pytest.fixture(scope="module")
def nodes(surroundings):
    made = cluster_utils.Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False},
    )
    made.add_node(num_cpus=1)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def both(nodes):
    """The two nodes as a cluster."""
    return ray_cluster(nodes.address, bandwidth="1gbit", latency="40us")


@pytest.fixture
def launch(nodes, both):
    """Launchers on the cluster, closed at the end."""
    made = []

    def launch(cluster=both, program="part", **settings):
        made.append(RayLauncher(cluster, address=nodes.address, program=program, **settings))
        return made[-1], [device.name for device in cluster.devices]

    yield launch
    for launcher in made:
        launcher.close()


def start(launcher, device, log, *arguments, **environment):
    return launcher.start(arguments, device=device, environment={"RANK": "0", **environment}, log=log)


def test_nodes_become_a_cluster(nodes, both):
    assert len(both.hosts) == len(both.devices) == 2
    assert {device.kind for device in both.devices} == {"cpu"}
    assert all(device.memory_bytes > 2**20 for device in both.devices)
    assert both.link(*(host.name for host in both.hosts)).latency_ms == 0.04
    assert not ray.is_initialized()
    with pytest.raises(UsageError, match=r"between its 2 nodes.*bandwidth.*works: 1gbit"):
        ray_cluster(nodes.address)


def test_without_a_cluster_all_nodes_are_taken_and_measured(nodes, tmp_path):
    launcher = RayLauncher(address=nodes.address, program="part", memory_bytes=2**30)
    try:
        cluster = launcher.cluster
        assert launcher.available() == {device.name for device in cluster.devices}
        assert {device.memory_bytes for device in cluster.devices} == {2**30}
        assert all(tier.read_bytes_per_s > 0 for tier in cluster.tiers)
        one, other = (host.name for host in cluster.hosts)
        ends = {(link.source, link.target) for link in cluster.links}
        assert ends == {(one, one), (one, other), (other, one), (other, other)}  # each measured, none made up
        assert ended(start(launcher, cluster.devices[1].name, tmp_path / "log", "say", "hello")) == 3
    finally:
        launcher.close()


def test_workers_start_say_what_they_print_and_end(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("PLAIT_HERE", "taken along")
    monkeypatch.setenv("HOME_OF_THE_DRIVER", "left behind")
    before = signal.getsignal(signal.SIGTERM)
    launcher, devices = launch()
    assert signal.getsignal(signal.SIGTERM) is before
    assert launcher.available() == set(devices)
    with launcher.listen() as listening:
        assert listening.getsockname()[0] == launcher.reach()
        assert launcher.reach() == launcher.meeting(devices[0])[0]
    logs = [tmp_path / f"{i}.log" for i in range(3)]
    logs[0].write_text("before\n")
    workers = [
        start(launcher, device, log, "say", "hello", RANK=log.stem)
        for device, log in zip(devices, logs, strict=False)
    ]
    assert [ended(worker) for worker in workers] == [3, 3]
    assert logs[0].read_text() == f"before\nhello 0 taken along {os.getcwd()}\n"
    assert logs[1].read_text() == f"hello 1 taken along {os.getcwd()}\n"

    two = [start(launcher, devices[0], log, "wait") for log in logs[1:]]  # on one device
    started = [pids(log) for log in logs[1:]]
    two[0].terminate()
    assert ended(two[0]) == 75
    assert two[1].poll() is None
    two[1].kill()
    assert two[1].poll() == -signal.SIGKILL
    for actor, worker, child in started:
        assert lives(actor)
        until(
            lambda worker=worker, child=child: not lives(worker) and not lives(child),
            "the end of its processes",
        )
    two[1].kill()
    two[1].terminate()  # of one that has ended: nothing


def test_the_workers_of_a_task_train_together_on_two_nodes(launch, tmp_path):
    small = job(precision="fp64")
    launcher, devices = launch(program=MODULE)
    folder = tmp_path / "tasks" / "small"
    folder.mkdir(parents=True)
    jobs = (small.to_json(),)
    Task(name="small", kind="train", strategy="data", jobs=jobs, devices=tuple(devices)).save(folder)
    address, port = launcher.meeting(devices[0])
    workers, logs = [], [tmp_path / f"{rank}.log" for rank in range(2)]
    for rank, device in enumerate(devices):
        place = Place(rank=rank, world=2, address=address, port=port)
        workers.append(
            launcher.start([str(folder)], device=device, environment=place.environment(), log=logs[rank])
        )
    assert [ended(worker) for worker in workers] == [0, 0], logs[0].read_text() + logs[1].read_text()
    losses = JobResult.load(tmp_path / "jobs" / "small").losses
    assert losses == pytest.approx(reference.train(small).losses, rel=1e-10)


def test_a_lost_actor_takes_its_worker_along_and_comes_back(launch, tmp_path):
    launcher, (one, other) = launch(return_s=0.2)
    lost, well = (
        start(launcher, one, tmp_path / "one", "wait"),
        start(launcher, other, tmp_path / "other", "wait"),
    )
    actor, worker, child = pids(tmp_path / "one")
    pids(tmp_path / "other")
    os.kill(actor, signal.SIGKILL)
    assert ended(lost) == LOST
    until(lambda: not lives(worker) and not lives(child), "the end of what the actor had started")
    lost.kill()
    until(lambda: one in launcher.available(), "the device's return")
    assert well.poll() is None
    assert ended(start(launcher, one, tmp_path / "again", "say", "again")) == 3


def test_what_a_launcher_took_is_given_back(nodes, both, launch, tmp_path):
    launcher, devices = launch()
    worker = start(launcher, devices[0], tmp_path / "log", "wait")
    actor, *started = pids(tmp_path / "log")
    with pytest.raises(UsageError, match=r"no device 'nowhere'"):
        start(launcher, "nowhere", tmp_path / "log", "say")
    with pytest.raises(FileError, match="cannot be written"):
        start(launcher, devices[0], tmp_path / "none" / "log", "say")
    launcher.close()
    assert worker.poll() == -signal.SIGKILL
    assert not ray.is_initialized()
    assert launcher.available() == frozenset()
    launcher.close()
    until(lambda: not any(lives(pid) for pid in (actor, *started)), "the end of all processes")
    ray.init(nodes.address, log_to_driver=False)
    try:
        until(lambda: ray.available_resources().get("CPU") == 2, "the return of all CPUs")
        groups = ray.util.placement_group_table().values()
        assert {group["state"] for group in groups} == {"REMOVED"}
        # A connection of the user's own is used, and stays.
        own = RayLauncher(both, program="part")
        assert ended(start(own, devices[1], tmp_path / "own", "say", "hello")) == 3
        with pytest.raises(UsageError, match="is connected to Ray at"):
            RayLauncher(both, address="127.0.0.1:1")
        own.close()
        assert ray.is_initialized()
    finally:
        ray.shutdown()


def test_bad_input_is_refused_before_anything_starts(nodes, both, monkeypatch):
    cluster = both
    wide = Cluster(
        hosts=cluster.hosts,
        devices=[Device(name="wide", host=cluster.hosts[0].name, memory_bytes=1, threads=2)],
        links=cluster.links,
    )
    with pytest.raises(UsageError, match="need 2 CPUs, and Ray has 1 there"):
        RayLauncher(wide, address=nodes.address)
    unknown = Cluster.uniform(hosts=1, memory="1GiB", bandwidth="1gbit")
    with pytest.raises(UsageError, match="'node0' is 0 of Ray's 2 nodes"):
        RayLauncher(unknown, address=nodes.address)
    assert not ray.is_initialized()
    with pytest.raises(UsageError, match="Ray's client"):
        RayLauncher(cluster, address="ray://127.0.0.1:10001")
    with pytest.raises(UsageError, match=r"nobody answers at 127\.0\.0\.1:1"):
        RayLauncher(cluster, address="127.0.0.1:1")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(UsageError, match=r"'disabled'.*works: token"):
        RayLauncher(cluster)
    assert not ray.is_initialized()


def test_a_lost_node_is_no_longer_available_and_the_rest_goes_on(nodes, launch, tmp_path):
    node = nodes.add_node(num_cpus=1)
    launcher, devices = launch(ray_cluster(nodes.address, bandwidth="1gbit"), return_s=None)
    assert len(devices) == 3
    [there] = [name for name in devices if node.node_id[:8] in name]
    here = next(name for name in devices if name != there)
    lost, well = (
        start(launcher, there, tmp_path / "there", "wait"),
        start(launcher, here, tmp_path / "here", "wait"),
    )
    _, worker, child = pids(tmp_path / "there")
    nodes.remove_node(node, allow_graceful=False)
    assert ended(lost) == LOST
    assert launcher.available() == set(devices) - {there}
    assert start(launcher, there, tmp_path / "again", "say", "again").poll() == LOST
    assert launcher.meeting(there)[1] > 0
    until(lambda: not lives(worker) and not lives(child), "the end of what the node had started")
    assert well.poll() is None
    assert ended(start(launcher, here, tmp_path / "again", "say", "again")) == 3


STRANGER = "import ray; ray.init({address!r}, log_to_driver=False); print(ray.cluster_resources())"


@pytest.fixture
def short(monkeypatch):
    """A folder for what is temporary whose path leaves room for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="pt-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_a_cluster_of_our_own_lets_nobody_else_in_and_leaves_nothing(tmp_path, short):
    cluster = Cluster.uniform(hosts=2, memory="1GiB", bandwidth="1gbit")  # any: all are on this machine
    here = ray_cluster(bandwidth="1gbit", memory="1GiB")
    assert len(here.hosts) == 1
    assert len(here.devices) == len(os.sched_getaffinity(0))
    launcher = RayLauncher(cluster, program="part")
    try:
        assert launcher.reach() == "127.0.0.1"
        assert launcher.available() == {"node0/0", "node1/0"}
        worker = start(launcher, "node1/0", tmp_path / "log", "say", "hello")
        address = ray.get_runtime_context().gcs_address
        stranger = subprocess.run(
            [sys.executable, "-c", STRANGER.format(address=address)],
            env={**os.environ, "RAY_AUTH_TOKEN": "guessed", "RAY_NUM_REDIS_GET_RETRIES": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert stranger.returncode != 0
        assert "InvalidAuthToken" in stranger.stderr
        assert ended(worker) == 3
        assert len(list(short.iterdir())) == 1
    finally:
        launcher.close()
    assert not ray.is_initialized()
    assert not list(short.iterdir())


def test_nodes_with_gpus_give_a_device_for_each():
    def node(i, gpus, cpus=4.0):
        return Node(
            name=f"n{i}", number=f"{i}", address=f"10.0.0.{i}", cpus=cpus, gpus=gpus, memory_bytes=2**30
        )

    some = [node(0, 0.0), node(1, 2.0)]
    cluster = cluster_of(some, memory="24GiB")
    assert cluster.hosts == (Host(name="n1", address="10.0.0.1"),)
    assert [device.name for device in cluster.devices] == ["n1/cuda0", "n1/cuda1"]
    assert {device.memory_bytes for device in cluster.devices} == {24 * 2**30}
    with pytest.raises(UsageError, match=r"how much memory a GPU has.*works: 24GiB"):
        cluster_of(some)

    cpus = cluster_of(some, kind="cpu", threads=2, bandwidth="1gbit")
    assert [device.threads for device in cpus.devices] == [2] * 4
    assert {device.memory_bytes for device in cpus.devices} == {2**29}
    any_two = Link(bandwidth_bytes_per_s=1.25e8)
    within = [replace(any_two, source=name, target=name) for name in ("n0", "n1")]
    assert cpus.links == (any_two, *within)
    with pytest.raises(UsageError, match="n0 has 4, n1 has 4"):
        cluster_of(some, kind="cpu", threads=8)
    with pytest.raises(UsageError, match="devices of 0 CPUs"):
        cluster_of(some, threads=0)
