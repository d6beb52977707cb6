"""The network between hosts: every ordered pair measured, one process on each host.

The processes are started under the torchrun contract and call :func:`meet`. Rank 0 directs:

    rank 0             each rank, rank 0 too
    ------             ---------------------
    welcome        <-  who I am, where I listen, what I brought
    send, receive  ->  the two ends of a pair stream to each other; the others rest
    write down     <-  latency from the sender, bandwidth from the receiver
    done           ->  what everyone brought, and every wire      (or stop: why it cannot go on)
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from plait.cluster.stream import LONGEST, receive, send
from plait.errors import PlaitError, UsageError, WorkerError
from plait.worker import Place

_HELLO_S = 5.0
"""How long rank 0 listens to a connection before it takes it for a stranger."""


@dataclass(frozen=True, kw_only=True)
class Wire:
    """What was measured from one host to another; hosts are counted in the order of their ranks."""

    source: int
    target: int
    bandwidth_bytes_per_s: float
    latency_ms: float


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What every host brought, in the order of ranks, where they were reached, and the wires between them."""

    brought: tuple[Any, ...]
    addresses: tuple[str, ...]
    wires: tuple[Wire, ...]


def rounds(count: int, at_once: int = 1) -> list[list[tuple[int, int]]]:
    """All ordered pairs of ``count`` hosts, in rounds of at most ``at_once`` pairs with no host in common.

    The circle method: the first host keeps its seat, the others move up by one, and those who face
    each other meet, once in each direction.

        4 hosts:   0-3 1-2   0-2 3-1   0-1 2-3
    """
    if at_once < 1:
        raise UsageError(f"{at_once} pairs at once", setting="at_once", works="1")
    seats = [*range(count), *([-1] if count % 2 else [])]
    found = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        pairs = [(a, b) for a, b in facing if a >= 0 and b >= 0]
        for i in range(0, len(pairs), at_once):
            found.append(pairs[i : i + at_once])
            found.append([(b, a) for a, b in pairs[i : i + at_once]])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def meeting_port(place: Place) -> int:
    """Where rank 0 listens: MASTER_PORT, or the one above where torchrun's own store has that."""
    return place.port + (os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def meet(
    place: Place, brought: Any, *, seconds: float = 0.5, at_once: int = 1, timeout_s: float = 60.0
) -> Meeting:
    """Meet all other ranks, measure every ordered pair of hosts, and return the same to all.

    The first rank of a host brings something (whatever JSON can carry) and measures; its other ranks
    only wait for the result. A rank that does not come, dies or cannot be reached ends the meeting for
    all with a WorkerError that names it.
    """
    rounds(2, at_once)
    if not 0 < seconds < timeout_s:
        raise UsageError(
            f"{seconds:g} s for a measurement within a timeout of {timeout_s:g} s",
            setting="seconds, timeout",
            works="0.5 and 60",
        )
    family = socket.AF_INET6 if ":" in place.address else socket.AF_INET
    with contextlib.ExitStack() as stack:
        if place.rank == 0:
            to_master = stack.enter_context(_Director(place, family, seconds, at_once, timeout_s))
        else:
            to_master = _reach(place, timeout_s)
        return _take_part(place, to_master, brought, family, seconds, timeout_s)


class _Line:
    """A connection that carries one JSON value a line and knows, for its errors, who is at the other end."""

    def __init__(self, connection: socket.socket, who: str, timeout_s: float) -> None:
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.who = who
        self.wait(timeout_s)
        self._reader = connection.makefile("rb")

    def wait(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.connection.settimeout(timeout_s)

    def put(self, value: Any) -> None:
        try:
            self.connection.sendall(json.dumps(value).encode() + b"\n")
        except OSError as error:
            raise WorkerError(f"{self.who} was lost: {error}") from None

    def get(self) -> Any:
        try:
            line = self._reader.readline()
        except TimeoutError:
            raise WorkerError(
                f"{self.who} said nothing for {self.timeout_s:g} s", setting="timeout"
            ) from None
        except OSError as error:
            raise WorkerError(f"{self.who} was lost: {error}") from None
        if not line.endswith(b"\n"):
            raise WorkerError(f"{self.who} ended before the measurement was over")
        return json.loads(line)

    def close(self) -> None:
        self._reader.close()
        self.connection.close()


@dataclass(frozen=True, kw_only=True)
class _Guest:
    rank: int
    address: str | None
    """None for rank 0: the others know it as the address at which they reached it."""
    port: int
    measures: bool
    brought: Any
    line: _Line


class _Director:
    """Rank 0's other half, in a thread: tells who measures when, or why it cannot go on."""

    def __init__(
        self, place: Place, family: socket.AddressFamily, seconds: float, at_once: int, timeout_s: float
    ) -> None:
        self._place, self._seconds, self._at_once, self._timeout_s = place, seconds, at_once, timeout_s
        port = meeting_port(place)
        try:
            self._server = socket.create_server(("", port), family=family, backlog=place.world)
        except OSError as error:
            raise UsageError(
                f"rank 0 cannot listen on port {port}: {error.strerror}",
                setting="MASTER_PORT",
                works="a port that is free on the host of rank 0",
            ) from None
        # Rank 0 itself takes part like any other, but is always there: whatever fails, it hears of it.
        self._mine, self._other_end = socket.socketpair()
        self._guests: dict[int, _Guest] = {}
        self._thread = threading.Thread(target=self._direct, name="plait-network", daemon=True)

    def __enter__(self) -> socket.socket:
        self._thread.start()
        return self._other_end

    def __exit__(self, kind: object, *_: object) -> None:
        # After the last word the thread is about to end; after an interrupt it may wait for long: leave it.
        self._thread.join(self._timeout_s if kind is None else 1.0)
        self._server.close()

    def _direct(self) -> None:
        try:
            self._welcome()
            hosts = [guest for _, guest in sorted(self._guests.items()) if guest.measures]
            wires = [
                wire
                for pairs in rounds(len(hosts), self._at_once)
                for wire in self._measure([(hosts[a], hosts[b], a, b) for a, b in pairs])
            ]
            last = {
                "do": "done",
                "brought": [host.brought for host in hosts],
                "addresses": [host.address or self._place.address for host in hosts],
                "wires": wires,
            }
        except Exception as error:  # whatever it is, the others must hear of it
            last = {"do": "stop", "why": error.what if isinstance(error, PlaitError) else repr(error)}
        for guest in self._guests.values():
            with contextlib.suppress(WorkerError):
                guest.line.put(last)
            guest.line.close()

    def _welcome(self) -> None:
        self._greet(self._mine, self._place.address)
        deadline = time.monotonic() + self._timeout_s
        while missing := set(range(self._place.world)) - set(self._guests):
            self._server.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection, (address, *_) = self._server.accept()
            except TimeoutError:
                raise WorkerError(
                    f"of {self._place.world} ranks these did not come within {self._timeout_s:g} s: "
                    f"{', '.join(map(str, sorted(missing)))}"
                ) from None
            self._greet(connection, address)

    def _greet(self, connection: socket.socket, address: str) -> None:
        line = _Line(connection, f"a process at {address}", _HELLO_S)
        try:
            hello = line.get()
            rank, world = int(hello["rank"]), int(hello["world"])
            port, measures = int(hello["port"]), bool(hello["measures"])
        except (WorkerError, ValueError, LookupError, TypeError):
            line.close()  # a stranger on our port
            return
        line.who = f"rank {rank} at {address}"
        # It needs the timeout itself to find that its peer is dead, and a slow link gets more time.
        line.wait(1.5 * self._timeout_s + LONGEST * self._seconds)
        guest = _Guest(
            rank=rank,
            address=None if rank == 0 else address,
            port=port,
            measures=measures,
            brought=hello.get("brought"),
            line=line,
        )
        if world != self._place.world or not 0 <= rank < world or rank in self._guests:
            line.put({"do": "stop", "why": "this rank does not fit the world of rank 0"})
            line.close()
            raise WorkerError(
                f"rank {rank} of {world} came from {address} to a world of {self._place.world}"
                + (", a second time" if rank in self._guests else "")
            )
        self._guests[rank] = guest

    def _measure(self, pairs: list[tuple[_Guest, _Guest, int, int]]) -> list[dict[str, Any]]:
        busy = set()
        for source, target, _, _ in pairs:
            busy |= {source.rank, target.rank}
            target.line.put({"do": "receive"})
            source.line.put({"do": "send", "address": target.address, "port": target.port})
        for rank, guest in self._guests.items():
            if rank not in busy:
                guest.line.put({"do": "rest"})  # so that it knows that we are still here
        wires = []
        for source, target, a, b in pairs:
            figures: dict[str, float] = {}
            for guest in (source, target):
                answer = guest.line.get()
                if "fault" in answer:
                    ends = f"from rank {source.rank} to rank {target.rank}"
                    raise WorkerError(f"{ends}, as rank {guest.rank} says: {answer['fault']}")
                figures |= answer
            wires.append({"source": a, "target": b, **figures})
        return wires


def _take_part(
    place: Place,
    to_master: socket.socket,
    brought: Any,
    family: socket.AddressFamily,
    seconds: float,
    timeout_s: float,
) -> Meeting:
    master = place.address if place.rank == 0 else to_master.getpeername()[0]
    # Rank 0 waits for one rank, and for one measurement, at a time: it is silent for no longer than this.
    line = _Line(to_master, f"rank 0 at {master}", 3 * timeout_s + LONGEST * seconds)
    with contextlib.closing(line), socket.create_server(("", 0), family=family) as server:
        hello = asdict(place) | {"measures": place.local_rank == 0, "port": server.getsockname()[1]}
        line.put(hello | {"brought": brought})
        while True:
            order = line.get()
            try:
                match order["do"]:
                    case "send":
                        address = order["address"] or master
                        line.put({"latency_ms": send(address, order["port"], timeout_s=timeout_s)})
                    case "receive":
                        rate = receive(server, seconds=seconds, timeout_s=timeout_s)
                        line.put({"bandwidth_bytes_per_s": rate})
                    case "stop":
                        raise WorkerError(order["why"])
                    case "done":
                        return Meeting(
                            brought=tuple(order["brought"]),
                            addresses=tuple(order["addresses"]),
                            wires=tuple(Wire(**wire) for wire in order["wires"]),
                        )
            except WorkerError as error:
                if order["do"] == "stop":
                    raise
                line.put({"fault": error.what})


def _reach(place: Place, timeout_s: float) -> socket.socket:
    """Connect to rank 0, which may not be there yet."""
    address, deadline = (place.address, meeting_port(place)), time.monotonic() + timeout_s
    while True:
        try:
            connection = socket.create_connection(address, timeout=max(0.1, deadline - time.monotonic()))
            if connection.getsockname() != connection.getpeername():
                return connection
            # Nobody listened, and the kernel gave us this very port to call from: we reached ourselves.
            connection.close()
            reason = "nobody listens"
        except OSError as error:
            reason = str(error)
        if time.monotonic() > deadline:
            raise WorkerError(
                f"rank {place.rank} cannot reach rank 0 at {address[0]}:{address[1]}: {reason}",
                setting="MASTER_ADDR, MASTER_PORT",
                works="the address of rank 0's host and a port that is free there",
            )
        time.sleep(0.05)
