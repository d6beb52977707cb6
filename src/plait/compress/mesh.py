"""The links of one group of workers, and how they come about.

Workers meet through the group that torch.distributed already has: each opens a listening socket and
tells all others where. Then every pair connects, the later worker calling the earlier one: over TCP, or,
on one host, over a local socket on which both also pass the file of their arena, for the other to map. What
calls without knowing the listener's secret is turned away.

Why not torch's own point-to-point messages: these start to move only when the receiver has said that it is
ready, have no lengths to check, cannot be asked whether they arrived, and hang where a peer has died.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.compress.arena import Arena, Buffer, mapped
from plait.compress.link import ABORT, Frame, Link
from plait.compress.operation import Operation
from plait.errors import UsageError, WorkerError

_HELLO = struct.Struct("<16sI")
_UNSENT_BYTES = 128 << 10
"""The kernel takes so much beyond what is on its way: enough for the wire, little enough that what is
urgent, to another worker, does not wait behind it."""
_GREETING_S = 5.0
"""How long a caller may take to say who it is, before it is taken for a stranger."""


class Mesh:
    """A worker's links to all others of a group, and the operations under way on them."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        position: int,
        hosts: tuple[tuple[int, ...], ...],
        *,
        shared: bool = False,
    ) -> None:
        self.ranks = ranks
        """Everyone's rank in the world, by position in the group."""
        self.position = position
        self.hosts = hosts
        """The positions on each host."""
        self.links: dict[int, Link] = {}
        """By position."""
        self.arena = Arena(shared=shared)
        """The buffers of all messages; ``shared`` with workers of the same host."""
        self.submitted = 0
        """How many operations were ever handed in."""
        self.started = 0
        """How many of them were started."""
        self.active: dict[int, Operation] = {}
        """Those under way, by number."""

    @property
    def world(self) -> int:
        """How many workers there are."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This worker's rank in the world."""
        return self.ranks[self.position]

    # What the links ask of whoever takes their messages.

    def ready(self, link: Link, frame: Frame) -> bool:
        """Whether the operation of a message is under way; one that is over cannot be."""
        if frame.kind == ABORT or frame.operation in self.active:
            return True
        if frame.operation < self.started:
            link.lose(f"it sent a message for operation {frame.operation}, which is over")
        return False

    def room(self, link: Link, frame: Frame) -> Buffer:
        """Where the bytes of a message go."""
        if frame.kind == ABORT:
            return self.arena.take(frame.length)
        return self.active[frame.operation].room(link, frame)

    def deliver(self, link: Link, frame: Frame, buffer: Buffer) -> None:
        """Hand a message to its operation."""
        if frame.kind == ABORT:
            link.lose(bytes(buffer.view).decode(errors="replace"), told=True)
            buffer.drop()
            return
        self.active[frame.operation].deliver(link, frame, buffer)


@dataclass(frozen=True)
class _Card:
    """What a worker tells all others."""

    host: str
    address: str
    port: int
    local: str | None
    secret: bytes


def connect(group: Any, *, shared_memory: bool, timeout_s: float) -> Mesh:
    """Meet the other workers of a group; they all must call this, as they would any collective."""
    import torch.distributed as dist

    ranks = tuple(dist.get_process_group_ranks(group))
    position = ranks.index(dist.get_rank())
    address = own_address()
    with ExitStack() as stack:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = stack.enter_context(socket.create_server((address, 0), family=family, backlog=len(ranks)))
        secret = secrets.token_bytes(16)
        local = f"plait-{secrets.token_hex(16)}" if shared_memory else None
        local_server = stack.enter_context(_local_server(local, len(ranks)))
        card = _Card(host_identity(), address, server.getsockname()[1], local, secret)
        cards: list[Any] = [None] * len(ranks)
        dist.all_gather_object(cards, card, group=group)
        near = {other for other in range(len(ranks)) if other != position and _near(cards[other], card)}
        mesh = Mesh(ranks, position, _hosts(cards), shared=bool(near))
        deadline = time.monotonic() + timeout_s
        called = [_call(mesh, other, cards[other], card, deadline) for other in range(position)]
        waiting = set(range(position + 1, len(ranks)))
        for listening, expected in ((server, waiting - near), (local_server, waiting & near)):
            while expected:
                link = _answer(mesh, listening, expected, card, deadline)
                expected.discard(link.position)
                mesh.links[link.position] = link
        # Only now: a worker answers when it has called all others, so nobody waits for one who waits.
        for other, connection in enumerate(called):
            mesh.links[other] = _answered(mesh, other, connection)
    mesh.links = dict(sorted(mesh.links.items()))
    mesh.arena.close()  # everyone who needs it has mapped it
    return mesh


def _hosts(cards: list[_Card]) -> tuple[tuple[int, ...], ...]:
    found: dict[str, list[int]] = {}
    for position, card in enumerate(cards):
        found.setdefault(card.host, []).append(position)
    return tuple(tuple(positions) for positions in found.values())


def _near(one: _Card, other: _Card) -> bool:
    """Whether two workers share memory."""
    return one.host == other.host and one.local is not None and other.local is not None


def _local_server(name: str | None, backlog: int) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    if name is not None:
        server.bind("\0" + name)
        server.listen(backlog)
    return server


def _call(mesh: Mesh, other: int, theirs: _Card, mine: _Card, deadline: float) -> socket.socket:
    """Connect to an earlier worker."""
    near = _near(theirs, mine)
    hello = _HELLO.pack(theirs.secret, mesh.position)
    left = max(0.1, deadline - time.monotonic())
    try:
        if near:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(left)
            connection.connect("\0" + str(theirs.local))
            _send_arena(connection, hello, mesh.arena)
        else:
            connection = socket.create_connection((theirs.address, theirs.port), timeout=left)
            connection.sendall(hello)
    except OSError as error:
        where = "on this host" if near else f"at {theirs.address}:{theirs.port}"
        raise WorkerError(
            f"rank {mesh.rank} cannot reach rank {mesh.ranks[other]} {where}: {error}",
            setting="GLOO_SOCKET_IFNAME, MASTER_ADDR",
            works="a network device through which the hosts reach each other",
        ) from None
    return connection


def _answered(mesh: Mesh, other: int, connection: socket.socket) -> Link:
    """The link to an earlier worker that was called; one on this host answers with its arena."""
    descriptor: int | None = None
    if connection.family == socket.AF_UNIX:
        try:
            answer, descriptor = _receive_arena(connection, 1)
        except OSError as error:
            answer, reason = b"", str(error)
        else:
            reason = "it hung up"
        if not answer:
            raise WorkerError(f"rank {mesh.ranks[other]} did not answer rank {mesh.rank}: {reason}")
    return _link(mesh, connection, other, descriptor)


def _answer(mesh: Mesh, server: socket.socket, expected: set[int], mine: _Card, deadline: float) -> Link:
    """Wait until a later worker has connected, and turn strangers away."""
    near = server.family == socket.AF_UNIX
    while True:
        server.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            missing = ", ".join(str(mesh.ranks[position]) for position in sorted(expected))
            raise WorkerError(
                f"rank {mesh.rank} was not called by ranks {missing} in time",
                setting="timeout_s",
                works="60",
            ) from None
        connection.settimeout(_GREETING_S)
        descriptor: int | None = None
        with suppress(OSError, struct.error):
            if near:
                hello, descriptor = _receive_arena(connection, _HELLO.size)
            else:
                hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
            secret, position = _HELLO.unpack(hello)
            if secrets.compare_digest(secret, mine.secret) and position in expected:
                if near:
                    _send_arena(connection, b"!", mesh.arena)
                return _link(mesh, connection, position, descriptor)
        connection.close()
        if descriptor is not None:
            os.close(descriptor)


def _send_arena(connection: socket.socket, message: bytes, arena: Arena) -> None:
    assert arena.descriptor is not None, "workers on one host share their arenas"
    socket.send_fds(connection, [message], [arena.descriptor])


def _receive_arena(connection: socket.socket, size: int) -> tuple[bytes, int | None]:
    message, descriptors, _, _ = socket.recv_fds(connection, size, 1)
    return message, descriptors[0] if descriptors else None


def _link(mesh: Mesh, connection: socket.socket, position: int, descriptor: int | None) -> Link:
    foreign: Tensor | None = None
    if descriptor is not None:
        foreign = mapped(descriptor)
        os.close(descriptor)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    return Link(connection, rank=mesh.ranks[position], position=position, foreign=foreign)


def host_identity() -> str:
    """What workers on the same host, and only these, have in common: machine, name and network."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        parts.append(str(os.stat("/proc/self/ns/net").st_ino))
    return "/".join(parts)


def own_address() -> str:
    """Where other workers reach this one.

    The address of the device that GLOO_SOCKET_IFNAME names, as for torch's own gloo; else the one from
    which MASTER_ADDR is reached.
    """
    device = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    if device:
        return _address_of(device)
    master = os.environ.get("MASTER_ADDR") or socket.gethostname()
    with suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # sends nothing; the kernel picks the way, and with it the address
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def _address_of(device: str) -> str:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", device.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise UsageError(
                f"the network device {device!r} has no address: {error.strerror}",
                setting="GLOO_SOCKET_IFNAME",
                works=f"one of {names}",
            ) from None
    return socket.inet_ntoa(answer[20:24])
