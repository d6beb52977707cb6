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
import selectors
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.compress.agreement import gather, named
from plait.compress.arena import Arena, Buffer, mapped
from plait.compress.link import ABORT, Frame, Link
from plait.compress.operation import Operation
from plait.errors import UsageError, WorkerError

_HELLO = struct.Struct("<16sI")
_UNSENT_BYTES = 128 << 10
"""The kernel takes so much beyond what is on its way: enough for the wire, little enough that what is
urgent, to another worker, does not wait behind it."""
_STRANGERS = 128
"""So many may call as well before anyone is heard, without keeping workers from calling."""
_SHOWN_BYTES = 40
"""Of a farewell that is no text."""
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
            try:
                link.lose(bytes(buffer.view).decode(), told=True)
            except UnicodeDecodeError:
                link.lose(f"it gave up, and said {bytes(buffer.view[:_SHOWN_BYTES])!r}")
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
    with ExitStack() as servers, ExitStack() as undone:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        backlog = len(ranks) + _STRANGERS
        server = servers.enter_context(socket.create_server((address, 0), family=family, backlog=backlog))
        secret = secrets.token_bytes(16)
        local = f"plait-{secrets.token_hex(16)}" if shared_memory else None
        local_server = servers.enter_context(_local_server(local, backlog))
        card = _Card(host_identity(), address, server.getsockname()[1], local, secret)
        cards = gather(card, group, purpose="connect", timeout_s=timeout_s)
        near = {other for other in range(len(ranks)) if other != position and _near(cards[other], card)}
        mesh = Mesh(ranks, position, _hosts(cards), shared=bool(near))
        # Who fails hangs up, so that the others need not wait to find out.
        undone.callback(mesh.arena.close)
        deadline = time.monotonic() + timeout_s
        called = [
            undone.enter_context(_call(mesh, other, cards[other], card, deadline))
            for other in range(position)
        ]
        later = set(range(position + 1, len(ranks)))
        reception = _Reception(mesh, {server: later - near, local_server: later & near}, secret)
        for link in reception.links(deadline):
            undone.callback(link.connection.close)
            mesh.links[link.position] = link
        # Only now: a worker answers when it has called all others, so nobody waits for one who waits.
        for other, connection in enumerate(called):
            mesh.links[other] = _answered(mesh, other, connection)
        undone.pop_all()
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


@dataclass(eq=False)
class _Caller:
    """Someone who has connected, until it is known who."""

    connection: socket.socket
    expected: set[int]
    """The positions of those who are to call where this one did."""
    until: float
    said: bytes = b""
    descriptor: int | None = None

    def hear(self, secret: bytes) -> int | None:
        """Who it is, or None while it has not said all; a ConnectionError for a stranger."""
        near, left = self.connection.family == socket.AF_UNIX, _HELLO.size - len(self.said)
        try:
            if near and self.descriptor is None:
                heard, self.descriptor = _receive_arena(self.connection, left)
            else:
                heard = self.connection.recv(left)
        except BlockingIOError:
            return None
        self.said += heard
        if heard and len(self.said) < _HELLO.size:
            return None
        if len(self.said) == _HELLO.size and near == (self.descriptor is not None):
            theirs, position = _HELLO.unpack(self.said)
            if secrets.compare_digest(theirs, secret) and position in self.expected:
                return int(position)
        raise ConnectionError("a stranger")

    def link(self, mesh: Mesh, position: int) -> Link:
        """The link to a worker that has said who it is."""
        if self.descriptor is not None:
            _send_arena(self.connection, b"!", mesh.arena)
        self.expected.discard(position)
        descriptor, self.descriptor = self.descriptor, None
        return _link(mesh, self.connection, position, descriptor)

    def dismiss(self) -> None:
        """Hang up."""
        self.connection.close()
        if self.descriptor is not None:
            os.close(self.descriptor)


class _Reception:
    """Where the later workers call. All who do are heard at the same time, so that strangers who say nothing
    keep nobody waiting."""

    def __init__(self, mesh: Mesh, expected: dict[socket.socket, set[int]], secret: bytes) -> None:
        self._mesh = mesh
        self._expected = expected
        """Who is to call, by the server that they call."""
        self._secret = secret
        self._callers: set[_Caller] = set()
        self._selector = selectors.DefaultSelector()

    def links(self, deadline: float) -> Iterator[Link]:
        """A link to each worker that was expected, as they come."""
        for server, positions in self._expected.items():
            if positions:
                server.setblocking(False)
                self._selector.register(server, selectors.EVENT_READ)
        try:
            while missing := sorted(set[int]().union(*self._expected.values())):
                now = time.monotonic()
                if now >= deadline:
                    names = named([self._mesh.ranks[position] for position in missing])
                    raise WorkerError(
                        f"rank {self._mesh.rank} was not called by {names} in time",
                        setting="timeout_s",
                        works="60",
                    )
                until = min([deadline, *(caller.until for caller in self._callers)])
                for key, _ in self._selector.select(max(0.0, until - now)):
                    if key.data is None:
                        self._admit(key.fileobj)
                    elif (link := self._heard(key.data)) is not None:
                        yield link
                for caller in [each for each in self._callers if each.until <= now]:
                    self._dismiss(caller)
        finally:
            for caller in list(self._callers):
                self._dismiss(caller)
            self._selector.close()

    def _admit(self, server: Any) -> None:
        with suppress(OSError):  # it may be gone again
            connection, _ = server.accept()
            connection.setblocking(False)
            caller = _Caller(connection, self._expected[server], time.monotonic() + _GREETING_S)
            self._callers.add(caller)
            self._selector.register(connection, selectors.EVENT_READ, caller)

    def _heard(self, caller: _Caller) -> Link | None:
        try:
            position = caller.hear(self._secret)
            if position is None:
                return None
            link = caller.link(self._mesh, position)
        except OSError:
            self._dismiss(caller)
            return None
        self._callers.remove(caller)
        self._selector.unregister(caller.connection)
        return link

    def _dismiss(self, caller: _Caller) -> None:
        self._callers.remove(caller)
        self._selector.unregister(caller.connection)
        caller.dismiss()


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
