"""One TCP connection, measured: latency by its sender, bandwidth by its receiver.

Latency is half of the shortest of many round trips. Then the sender sends without end; the receiver
lets the slow start, and the burst that a shaper allows, go by, counts what arrives in the rest of its
time, and hangs up. The sender's clock is not asked: it would say how fast a buffer can be filled.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time

from plait.errors import WorkerError

_GREETING = b"plait.cluster/stream"
_ROUND_TRIPS = 100
_SKIPPED = 0.3
"""The share of the time that goes by before the receiver counts."""
LONGEST, _ENOUGH_BYTES = 4, 1 << 20
"""A slow link delivers so coarsely that it is given up to four times as long, until this much has come."""
_SEND_BYTES = 1 << 18
_RECEIVE_BYTES = 1 << 20


def receive(server: socket.socket, *, seconds: float, timeout_s: float) -> float:
    """Wait for a sender on a listening socket and return the bandwidth in bytes a second."""
    with _accept(server, timeout_s) as connection:
        try:
            for _ in range(_ROUND_TRIPS):
                connection.sendall(_exactly(connection, 1))
            return _count(connection, seconds)
        except TimeoutError:
            raise WorkerError(f"nothing arrived for {timeout_s:g} s", setting="timeout") from None
        except OSError as error:
            raise WorkerError(f"the sender was lost: {error}") from None


def _accept(server: socket.socket, timeout_s: float) -> socket.socket:
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0:
        server.settimeout(left)
        try:
            connection, _ = server.accept()
        except TimeoutError:
            break
        connection.settimeout(timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            if _exactly(connection, len(_GREETING)) == _GREETING:
                return connection
        connection.close()  # a stranger on our port
    raise WorkerError(f"no sender came within {timeout_s:g} s", setting="timeout")


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionResetError("the other end hung up")
        data += more
    return bytes(data)


def _count(connection: socket.socket, seconds: float) -> float:
    buffer = bytearray(_RECEIVE_BYTES)
    start: float | None = None
    total = marked = 0
    mark = 0.0
    while True:
        got = connection.recv_into(buffer)
        now = time.perf_counter()
        if got == 0:
            raise ConnectionResetError("the other end hung up")
        total += got
        start = now if start is None else start
        passed, counted = now - start, total - marked
        if passed <= _SKIPPED * seconds:
            mark, marked = now, total
        elif passed >= seconds and (counted >= _ENOUGH_BYTES or passed >= LONGEST * seconds):
            return counted / (now - mark)


def send(address: str, port: int, *, timeout_s: float) -> float:
    """Send to a receiver until it has had enough, and return the latency in milliseconds."""
    try:
        connection = socket.create_connection((address, port), timeout=timeout_s)
    except OSError as error:
        raise WorkerError(f"{address}:{port} cannot be reached: {error}", setting="timeout") from None
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            connection.sendall(_GREETING)
            trips = []
            for _ in range(_ROUND_TRIPS):
                start = time.perf_counter()
                connection.sendall(b".")
                _exactly(connection, 1)
                trips.append(time.perf_counter() - start)
        except OSError as error:
            raise WorkerError(f"{address}:{port} was lost: {error}") from None
        data = bytes(_SEND_BYTES)
        try:
            while True:
                connection.send(data)
        except TimeoutError:
            raise WorkerError(
                f"{address}:{port} took nothing for {timeout_s:g} s", setting="timeout"
            ) from None
        except OSError:
            pass  # the receiver hung up: it has seen enough, or says itself why not
    return 1e3 * min(trips) / 2


def within_host(*, seconds: float, timeout_s: float) -> tuple[float, float]:
    """Bandwidth (bytes a second) and latency (ms) between two processes here, over the loopback device."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = (
            f"from plait.cluster.stream import send; print(send('127.0.0.1', {port}, timeout_s={timeout_s}))"
        )
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as sender:
            try:
                bandwidth = receive(server, seconds=seconds, timeout_s=timeout_s)
                output, _ = sender.communicate(timeout=timeout_s)
            finally:
                sender.kill()
    return bandwidth, float(output)
