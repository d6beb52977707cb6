"""What workers in a lab run, and what a lab has left behind."""

from __future__ import annotations

import sys

from plait.lab import Lab
from plait.lab.label import Label
from plait.lab.leftover import members
from plait.lab.network import NAMESPACES

MEET = """
import os, socket
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    with socket.create_server(where) as server:
        print(sorted(server.accept()[0].recv(9).decode() for _ in range(world - 1)))
else:
    while True:
        try:
            socket.create_connection(where).sendall(f"rank {rank}".encode())
            break
        except ConnectionRefusedError:
            pass
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def left_of(lab: Lab) -> list[str]:
    label = Label.find(lab.label)
    assert label is not None
    spaces = NAMESPACES.iterdir() if NAMESPACES.exists() else []
    names = [path.name for path in spaces if path.name.startswith(lab.label)]
    groups = [
        str(host.memory.directory) for host in lab.hosts if host.memory and host.memory.directory.exists()
    ]
    return [*names, *groups, *map(str, members(label))]
