"""One connection to one other worker: messages out, messages in, in order, and never waiting.

A message is a header of fixed size and, for most kinds, bytes that follow. To a worker on the same host
the bytes of a chunk do not follow: they lie in our arena, which that worker has mapped, and it answers with
a credit once it has used them.

Everything here returns at once. What the kernel does not take yet stays queued for the next
:meth:`Link.flush`, what has not arrived yet is left to the next :meth:`Link.receive`. A connection that
fails raises nothing: it is lost, with the reason, and swallows what is sent.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from typing import Final, NamedTuple, Protocol

from torch import Tensor

from plait.compress.arena import Buffer

HELLO: Final = 1
"""Opens an operation; the bytes say which."""
DATA: Final = 2
"""A chunk; the bytes follow."""
SHARED: Final = 3
"""A chunk whose bytes lie in the sender's arena."""
CREDIT: Final = 4
"""The place in the receiver's arena is free again."""
BEAT: Final = 5
"""Still here, and waiting as well."""
ABORT: Final = 6
"""The sender gives up; the bytes say why."""

_HEADER = struct.Struct("<HBBIIIQQ")
_MAGIC = 0x70A1
_MOST_VIEWS = 16
_MOST_BYTES = 8 << 20
"""A link reads at most so much before the others have their turn."""
_LONGEST_TEXT = 1 << 20
"""Of a greeting or a farewell."""


class Frame(NamedTuple):
    """The header of a message."""

    kind: int
    phase: int
    share: int
    chunk: int
    operation: int
    """The number of the operation on its mesh."""
    length: int
    """Of the bytes, wherever they are."""
    place: int = 0
    """Where they are in the arena, if they are there."""

    def pack(self) -> bytes:
        """As it travels."""
        return _HEADER.pack(_MAGIC, *self)


class Sink(Protocol):
    """What takes the messages that arrive."""

    def ready(self, link: Link, frame: Frame) -> bool:
        """Whether the message can be taken now; otherwise it stays on the wire."""

    def room(self, link: Link, frame: Frame) -> Buffer:
        """Where its bytes are to go."""

    def deliver(self, link: Link, frame: Frame, buffer: Buffer) -> None:
        """Take the message, which is complete, and drop the buffer when it is used."""


class _Lost(Exception):
    pass


class Link:
    """The connection to one worker."""

    def __init__(
        self, connection: socket.socket, *, rank: int, position: int, foreign: Tensor | None = None
    ) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.rank = rank
        """The worker's rank in the world."""
        self.position = position
        """The worker's place in the group."""
        self.pending = 0
        """Chunks that are queued here, or lent and not returned."""
        self.paused = False
        """Whether a message was left on the wire because it cannot be taken yet."""
        self.heard_ns = self.fed_ns = time.monotonic_ns()
        """When something last came, and when bytes of a chunk last did."""
        self.lost: str | None = None
        """Why the connection is of no use any more."""
        self.told = False
        """Whether the worker gave that reason itself."""
        self._mute = False
        self._foreign = foreign
        self._out: deque[tuple[memoryview, Buffer | None, bool]] = deque()
        self._queued_bytes = self._taken_bytes = 0
        self._lent: dict[int, list[Buffer]] = {}
        self._header = bytearray(_HEADER.size)
        self._header_got = 0
        self._frame: Frame | None = None
        self._buffer: Buffer | None = None
        self._got = 0

    @property
    def shared(self) -> bool:
        """Whether the worker sees our arena, and we see its."""
        return self._foreign is not None

    @property
    def unsent(self) -> bool:
        """Whether bytes are queued that the kernel has not taken."""
        return bool(self._out)

    def taken(self, mark: int) -> bool:
        """Whether the kernel has taken all that was queued when :meth:`send` returned this mark."""
        return self._taken_bytes >= mark or self._mute

    def lose(self, reason: str, *, told: bool = False) -> None:
        """Be of no use from now on: hang up and let go of all that was queued or lent."""
        if self.lost is not None:
            return
        self.lost, self.told = reason, told
        self._silence()
        self.connection.close()

    def _silence(self) -> None:
        """Send nothing any more."""
        self._mute = True
        kept = [buffer for _, buffer, _ in self._out if buffer is not None]
        kept += [buffer for buffers in self._lent.values() for buffer in buffers]
        self._out.clear()
        self._lent.clear()
        self.pending = 0
        for buffer in kept:
            buffer.drop()

    # Out.

    def send(self, frame: Frame, buffer: Buffer | None = None) -> int:
        """Queue a message, and keep its buffer until it is gone; returns a mark for :meth:`taken`."""
        if self._mute:
            return self._queued_bytes
        chunk = frame.kind == DATA
        self.pending += chunk
        if chunk and self.shared and buffer is not None and buffer.place is not None:
            self._lent.setdefault(buffer.place, []).append(buffer.hold())
            frame, buffer = frame._replace(kind=SHARED, place=buffer.place), None
        self._out.append((memoryview(frame.pack()), None, False))
        self._queued_bytes += _HEADER.size
        if buffer is not None:
            self._out.append((buffer.view, buffer.hold(), chunk))
            self._queued_bytes += len(buffer.view)
        self.flush()
        return self._queued_bytes

    def flush(self) -> None:
        """Hand the kernel what it takes."""
        while self._out:
            views = [self._out[i][0] for i in range(min(len(self._out), _MOST_VIEWS))]
            try:
                sent = self.connection.sendmsg(views)
            except BlockingIOError:
                return
            except OSError:
                # It has hung up. What it sent before that, a farewell perhaps, is still to be read; then
                # reading fails as well, and the link is lost.
                self._silence()
                return
            self._taken_bytes += sent
            while self._out and sent >= len(self._out[0][0]):
                view, buffer, chunk = self._out.popleft()
                sent -= len(view)
                self.pending -= chunk
                if buffer is not None:
                    buffer.drop()
            if sent:
                view, buffer, chunk = self._out[0]
                self._out[0] = (view[sent:], buffer, chunk)

    # In.

    def receive(self, sink: Sink) -> bool:
        """Take what has arrived; whether anything had."""
        total, fed = 0, False
        self.paused = False
        try:
            while total < _MOST_BYTES and self.lost is None:
                if self._frame is None:
                    total += self._read_header()
                    if self._frame is None:
                        break
                if self._buffer is None and not self._open(self._frame, sink):
                    if self.paused:
                        break
                    continue
                got = self._read_bytes()
                fed, total = fed or got > 0, total + got
                if not self._deliver(sink):
                    break
        except _Lost as lost:
            self.lose(str(lost))
            return True
        if total:
            self.heard_ns = time.monotonic_ns()
            if fed:
                self.fed_ns = self.heard_ns
        return total > 0

    def _read_header(self) -> int:
        got = self._read(memoryview(self._header)[self._header_got :])
        self._header_got += got
        if self._header_got == _HEADER.size:
            magic, *fields = _HEADER.unpack(self._header)
            frame = Frame(*fields)
            text = frame.kind in (HELLO, ABORT)
            if magic != _MAGIC or not HELLO <= frame.kind <= ABORT or (text and frame.length > _LONGEST_TEXT):
                raise _Lost(f"it sent {bytes(self._header).hex()} where a message should begin")
            self._frame, self._header_got = frame, 0
        return got

    def _open(self, frame: Frame, sink: Sink) -> bool:
        """Find room for a message's bytes; False where there are none, or it has to wait."""
        if frame.kind in (CREDIT, BEAT):
            self._frame = None
            if frame.kind == CREDIT:
                self._returned(frame)
            return False
        if not sink.ready(self, frame):
            self.paused = self.lost is None
            return False
        if frame.kind == SHARED:
            self._buffer, self._got = self._borrow(frame), frame.length
        else:
            self._buffer, self._got = sink.room(self, frame), 0
        return True

    def _read_bytes(self) -> int:
        assert self._frame is not None
        assert self._buffer is not None
        before = self._got
        while self._got < self._frame.length:
            got = self._read(self._buffer.view[self._got :])
            if not got:
                break
            self._got += got
        return self._got - before

    def _deliver(self, sink: Sink) -> bool:
        """Hand the message over, if it is complete."""
        frame, buffer = self._frame, self._buffer
        assert frame is not None
        assert buffer is not None
        if self._got < frame.length:
            return False
        self._frame = self._buffer = None
        sink.deliver(self, frame, buffer)
        return True

    def _read(self, into: memoryview) -> int:
        """How many bytes came; 0 for none yet."""
        try:
            got = self.connection.recv_into(into)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise _Lost(f"its connection broke: {error.strerror}") from None
        if got == 0:
            raise _Lost("it closed the connection")
        return got

    def _borrow(self, frame: Frame) -> Buffer:
        """The bytes in the other worker's arena; dropping them sends the credit."""
        stop = frame.place + frame.length
        if self._foreign is None or stop > len(self._foreign):
            raise _Lost(f"it lent {frame.length} bytes at {frame.place} of an arena that is not there")
        credit = frame._replace(kind=CREDIT, length=0)
        return Buffer(self._foreign[frame.place : stop], lambda: self._give_back(credit))

    def _give_back(self, credit: Frame) -> None:
        self.send(credit)

    def _returned(self, frame: Frame) -> None:
        if self._mute:
            return
        lent = self._lent.get(frame.place)
        if not lent:
            raise _Lost(f"it returned place {frame.place}, which was not lent to it")
        lent.pop().drop()
        self.pending -= 1
