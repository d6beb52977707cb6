import socket

import pytest

from plait.errors import UsageError
from plait.worker import Place, free_port


def test_a_process_that_nobody_launched_is_alone():
    assert Place.from_environment({}) == Place(rank=0, world=1)


def test_the_contract_is_read_and_written():
    place = Place(rank=3, world=8, local_rank=1, local_world=2, address="10.0.0.1", port=1234)
    assert Place.from_environment(place.environment()) == place
    assert place.environment()["MASTER_PORT"] == "1234"


def test_it_is_read_from_the_process_where_no_environment_is_given(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Place.from_environment().rank == 1


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0), (0, -1)])
def test_a_rank_outside_its_world_is_refused(rank, world):
    with pytest.raises(UsageError, match=f"rank {rank} is not in a world of {world}"):
        Place(rank=rank, world=world)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_cannot_be_is_refused(port):
    with pytest.raises(UsageError, match=f"{port} is not a port"):
        Place(port=port)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"])
def test_a_variable_that_is_no_number_is_named(name):
    with pytest.raises(UsageError, match=f"{name}='two' is not a whole number"):
        Place.from_environment({name: "two"})


def test_a_free_port_can_be_bound():
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
