"""How far apart the clocks of two processes are, by asking back and forth.

F. Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989. One side notes its
clock, asks the other for theirs, and notes its clock again when the answer is there. Theirs was read
somewhere between the two notes; taken as read in the middle, it is wrong by half the round trip at
most. Of many rounds the one with the shortest round trip has the smallest such bound, so it alone is
used.

=================  ==============================================
the paper          here
=================  ==============================================
T                  ``peer_ns``, the time in the answer
2D                 ``received_ns - sent_ns``, the round trip
T + D              the peer's time when the answer comes
=================  ==============================================

We set the smallest possible delay (the paper's ``min``) to zero, so the bound needs no knowledge of
the network. The bound holds at the moment of asking; clocks that run at different rates drift apart
afterwards, so ask again before merging a long run.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from plait.errors import UsageError, WorkerError

_ASK, _DONE = b"?", b"."
_TIME = struct.Struct("!q")


@dataclass(frozen=True, kw_only=True)
class ClockOffset:
    """What to add to a peer's times to read them on this process's clock."""

    offset_ms: float
    error_ms: float
    """The true offset is within this distance of ``offset_ms``."""


def estimate_offset(rounds: Iterable[tuple[int, int, int]]) -> ClockOffset:
    """The offset from rounds of (sent, peer's time, received) in nanoseconds; the shortest round counts."""
    kept = list(rounds)
    if not kept:
        raise UsageError("no round of asking to estimate from", setting="rounds", works="16")
    sent, peer, received = min(kept, key=lambda r: r[2] - r[0])
    if received < sent:
        raise UsageError(
            f"an answer was received at {received} ns, before it was asked for at {sent} ns",
            setting="rounds",
            works="(sent, peer, received) with sent <= received",
        )
    # Whole nanoseconds until the end: clocks may count from long ago, where a float is coarse.
    return ClockOffset(offset_ms=(sent + received - 2 * peer) / 2e6, error_ms=(received - sent) / 2e6)


def measure_clock(
    peer: socket.socket, *, rounds: int = 64, clock: Callable[[], int] = time.perf_counter_ns
) -> ClockOffset:
    """Ask the process at the other end, which runs ``answer_clock``, for its clock."""
    if rounds < 1:
        raise UsageError(f"{rounds} rounds of asking", setting="rounds", works="16")
    _send_at_once(peer)
    taken = []
    for _ in range(rounds):
        sent = clock()
        _send(peer, _ASK)
        answer = _receive(peer, _TIME.size)
        received = clock()
        taken.append((sent, _TIME.unpack(answer)[0], received))
    _send(peer, _DONE)
    return estimate_offset(taken)


def answer_clock(peer: socket.socket, *, clock: Callable[[], int] = time.perf_counter_ns) -> None:
    """Answer a ``measure_clock`` at the other end until it has what it needs."""
    _send_at_once(peer)
    while (message := _receive(peer, 1)) == _ASK:
        _send(peer, _TIME.pack(clock()))
    if message != _DONE:
        raise WorkerError(
            f"the peer sent {message!r} where it should ask for the clock",
            setting="peer",
            works="a process that runs measure_clock",
        )


def _send_at_once(peer: socket.socket) -> None:
    if peer.family in (socket.AF_INET, socket.AF_INET6):
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _send(peer: socket.socket, message: bytes) -> None:
    try:
        peer.sendall(message)
    except OSError as error:
        raise _lost(error) from None


def _receive(peer: socket.socket, size: int) -> bytes:
    message = b""
    while len(message) < size:
        try:
            part = peer.recv(size - len(message))
        except OSError as error:
            raise _lost(error) from None
        if not part:
            raise _lost("it closed the connection")
        message += part
    return message


def _lost(why: object) -> WorkerError:
    return WorkerError(
        f"the peer was lost while its clock was asked for: {why}",
        setting="peer",
        works="a socket to a process that runs the other half, with a timeout above the round trip",
    )
