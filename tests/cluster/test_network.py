"""The network between hosts: who meets whom, real meetings on loopback, and what can go wrong."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.cluster.network import Meeting, meet, meeting_port, rounds
from plait.cluster.stream import receive, send, within_host
from plait.errors import UsageError, WorkerError
from plait.worker import Place, free_port


@given(count=st.integers(1, 12), at_once=st.integers(1, 7))
def test_every_ordered_pair_meets_once(count: int, at_once: int) -> None:
    found = rounds(count, at_once)
    assert sorted(pair for some in found for pair in some) == sorted(permutations(range(count), 2))
    for some in found:
        assert len(some) <= at_once
        hosts = [host for pair in some for host in pair]
        assert len(set(hosts)) == len(hosts)


def test_the_drawing_of_rounds() -> None:
    unordered = [some for some in rounds(4, 2) if some[0][0] == 0]
    assert unordered == [[(0, 3), (1, 2)], [(0, 2), (3, 1)], [(0, 1), (2, 3)]]


def gather(
    places: Sequence[Place], take_part: Callable[[Place], Any], timeout_s: float = 30.0
) -> list[Future[Any]]:
    with ThreadPoolExecutor(len(places)) as pool:
        futures = [pool.submit(take_part, place) for place in places]
        for future in futures:
            future.exception(timeout_s)
    return futures


@pytest.mark.parametrize(("world", "at_once"), [(2, 1), (4, 2)])
def test_all_ranks_return_the_same_meeting(port: int, world: int, at_once: int) -> None:
    def take_part(place: Place) -> Meeting:
        return meet(place, {"name": f"host{place.rank}"}, seconds=0.02, at_once=at_once, timeout_s=20.0)

    places = [Place(rank=rank, world=world, port=port) for rank in range(world)]
    meetings = [future.result() for future in gather(places, take_part)]
    assert all(meeting == meetings[0] for meeting in meetings)
    assert meetings[0].brought == tuple({"name": f"host{rank}"} for rank in range(world))
    assert meetings[0].addresses == ("127.0.0.1",) * world
    pairs = [(wire.source, wire.target) for wire in meetings[0].wires]
    assert sorted(pairs) == sorted(permutations(range(world), 2))
    assert all(wire.bandwidth_bytes_per_s > 0 and wire.latency_ms > 0 for wire in meetings[0].wires)


def test_one_rank_of_a_host_measures_and_the_others_wait(port: int) -> None:
    def take_part(place: Place) -> Meeting:
        return meet(place, place.rank, seconds=0.02, timeout_s=20.0)

    places = [Place(rank=r, world=4, local_rank=r % 2, local_world=2, port=port) for r in range(4)]
    meetings = [future.result() for future in gather(places, take_part)]
    assert all(meeting == meetings[0] for meeting in meetings)
    assert meetings[0].brought == (0, 2)
    assert [(wire.source, wire.target) for wire in meetings[0].wires] == [(0, 1), (1, 0)]


def test_a_world_of_one_meets_nobody(port: int) -> None:
    meeting = meet(Place(port=port), "alone", seconds=0.02)
    assert (meeting.brought, meeting.wires) == (("alone",), ())


def test_strangers_on_the_port_are_ignored(port: int) -> None:
    def take_part(place: Place) -> Meeting:
        return meet(place, None, seconds=0.02, timeout_s=20.0)

    def intrude() -> None:
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b"\n", b""):
            while True:
                try:
                    with socket.create_connection(("127.0.0.1", port)) as stranger:
                        stranger.sendall(words)
                    break
                except ConnectionRefusedError:
                    continue

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(take_part, Place(rank=0, world=2, port=port))
        intrude()
        second = pool.submit(take_part, Place(rank=1, world=2, port=port))
        assert len(first.result(30).wires) == len(second.result(30).wires) == 2


def test_ranks_that_do_not_come_are_named(port: int) -> None:
    def take_part(place: Place) -> Meeting:
        return meet(place, None, seconds=0.02, timeout_s=0.5)

    came = [Place(rank=rank, world=4, port=port) for rank in (0, 2)]
    for future in gather(came, take_part):
        with pytest.raises(WorkerError, match=r"of 4 ranks these did not come within 0\.5 s: 1, 3"):
            future.result()


def test_a_rank_without_rank_0_says_where_it_looked() -> None:
    with pytest.raises(WorkerError, match=r"rank 1 cannot reach rank 0 at 127\.0\.0\.1:\d+") as caught:
        meet(Place(rank=1, world=2, port=free_port()), None, seconds=0.02, timeout_s=0.2)
    assert caught.value.setting == "MASTER_ADDR, MASTER_PORT"


def guest(port: int, hello: dict[str, Any], orders: int) -> list[Any]:
    """Another rank, by hand: says hello, hears that many orders, and dies."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as line:
        line.sendall(
            json.dumps({"rank": 1, "world": 2, "port": 9, "measures": True} | hello).encode() + b"\n"
        )
        reader = line.makefile("rb")
        return [json.loads(reader.readline()) for _ in range(orders)]


def with_guest(port: int, hello: dict[str, Any], orders: int) -> tuple[str, list[Any]]:
    """Rank 0's error and what the guest heard."""
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, Place(world=2, port=port), None, seconds=0.02, timeout_s=2.0)
        while True:
            try:
                heard = guest(port, hello, orders)
                break
            except ConnectionRefusedError:
                continue
        return str(first.exception(30)), heard


def test_a_rank_that_dies_ends_the_meeting(port: int) -> None:
    error, heard = with_guest(port, {}, orders=1)
    assert heard[0]["do"] == "receive"
    assert "rank 1" in error
    assert "ended" in error or "lost" in error or "cannot be reached" in error


def test_a_host_that_cannot_be_reached_is_named_with_its_address(port: int) -> None:
    closed = free_port()
    error, heard = with_guest(port, {"port": closed}, orders=2)
    assert heard[1]["do"] == "stop"
    assert f"127.0.0.1:{closed} cannot be reached" in error
    assert "from rank 0 to rank 1" in error


@pytest.mark.parametrize(
    ("hello", "says"),
    [
        ({"world": 3}, "rank 1 of 3 came from 127.0.0.1 to a world of 2"),
        ({"rank": 5}, "rank 5 of 2 came"),
        ({"rank": 0}, "a second time"),
    ],
)
def test_ranks_that_disagree_end_the_meeting(port: int, hello: dict[str, Any], says: str) -> None:
    error, heard = with_guest(port, hello, orders=1)
    assert says in error
    assert heard[0]["do"] == "stop"


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("", 0)) as taken:
        with pytest.raises(UsageError, match="rank 0 cannot listen on port") as caught:
            meet(Place(world=2, port=taken.getsockname()[1]), None)
        assert caught.value.setting == "MASTER_PORT"


@pytest.mark.parametrize(
    "settings", [{"seconds": 0.0}, {"seconds": 70.0}, {"timeout_s": 0.1}, {"at_once": 0}, {"seconds": -1.0}]
)
def test_impossible_settings_are_refused(settings: dict[str, Any], port: int) -> None:
    with pytest.raises(UsageError):
        meet(Place(port=port), None, **settings)


def test_under_torchrun_the_next_port_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(port=29500)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert meeting_port(place) == 29500
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert meeting_port(place) == 29501


def test_a_receiver_whom_nobody_calls_gives_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(WorkerError, match="no sender came"):
        receive(server, seconds=0.02, timeout_s=0.1)


def test_a_sender_that_stops_short_is_noticed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet_and_leave() -> None:
            with socket.create_connection(server.getsockname()) as connection:
                connection.sendall(b"plait.cluster/stream.")

        thread = threading.Thread(target=greet_and_leave)
        thread.start()
        with pytest.raises(WorkerError, match="the sender was lost"):
            receive(server, seconds=0.02, timeout_s=5.0)
        thread.join()


def test_a_receiver_that_is_not_there_is_noticed() -> None:
    with pytest.raises(WorkerError, match="cannot be reached"):
        send("127.0.0.1", free_port(), timeout_s=1.0)


def test_within_a_host() -> None:
    bandwidth, latency_ms = within_host(seconds=0.02, timeout_s=20.0)
    assert bandwidth > 0
    assert latency_ms > 0


def test_processes_under_the_torchrun_contract_describe_one_cluster(port: int, tmp_path: Any) -> None:
    command = [sys.executable, "-m", "plait.cluster", "--parts", "network", "--seconds", "0.02", "--json"]
    command += ["--devices", "1", "--directory", str(tmp_path), "--save", str(tmp_path / "cluster.toml")]
    workers = [
        subprocess.Popen(
            command,
            env=os.environ | Place(rank=rank, world=3, port=port).environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    outputs = [worker.communicate(timeout=60)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert outputs[1:] == ["", ""]
    described = json.loads(outputs[0])
    assert described["format"] == "plait.cluster/1"

    from plait.cluster import Cluster

    cluster = Cluster.load(tmp_path / "cluster.toml")
    # The processes are on one machine, so the hosts need numbers to tell them apart.
    name = socket.gethostname()
    assert [host.name for host in cluster.hosts] == [f"{name}-{i}" for i in range(3)]
    assert [device.name for device in cluster.devices] == [f"{name}-{i}/0" for i in range(3)]
    assert len(cluster.links) == 3 * 2 + 3
    assert [link["bandwidth_bytes_per_s"] for link in described["links"]] == [
        link.bandwidth_bytes_per_s for link in cluster.links
    ]
    assert cluster.host(f"{name}-1").address == "127.0.0.1"


@pytest.mark.parametrize("save", ["/tmp", "/proc/x", "/etc/passwd/x"])
def test_a_file_that_cannot_be_written_is_refused_before_measuring(save: str) -> None:
    # Measuring for longer than anybody waits: the answer must come before it.
    command = [sys.executable, "-m", "plait.cluster", "--parts", "memory", "--seconds", "1e6", "--save", save]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"plait.cluster: {save} cannot be written: ")
    assert len(done.stderr.splitlines()) == 1


def test_what_was_measured_is_printed_before_a_file_fails() -> None:
    command = [sys.executable, "-m", "plait.cluster", "--parts", "memory", "--seconds", "0.01"]
    done = subprocess.run([*command, "--save", "/dev/full"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert 'format = "plait.cluster/1"' in done.stdout
    assert "/dev/full: cannot be written: No space left on device" in done.stderr


def test_a_command_that_fails_says_so_in_one_line(port: int) -> None:
    command = [sys.executable, "-m", "plait.cluster", "--parts", "network", "--seconds", "0.02"]
    missing = Place(rank=1, world=2, port=port).environment()
    done = subprocess.run(
        [*command, "--timeout", "3s"], env=os.environ | missing, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith("plait.cluster: rank 1 cannot reach rank 0")
    done = subprocess.run([*command, "--devices", "0"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
