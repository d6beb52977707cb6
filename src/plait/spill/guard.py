"""One change at a time: the lock around everything a store knows, and what follows every change.

Futures are answered when the lock is free again, since whoever waits for one may call back at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from typing import Any

from plait.errors import UsageError

Answer = tuple["Future[Any]", object, BaseException | None]
"""A future with its result or its error."""


class Guard:
    """The lock, with all that has to happen before it is given back."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._answers: list[Answer] = []
        self._closed = False
        self._broken: BaseException | None = None
        self.settle: Callable[[], None] = _nothing
        """Does what a change has made possible."""
        self.unanswered: Callable[[], list[Future[Any]]] = list
        """Those who would wait for ever if nothing were done any more."""

    def answer(self, future: Future[Any], result: object = None, error: BaseException | None = None) -> None:
        """Give a future its result or its error, once the lock is free; it must be marked as running."""
        self._answers.append((future, result, error))

    @contextmanager
    def changing(self, *, check: bool = True) -> Iterator[None]:
        """Hold the lock for a change; with ``check``, refuse where the store was closed."""
        answers: list[Answer] = []
        try:
            with self._lock:
                try:
                    if check:
                        self._check()
                    yield
                finally:
                    self._settle()
                    answers += self._answers
                    self._answers.clear()
                    self._lock.notify_all()
        finally:
            for future, result, error in answers:
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)

    @contextmanager
    def landing(self) -> Iterator[None]:
        """The same for the threads that move segments, which nobody would hear if they failed."""
        with self.changing(check=False):
            try:
                yield
            except BaseException as error:
                self._break(error)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the lock and change nothing."""
        with self._lock:
            yield

    def wait(self, until: Callable[[], bool], *, check: bool = True) -> None:
        """Within a change: let others in until something is so."""
        self._lock.wait_for(lambda: until() or self._broken is not None)
        if check:
            self._check()

    def close(self) -> bool:
        """Within a change: refuse all later ones; whether that is new."""
        new, self._closed = not self._closed, True
        return new

    def _settle(self) -> None:
        if not self._closed and self._broken is None:
            try:
                self.settle()
            except BaseException as error:
                self._break(error)

    def _break(self, error: BaseException) -> None:
        """A promise of ours was broken: all who wait are told, and nothing more is done."""
        self._broken = error
        for future in self.unanswered():
            with suppress(InvalidStateError):
                future.set_exception(error)

    def _check(self) -> None:
        if self._broken is not None:
            raise RuntimeError("the store failed in one of its threads") from self._broken
        if self._closed:
            raise closed()


def closed() -> UsageError:
    """The error of using a store that was closed."""
    return UsageError("the store was closed", setting="store", works="Store.open")


def _nothing() -> None:
    pass
