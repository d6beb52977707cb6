"""A flow of bytes between two hosts over plain TCP: one side serves, the other fetches and holds the clock.

This file runs alone (``python -I -S flow.py ROLE ...``) and imports nothing of plait, so a flow is a process
of about 10 MB that starts in 20 ms. The fetching side asks for a number of bytes, starts its clock, and stops
it when the last one has arrived: the sender's clock says only when bytes entered a buffer.

    serve ADDRESS [--rate BYTES_PER_SECOND]             prints its port and serves until it is ended
    fetch ADDRESS PORT BYTES [--seconds S] [--most N]   prints the seconds of each transfer as a JSON list
    drain ADDRESS PORT [--streams N]                    fetches for ever, says so once all streams flow
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import threading
import time

_CHUNK_BYTES = 1 << 20
_SO_MAX_PACING_RATE = 47
_BUFFER_BYTES = 4 << 20
"""Of a socket, each way: the link stays busy while a process waits 30 ms for a core, even at 1 Gbit/s."""
_FOREVER = (1 << 63) - 1
_CONNECT_SECONDS = 3.0
"""Only kernels take part in it, so on a link that works it takes less than a millisecond."""


def _answer(connection: socket.socket) -> None:
    payload = memoryview(bytes(_CHUNK_BYTES))
    try:
        while request := connection.recv(8, socket.MSG_WAITALL):
            left = int.from_bytes(request, "big")
            while left > 0:
                left -= connection.send(payload[:left] if left < _CHUNK_BYTES else payload)
    except OSError:
        pass  # the fetching side is gone, and with it the reason to send
    finally:
        connection.close()


def serve(address: str, rate_bytes_per_second: int | None = None) -> None:
    """Listen on a free port, print it, and send each client as many bytes as it asks for.

    The rate, where there is one, holds for each connection; the kernel paces it.
    """
    with socket.create_server((address, 0), backlog=64) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            connection, _ = server.accept()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            if rate_bytes_per_second is not None:
                connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate_bytes_per_second)
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _connect(address: str, port: int) -> socket.socket:
    connection = socket.socket()
    # Before connecting, since the two sides agree then on how large a window can be.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    connection.settimeout(_CONNECT_SECONDS)
    connection.connect((address, port))
    connection.settimeout(None)
    return connection


def _receive(connection: socket.socket, size_bytes: int, buffer: bytearray) -> None:
    connection.sendall(size_bytes.to_bytes(8, "big"))
    left = size_bytes
    while left > 0:
        got = connection.recv_into(buffer, min(left, len(buffer)))
        if got == 0:
            raise ConnectionError(f"the sender closed with {left} of {size_bytes} bytes missing")
        left -= got


def fetch(address: str, port: int, size_bytes: int, *, seconds: float, most: int) -> list[float]:
    """Fetch `size_bytes` again and again until `seconds` have gone or `most` transfers; the time of each."""
    buffer = bytearray(_CHUNK_BYTES)
    taken: list[float] = []
    while not taken or (sum(taken) < seconds and len(taken) < most):
        with _connect(address, port) as connection:
            begin = time.perf_counter()
            _receive(connection, size_bytes, buffer)
            taken.append(time.perf_counter() - begin)
    return taken


def drain(address: str, port: int, streams: int) -> None:
    """Fetch for ever over several connections at once; print a line when bytes have arrived over all."""
    buffer = bytearray(_CHUNK_BYTES)
    connections = [_connect(address, port) for _ in range(streams)]
    for connection in connections:
        _receive(connection, 1, buffer)
    print("flowing", flush=True)
    threads = [
        threading.Thread(target=_receive, args=(connection, _FOREVER, bytearray(_CHUNK_BYTES)))
        for connection in connections
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main(arguments: list[str]) -> None:
    """Play the role that the arguments name."""
    parser = argparse.ArgumentParser(prog="flow")
    roles = parser.add_subparsers(dest="role", required=True)
    serving = roles.add_parser("serve")
    serving.add_argument("--rate", type=int)
    fetching = roles.add_parser("fetch")
    draining = roles.add_parser("drain")
    for role in (serving, fetching, draining):
        role.add_argument("address")
    for role in (fetching, draining):
        role.add_argument("port", type=int)
    fetching.add_argument("bytes", type=int)
    fetching.add_argument("--seconds", type=float, default=0.0)
    fetching.add_argument("--most", type=int, default=1)
    draining.add_argument("--streams", type=int, default=1)
    asked = parser.parse_args(arguments)
    if asked.role == "serve":
        serve(asked.address, asked.rate)
    elif asked.role == "drain":
        drain(asked.address, asked.port, asked.streams)
    else:
        taken = fetch(asked.address, asked.port, asked.bytes, seconds=asked.seconds, most=asked.most)
        print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
