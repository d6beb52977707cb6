"""What workers and the engine tell each other: lines of JSON over TCP, with a beat a second either way.

A worker says who it is, then each step it has done; the engine says when to stop, and when the foreground is
over. Silence means something in both directions. An engine that hears nothing of a worker takes it for lost,
whatever became of it: a process that was killed, a host whose cable was cut. A worker that hears nothing of
its engine ends, so that nothing trains on which nobody waits for, and nothing writes where another has taken
over.

Whoever connects shows the run's token first; without it, nothing that follows is read.
"""

from __future__ import annotations

import hmac
import json
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

BEAT_S = 1.0
"""Between two signs of life."""
_HELLO_BYTES = 4096
"""The most that a stranger may say before it has shown the token."""
_HELLO_S = 10.0
"""How long it may take over that; after that, it only holds a place."""
_LINE_BYTES = 1 << 24
_CLOSING_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who speaks: a rank of one attempt at a task."""

    task: str
    attempt: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class Said:
    """A message and whose it is."""

    caller: Caller
    message: dict[str, Any]


# --- the worker's end -----------------------------------------------------------------------------------


class Line:
    """A worker's connection to its engine; words are sent by a thread of its own, so training never waits."""

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        caller: Caller,
        *,
        silence_s: float,
        lost: Callable[[str], object],
    ) -> None:
        """``lost`` is called, once and in a thread, with the reason why there is no engine any more."""
        self.stop = threading.Event()
        """Set once the engine has asked this worker to stop at a checkpoint."""
        self.alone = threading.Event()
        """Set once the engine has said that nothing in the foreground is left to do."""
        self._lost, self._silence_s, self._closed = lost, silence_s, False
        self._words: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._socket = socket.create_connection(address, timeout=silence_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = {
            "token": token,
            "task": caller.task,
            "attempt": caller.attempt,
            "rank": caller.rank,
            "silence_s": silence_s,
        }
        self._socket.sendall(_line(hello))
        self._writer = threading.Thread(target=self._write, name="plait-engine-out", daemon=True)
        self._reader = threading.Thread(target=self._read, name="plait-engine-in", daemon=True)
        self._writer.start()
        self._reader.start()

    def tell(self, **message: Any) -> None:
        """Send a message, soon."""
        self._words.put(message)

    def close(self) -> None:
        """Send what is left, and hang up."""
        self._closed = True
        self._words.put(None)
        self._writer.join(_CLOSING_S)
        with suppress(OSError):
            self._socket.close()

    def _write(self) -> None:
        try:
            while True:
                try:
                    message = self._words.get(timeout=BEAT_S)
                except queue.Empty:
                    message = {}
                if message is None:
                    self._socket.shutdown(socket.SHUT_WR)
                    return
                self._socket.sendall(_line(message))
        except OSError as error:
            self._fail(f"the engine cannot be told anything: {error}")

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    said = json.loads(line)
                    for name, event in (("stop", self.stop), ("alone", self.alone)):
                        if said.get(name):
                            event.set()
            self._fail("the engine has hung up")
        except TimeoutError:
            self._fail(f"nothing was heard of the engine for {self._silence_s:g} s")
        except (OSError, ValueError) as error:
            self._fail(f"the engine cannot be heard: {error}")

    def _fail(self, why: str) -> None:
        if not self._closed:
            self._closed = True
            self._lost(why)


# --- the engine's end -----------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Peer:
    """A connection, before and after it has said whose it is."""

    socket: socket.socket
    since_s: float
    caller: Caller | None = None
    unread: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


class Board:
    """The engine's end of all lines; one thread reads, and beats."""

    def __init__(self, listening: socket.socket, token: str) -> None:
        self.inbox: queue.SimpleQueue[Said] = queue.SimpleQueue()
        """What workers said, in the order in which it came; beats are not in it."""
        self._token = token
        self._heard_s: dict[Caller, float] = {}
        self._peers: dict[int, _Peer] = {}
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._listening = listening
        listening.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        for each in (listening, self._woken):
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="plait-engine", daemon=True)
        self._thread.start()

    def silent_s(self, caller: Caller) -> float | None:
        """For how long nothing was heard of a worker; None before its first word."""
        with self._lock:
            heard = self._heard_s.get(caller)
        return None if heard is None else time.monotonic() - heard

    def connected(self, task: str) -> bool:
        """Whether any worker of a task has not hung up yet, so that more may come."""
        with self._lock:
            peers = list(self._peers.values())
        return any(peer.caller is not None and peer.caller.task == task for peer in peers)

    def tell(self, task: str, message: Mapping[str, Any]) -> None:
        """Send a message to all workers of a task that are connected."""
        with self._lock:
            for peer in self._peers.values():
                if peer.caller is not None and peer.caller.task == task:
                    peer.unsent += _line(message)
        with suppress(OSError):
            self._wake.send(b"x")

    def close(self) -> None:
        """Hang up on everyone."""
        self._ended.set()
        with suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(_CLOSING_S)
        for peer in list(self._peers.values()):
            peer.socket.close()
        self._selector.close()
        for each in (self._listening, self._wake, self._woken):
            each.close()

    def _serve(self) -> None:
        beaten_s = time.monotonic()
        while not self._ended.is_set():
            for key, _ in self._selector.select(timeout=BEAT_S / 4):
                if key.fileobj is self._listening:
                    self._accept()
                elif key.fileobj is self._woken:
                    with suppress(OSError):
                        self._woken.recv(4096)
                elif (peer := self._peers.get(key.fd)) is not None:
                    self._hear(peer)
            beats = time.monotonic() - beaten_s >= BEAT_S
            if beats:
                beaten_s = time.monotonic()
            for peer in list(self._peers.values()):
                if peer.caller is None and time.monotonic() - peer.since_s > _HELLO_S:
                    self._drop(peer)
                else:
                    self._send(peer, beats)

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listening.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._peers[connection.fileno()] = _Peer(socket=connection, since_s=time.monotonic())
            self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, peer: _Peer) -> None:
        try:
            piece = peer.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self._drop(peer)
            return
        peer.unread += piece
        if len(peer.unread) > (_HELLO_BYTES if peer.caller is None else _LINE_BYTES):
            self._drop(peer)
            return
        *lines, rest = bytes(peer.unread).split(b"\n")
        peer.unread = bytearray(rest)
        for line in lines:
            if not self._take(peer, line):
                self._drop(peer)
                return

    def _take(self, peer: _Peer, line: bytes) -> bool:
        """Whether the line was one of a worker of this run."""
        try:
            message = json.loads(line)
            if not isinstance(message, dict):
                return False
            if peer.caller is None:
                # Any text at all, half a surrogate pair too: a stranger must not end this thread.
                shown = str(message.get("token", "")).encode(errors="replace")
                if not hmac.compare_digest(shown, self._token.encode()):
                    return False
                peer.caller = Caller(
                    task=str(message["task"]), attempt=int(message["attempt"]), rank=int(message["rank"])
                )
                message = {"hello": True}
        except (ValueError, RecursionError, KeyError, TypeError):
            return False
        with self._lock:
            self._heard_s[peer.caller] = time.monotonic()
        if message:
            self.inbox.put(Said(caller=peer.caller, message=message))
        return True

    def _send(self, peer: _Peer, beats: bool) -> None:
        if peer.caller is None:
            return
        with self._lock:
            if beats and not peer.unsent:  # one that is behind has enough to read
                peer.unsent += _line({})
            try:
                sent = peer.socket.send(peer.unsent) if peer.unsent else 0
            except BlockingIOError:
                return
            except OSError:
                sent = len(peer.unsent)  # who has gone is noticed by what it no longer says
            del peer.unsent[:sent]

    def _drop(self, peer: _Peer) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(peer.socket)
        with self._lock:
            self._peers.pop(peer.socket.fileno(), None)
        peer.socket.close()


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"
