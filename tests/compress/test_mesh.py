import socket
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from plait.compress import mesh
from plait.compress.collectives import all_reduce
from plait.errors import UsageError, WorkerError


def test_a_worker_is_reached_at_the_device_that_gloo_uses(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert mesh.own_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    with pytest.raises(UsageError, match="'nothing0' has no address") as caught:
        mesh.own_address()
    assert caught.value.setting == "GLOO_SOCKET_IFNAME"
    assert "lo" in caught.value.works


def test_or_on_the_way_to_the_master(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert mesh.own_address() == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "no.such.name.invalid")
    assert mesh.own_address() == "127.0.0.1"


def test_processes_of_one_host_have_one_identity(ranks):
    one, other = ranks(2, mesh.host_identity, group=False)
    assert one == other == mesh.host_identity()


def test_and_hosts_with_other_names_another(monkeypatch):
    here = mesh.host_identity()
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    assert mesh.host_identity() != here


def bothered():
    """Rank 0 is called by strangers before and while the others call it; some say nothing, and stay."""
    mesh._GREETING_S = 60.0
    connections, create = [], socket.create_server

    def create_and_call(address, **rest):
        server = create(address, **rest)
        for text in (b"GET / HTTP/1.0\r\n\r\n", b"\0" * 20, b"\0" * 5, b""):
            for silent in (False, True):
                connection = socket.create_connection(server.getsockname())
                connection.sendall(text)
                if not silent:
                    connection.shutdown(socket.SHUT_WR)
                connections.append(connection)
        return server

    if dist.get_rank() == 0:
        socket.create_server = create_and_call
    met = mesh.connect(dist.group.WORLD, shared_memory=False, timeout_s=20)
    assert connections == [] or connections[1].recv(1) == b"", "hung up on"
    return [(link.position, link.rank, link.shared) for link in met.links.values()], met.hosts


def test_strangers_are_turned_away(ranks):
    zero, one, two = ranks(3, bothered)
    assert zero == ([(1, 1, False), (2, 2, False)], ((0, 1, 2),))
    assert one == ([(0, 0, False), (2, 2, False)], ((0, 1, 2),))
    assert two == ([(0, 0, False), (1, 1, False)], ((0, 1, 2),))


def meet(shared_memory):
    met = mesh.connect(dist.group.WORLD, shared_memory=shared_memory, timeout_s=20)
    return {link.connection.family for link in met.links.values()}, {
        link.shared for link in met.links.values()
    }


def test_neighbours_share_memory_unless_told_not_to(ranks):
    assert ranks(3, meet, True) == [({socket.AF_UNIX}, {True})] * 3
    assert ranks(2, meet, False) == [({socket.AF_INET}, {False})] * 2


def test_a_stranger_that_says_nothing_is_turned_away_in_time():
    server = socket.create_server(("127.0.0.1", 0))
    caller = socket.create_connection(server.getsockname())
    mesh_of_two = mesh.Mesh((4, 7), 0, ((0, 1),))
    reception = mesh._Reception(mesh_of_two, {server: {1}}, bytes(16))
    with server, caller:
        with pytest.raises(WorkerError, match="rank 4 was not called by rank 7 in time"):
            list(reception.links(time.monotonic() + 1.0))
        assert caller.recv(1) == b""


def absent():
    """Rank 1 comes to nothing."""
    if dist.get_rank() == 1:
        return None
    try:
        mesh.connect(dist.group.WORLD, shared_memory=True, timeout_s=1.5)
    except WorkerError as error:
        return error.what, error.setting


def test_one_that_does_not_come_is_named(ranks):
    outcomes = ranks(3, absent)
    for rank in (0, 2):
        what, setting = outcomes[rank]
        assert what.startswith("rank 1 did not come to connect: rank ")
        assert setting == "timeout_s"


def test_who_cannot_be_reached_is_named(ranks):
    messages = ranks(2, late)
    assert "rank 0 was not called by rank 1 in time" in messages[0]
    assert messages[1] == "late"


def late():
    """Rank 1 takes part in the exchange of addresses, and never calls."""
    if dist.get_rank() == 1:
        mesh._call = lambda *_: (_ for _ in ()).throw(WorkerError("late"))
    try:
        mesh.connect(dist.group.WORLD, shared_memory=False, timeout_s=2)
    except WorkerError as error:
        return error.what
    return "met"


def hung_up():
    """Rank 1 calls where nobody listens."""
    if dist.get_rank() == 1:
        real = mesh._call
        mesh._call = lambda met, other, card, *rest: real(met, other, replace(card, port=1), *rest)
    try:
        mesh.connect(dist.group.WORLD, shared_memory=False, timeout_s=2)
    except WorkerError as error:
        return error.what
    return "met"


def test_who_cannot_reach_another_says_so(ranks):
    zero, one = ranks(2, hung_up)
    assert "rank 0 was not called by rank 1 in time" in zero
    assert "rank 1 cannot reach rank 0 at 127.0.0.1:1: " in one


def once_for_each_group():
    before = len(dist.get_process_group_ranks(dist.group.WORLD))
    calls, real = [], mesh.connect
    from plait.compress import communicator

    communicator.connect = lambda group, **rest: calls.append(1) or real(group, **rest)
    for _ in range(3):
        all_reduce(torch.ones(10))
    same_ranks = dist.new_group(list(range(before)))
    all_reduce(torch.ones(10), group=same_ranks)
    reversed_pair = dist.new_group([1, 0])
    tensor = torch.full((10,), float(dist.get_rank()))
    all_reduce(tensor, group=reversed_pair)
    return len(calls), tensor[0].item()


def test_workers_meet_once_for_each_set_of_ranks(ranks):
    results = ranks(2, once_for_each_group)
    assert results[0] == results[1]
    # Torch may keep the order in which the ranks of the third group were given; then it is one more.
    assert results[0] in [(1, 1.0), (2, 1.0)]
