"""The communication thread: one a process, operations in the order in which they were handed in.

It alone touches the links. Whoever wants a collective hands it in and gets a handle; nothing is ever sent
from a callback, so the order is the same on all workers if their programs are. (A program that hands in from
several threads has to see to the order among them itself.) The next operation starts
when the one before has sent all it has to, and then both are under way: the wire is not idle while the last
chunks of one are still to come.

Between two pieces of work (the packing or unpacking of a chunk) the network is served. The kernel's own
buffers keep the wire busy meanwhile.

A worker that dies, stalls or disagrees ends the thread on every worker with an error that names it: who
finds it out tells the others before it hangs up. From then on the thread refuses work.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import termios
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from plait.compress.link import ABORT, BEAT, Frame, Link
from plait.compress.mesh import Mesh
from plait.compress.operation import Operation
from plait.compress.report import Report
from plait.compress.work import Work
from plait.errors import PlaitError, WorkerError

if TYPE_CHECKING:
    from plait.timeline import Timeline

AT_ONCE = 3
"""So many operations are under way at most."""
_BEATS = 8
"""A worker that waits says so this many times within the timeout."""
_SILENT = 0.9
"""A worker from whom nothing came for about this share of the timeout is taken to be the one that stalls.

Who waits for one that waits itself gives it until the end: it knows better whom to blame.
"""
_FAREWELL_S = 1.0
"""How long a worker that gives up tries to tell the others why."""
_ORDERLY_S = 10.0
"""How long one that is shut down tries to deliver what it has sent."""

_TCP_CLOSE = 7
"""The state of a connection that is over, in the kernel's numbers."""


class CommunicationThread:
    """Runs operations. It is daemonic: it never keeps a process from ending."""

    def __init__(self) -> None:
        self.report = Report()
        """What all finished operations took."""
        self.timeline: Timeline | None = None
        """Where to record what is packed, awaited and unpacked when."""
        self._lock = threading.Lock()
        self._queue: deque[Operation] = deque()
        self._active: list[Operation] = []
        self._error: BaseException | None = None
        self._closing = False
        self._links: dict[int, tuple[Mesh, Link]] = {}
        self._interest: dict[int, int] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        self._poll.register(self._wake, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="plait-compress", daemon=True)
        self._thread.start()

    def submit(self, operation: Operation) -> Work:
        """Hand an operation in; it runs after all that were handed in before."""
        with self._lock:
            if self._error is not None:
                raise WorkerError(
                    f"communication has ended: {self._error}",
                    works="plait.compress.shutdown() and the collective again, on every rank",
                ) from self._error
            operation.sequence = operation.mesh.submitted
            operation.mesh.submitted += 1
            self._queue.append(operation)
        os.eventfd_write(self._wake, 1)
        return operation.work

    def close(self) -> None:
        """End the thread and hang up; operations that have not finished fail."""
        if not self._closing:
            self._closing = True
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            os.close(self._wake)

    def forsake(self) -> None:
        """In a forked child, where no thread runs: fail what has not ended, and let go of descriptors."""
        error = WorkerError("this process was forked while the operation was under way in its parent")
        for operation in [*self._active, *self._queue]:
            operation.work.forsake(error)
        self._poll.close()
        if not self._closing:
            os.close(self._wake)

    # From here on, everything runs on the thread.

    def _run(self) -> None:
        import torch

        with torch.no_grad():
            try:
                while not self._closing:
                    self._bury()
                    self._start()
                    self._watch()
                    if not (self._serve(0.0) | self._work()):
                        self._rest()
                raise WorkerError("communication was shut down")
            except BaseException as error:
                self._end(error)

    def _start(self) -> None:
        """Start the next operations, if it is their turn."""
        while self._queue and len(self._active) < AT_ONCE and all(op.sent for op in self._active):
            operation = self._queue.popleft()
            mesh = operation.mesh
            self._active.append(operation)
            mesh.active[operation.sequence] = operation
            mesh.started = operation.sequence + 1
            for link in mesh.links.values():
                if link.lost is None:
                    self._links.setdefault(link.connection.fileno(), (mesh, link))
                else:
                    self._mourn(mesh, link)
            operation.begin()
            for link in mesh.links.values():
                if link.paused:
                    link.receive(mesh)
            self._bury()

    def _bury(self) -> None:
        """Forget links that were lost, at once: the kernel may give their descriptors to others."""
        for descriptor, (mesh, link) in list(self._links.items()):
            if link.lost is not None:
                del self._links[descriptor]
                self._interest.pop(descriptor, None)
                self._mourn(mesh, link)

    def _watch(self) -> None:
        """Ask the kernel for what each link needs now."""
        for descriptor, (_, link) in self._links.items():
            wanted = (0 if link.paused else select.EPOLLIN) | (select.EPOLLOUT if link.unsent else 0)
            known = self._interest.get(descriptor)
            if known is None:
                self._poll.register(descriptor, wanted)
            elif known != wanted:
                self._poll.modify(descriptor, wanted)
            self._interest[descriptor] = wanted

    def _mourn(self, mesh: Mesh, link: Link) -> None:
        """A lost link is an error for an operation that needs it, and for no other."""
        for operation in mesh.active.values():
            if link.position in operation.waiting_for():
                if link.told:
                    raise WorkerError(f"{link.lost} (as rank {link.rank} says)")
                raise WorkerError(f"rank {link.rank} was lost in {operation.name}: {link.lost}")

    def _serve(self, timeout_s: float) -> bool:
        """Send and receive what can be; whether anything happened."""
        moved = False
        for descriptor, event in self._poll.poll(timeout_s):
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
                moved = True
            elif descriptor in self._links:
                mesh, link = self._links[descriptor]
                if event & select.EPOLLOUT:
                    link.flush()
                if link.paused and event & (select.EPOLLHUP | select.EPOLLERR):
                    link.lose("it closed the connection")
                elif event & ~select.EPOLLOUT and link.lost is None:
                    link.receive(mesh)
                moved = True
        return moved

    def _work(self) -> bool:
        """One step of the first operation that has one; those that are done are taken off."""
        for operation in self._active:
            if operation.step():
                operation.moved_ns = time.monotonic_ns()
                return True
            if operation.done:
                self._finish(operation)
                return True
        return False

    def _finish(self, operation: Operation) -> None:
        operation.finish()
        self._active.remove(operation)
        del operation.mesh.active[operation.sequence]
        report = operation.report
        report.operations = 1
        report.elapsed_s = (time.monotonic_ns() - operation.began_ns) / 1e9
        self.report.add(report)
        operation.work.end()

    def _rest(self) -> None:
        """Nothing to do: wait for the network or a new operation, and watch the clock."""
        if not self._active:
            self._serve(-1)
            return
        oldest = self._active[0]
        begun_ns = time.perf_counter_ns()
        self._serve(oldest.timeout_s / _BEATS / 4)
        now_ns = time.perf_counter_ns()
        oldest.report.wire_s += (now_ns - begun_ns) / 1e9
        if self.timeline is not None:
            self.timeline.record("compress", "wire", begun_ns, now_ns, operation=oldest.sequence)
        for operation in self._active:
            self._check(operation, time.monotonic_ns())

    def _check(self, operation: Operation, now_ns: int) -> None:
        """Tell the others that we wait, and give up where nothing has happened for too long."""
        timeout_ns = operation.timeout_s * 1e9
        links = operation.mesh.links
        if now_ns - operation.beat_ns > timeout_ns / _BEATS:
            operation.beat_ns = now_ns
            for link in links.values():
                if not link.unsent:
                    link.send(Frame(BEAT, 0, 0, 0, operation.sequence, 0))
        waited = [links[position] for position in operation.stuck_on()]
        stuck_ns = now_ns - max([operation.moved_ns, *(link.fed_ns for link in waited)])
        if not waited or stuck_ns < _SILENT * timeout_ns:
            return
        link = min(waited, key=lambda link: link.heard_ns)
        silent_ns = now_ns - max(link.heard_ns, operation.began_ns)
        if silent_ns >= (_SILENT - 1.5 / _BEATS) * timeout_ns or stuck_ns >= timeout_ns:
            raise WorkerError(
                f"nothing came from rank {link.rank} for {silent_ns / 1e9:.3g} s in {operation.name}",
                setting="timeout_s",
                works=f"more than {operation.timeout_s:g}, if it only needs longer",
            )

    def _end(self, error: BaseException) -> None:
        """Tell everyone, hang up, and end all that was handed in."""
        with self._lock:
            self._error = error
            unfinished = [*self._active, *self._queue]
            self._queue.clear()
        self._active.clear()
        try:
            self._farewell(error)
            self._poll.close()
        finally:
            for operation in unfinished:
                operation.mesh.active.pop(operation.sequence, None)
                operation.work.end(error)

    def _farewell(self, error: BaseException) -> None:
        text = error.what if isinstance(error, PlaitError) else f"{type(error).__name__}: {error}"
        for mesh, link in self._links.values():
            # A WorkerError names a rank already; anything else happened here.
            named = isinstance(error, WorkerError) and not self._closing
            why = (text if named else f"rank {mesh.rank}: {text}").encode()
            buffer = mesh.arena.take(len(why))
            buffer.view[:] = why
            link.send(Frame(ABORT, 0, 0, 0, mesh.started, len(buffer.view)), buffer)
        deadline = time.monotonic() + (_ORDERLY_S if self._closing else _FAREWELL_S)
        links = [link for _, link in self._links.values()]
        while any(_undelivered(link) for link in links) and time.monotonic() < deadline:
            for link in links:
                link.flush()
            time.sleep(0.002)
        for link in links:
            link.lose(text)
        self._links.clear()


def _undelivered(link: Link) -> bool:
    """Whether bytes are queued here, or are in the kernel and have not been acknowledged.

    To hang up before that may lose them: a message that comes meanwhile makes the kernel reset the link.
    """
    if link.lost is not None or link.unsent:
        return link.lost is None
    if link.connection.family == socket.AF_UNIX:  # what was sent is at the other end already
        return False
    with suppress(OSError):
        if link.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
            return False  # it was reset: what is left is counted for ever, and goes nowhere
        count = fcntl.ioctl(link.connection.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
        return bool(struct.unpack("i", count)[0])
    return False
