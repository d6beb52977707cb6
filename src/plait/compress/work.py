"""A handle on a collective that is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable

from plait.compress.report import Report


class Work:
    """Wait for an operation, or be told of its end."""

    def __init__(self, report: Report | None = None) -> None:
        self.report = report or Report()
        """What it took; complete once the operation is."""
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Work], None]] = []

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return True when the result is there, or raise what went wrong.

        With a timeout of its own it may return False before that; the operation goes on.
        """
        if not self._ended.wait(timeout_s):
            return False
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether the operation has ended, well or not."""
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        """What went wrong, if it has ended so."""
        return self._error

    def then(self, callback: Callable[[Work], None]) -> None:
        """Call back at the end, at once where it has come.

        The call comes on the communication thread: be short, and do not wait for other operations there.
        """
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def end(self, error: BaseException | None = None) -> None:
        """Tell everyone who waits."""
        with self._lock:
            self._error = error
            self._ended.set()
        for callback in self._callbacks:
            callback(self)

    def forsake(self, error: BaseException) -> None:
        """In a forked child: end here too, though whoever would have told is in the parent.

        The locks are made anew, since a thread of the parent may have held them; nobody is called back.
        """
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._error = error
        self._ended.set()
