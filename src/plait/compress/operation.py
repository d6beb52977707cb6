"""One collective under way, as the communication thread sees it: messages in, steps of work, messages out.

An operation never waits. The thread hands it what has arrived (:meth:`Operation.deliver`) and lets it do
one piece of work at a time (:meth:`Operation.step`), between which the network is served. Operations of
several kinds are written as what to do when a message arrives; see scatter.py and ring.py.

All workers of a group start the same operations in the same order. Each opens an operation by telling the
others which it is, so that workers that disagree get an error that names the first difference.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from plait.compress.arena import Buffer
from plait.compress.link import DATA, HELLO, SHARED, Frame, Link
from plait.compress.report import Report
from plait.compress.work import Work
from plait.errors import WorkerError

if TYPE_CHECKING:
    from plait.compress.mesh import Mesh

_SHOWN_BYTES = 40
"""Of a greeting that is none."""

Label = tuple[int, int, int, int]
"""Sender's position, phase, share, chunk: what tells one chunk's message from all others."""


class Operation(ABC):
    """What all operations have in common."""

    def __init__(self, mesh: Mesh, *, fingerprint: Mapping[str, object], timeout_s: float) -> None:
        self.mesh = mesh
        self.timeout_s = timeout_s
        self.fingerprint = dict(fingerprint)
        """What all must agree on; ``operation`` says what kind it is."""
        self.sequence = -1
        """Its number among the operations of the mesh, from the moment it is handed in."""
        self.report = Report()
        """What it took."""
        self.work = Work(self.report)
        self.began_ns = self.moved_ns = self.beat_ns = 0
        """When it started, last got anywhere, and last told the others that it is waiting."""
        self._greetings = set(mesh.links)
        self._awaited: dict[Label, int] = {}
        self._owed = 0
        self._marks: dict[int, int] = {}

    # What a kind of operation has to say.

    @abstractmethod
    def start(self) -> None:
        """Note what will arrive (``expect``) and how much will be sent (``owe``)."""

    @abstractmethod
    def arrived(self, label: Label, buffer: Buffer) -> None:
        """Take a message that was expected, and drop its buffer when it is used."""

    @abstractmethod
    def step(self) -> bool:
        """Do one piece of work; whether there was one."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether there is no work, until further messages come."""

    def destination(self, label: Label) -> Buffer | None:
        """Where a message may go directly; None for a buffer of the arena."""
        return None

    def finish(self) -> None:  # noqa: B027  (most kinds have nothing to do here)
        """Do what remains once all is done."""

    # What the thread does with it.

    @property
    def name(self) -> str:
        """For people."""
        kind, elements = self.fingerprint["operation"], self.fingerprint.get("elements")
        size = "" if elements is None else f" of {elements} elements"
        return f"operation {self.sequence} ({kind}{size})"

    @property
    def sent(self) -> bool:
        """Whether it has nothing more to send: the next operation may start."""
        return self._owed == 0

    @property
    def done(self) -> bool:
        """Whether all has come, all work is done, and the kernel has taken all that was to be sent."""
        return (
            not (self._owed or self._awaited or self._greetings)
            and self.idle
            and all(self.mesh.links[position].taken(mark) for position, mark in self._marks.items())
        )

    def begin(self) -> None:
        """Greet the others and start."""
        self.began_ns = self.moved_ns = self.beat_ns = time.monotonic_ns()
        text = json.dumps(self.fingerprint).encode()
        buffer = self.mesh.arena.take(len(text))
        buffer.view[:] = text
        for link in self.mesh.links.values():
            link.send(Frame(HELLO, 0, 0, 0, self.sequence, len(text)), buffer)
        buffer.drop()
        self.start()

    def room(self, link: Link, frame: Frame) -> Buffer:
        """Where the bytes of a message go; complains about one that does not belong here."""
        if frame.kind == HELLO:
            return self.mesh.arena.take(frame.length)
        label = (link.position, frame.phase, frame.share, frame.chunk)
        self._check(link, label, frame.length)
        return self.destination(label) or self.mesh.arena.take(frame.length)

    def deliver(self, link: Link, frame: Frame, buffer: Buffer) -> None:
        """Take a message."""
        self.moved_ns = time.monotonic_ns()
        if frame.kind == HELLO:
            text = bytes(buffer.view)
            buffer.drop()
            self._compare(link, self._greeting(link, text))
            self._greetings.discard(link.position)
            return
        label = (link.position, frame.phase, frame.share, frame.chunk)
        if frame.kind == SHARED:  # whose bytes needed no room, so nobody has looked at it yet
            self._check(link, label, frame.length)
        del self._awaited[label]
        self.arrived(label, buffer)

    def waiting_for(self) -> set[int]:
        """The positions of those from whom something must still come."""
        return self._greetings | {label[0] for label in self._awaited}

    def stuck_on(self) -> set[int]:
        """Those, and the ones who have not taken what is for them."""
        links = self.mesh.links
        return self.waiting_for() | {p for p, mark in self._marks.items() if not links[p].taken(mark)}

    # For the kinds.

    def expect(self, position: int, phase: int, share: int, chunk: int, size: int) -> None:
        """Await a message."""
        self._awaited[(position, phase, share, chunk)] = size

    def owe(self, messages: int) -> None:
        """Promise to send so many messages."""
        self._owed += messages

    def send(self, position: int, phase: int, share: int, chunk: int, buffer: Buffer) -> int:
        """Send a message that was owed; returns the link's mark."""
        size = len(buffer.view)
        link = self.mesh.links[position]
        self._marks[position] = link.send(Frame(DATA, phase, share, chunk, self.sequence, size), buffer)
        self._owed -= 1
        self.report.sent_bytes += size
        return self._marks[position]

    def _check(self, link: Link, label: Label, length: int) -> None:
        size = self._awaited.get(label)
        if size is None:
            raise WorkerError(f"rank {link.rank} sent chunk {label[1:]} in {self.name}, which nobody awaits")
        if size != length:
            raise WorkerError(
                f"rank {link.rank} sent {length} bytes for chunk {label[1:]} in {self.name} instead of {size}"
            )

    def _greeting(self, link: Link, text: bytes) -> dict[str, Any]:
        with suppress(ValueError, RecursionError):
            theirs = json.loads(text)
            if isinstance(theirs, dict):
                return theirs
        raise WorkerError(
            f"rank {link.rank} opened {self.name} with {text[:_SHOWN_BYTES]!r}, which is no greeting"
        )

    def _compare(self, link: Link, theirs: dict[str, Any]) -> None:
        for key in [*self.fingerprint, *theirs]:
            mine, other = self.fingerprint.get(key), theirs.get(key)
            if mine != other:
                raise WorkerError(
                    f"operation {self.sequence} has {key} {mine!r} on rank {self.mesh.rank} "
                    f"and {other!r} on rank {link.rank}",
                    setting=key,
                    works="the same operations, in the same order, on every rank",
                )
