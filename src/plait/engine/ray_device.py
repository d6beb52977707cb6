"""A device of a run on Ray, seen from the driver: its actor, and the workers that the actor has started.

A thread of each device asks its actor for news without a pause, so that whether the actor is alive, what the
workers print and how they ended is known here when somebody looks.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import FileIO
from typing import Any

from plait.engine.launcher import LOST
from plait.worker import free_port

SILENCE_S = 15.0
"""After which an actor that does not answer is taken for lost; Ray itself may take longer to notice."""
_LOOK_S = 1.0
"""How long an actor that has nothing to tell waits for something."""
_TELLING_S = 5.0
"""Within which the end of a worker that was killed is heard of."""


class RayWorker:
    """A worker on a device of Ray's."""

    def __init__(self, name: str, log: FileIO, device: RayDevice, number: int) -> None:
        self.name = name
        self._log, self._device, self._number = log, device, number
        self._ended = threading.Event()
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, once all that it printed has been written."""
        return self._code

    def terminate(self) -> None:
        """Ask it to end."""
        if self._code is None:
            self._device.ask(self._number)

    def kill(self) -> None:
        """End it at once, with all it started; one that cannot be reached ends by itself."""
        if self._code is None:
            self._device.end([self._number])

    def has_ended(self, seconds: float) -> bool:
        """Whether its exit code is known, or gets known within so long."""
        return self._ended.wait(seconds)

    def hear(self, printed: bytes, code: int | None) -> None:
        """Add what it printed to its log; with an exit code, that was all."""
        with suppress(OSError):  # a full disk takes no more: that is no reason to end the worker
            while printed:
                printed = printed[self._log.write(printed) :]
        if code is not None:
            self._log.close()
            self._code = code
            self._ended.set()


class RayDevice:
    """A device of the run: its actor, the workers on it, and a thread that hears of them."""

    def __init__(self, ray: Any, make: Callable[[], Any], *, address: str, return_s: float | None) -> None:
        self.address = address
        self.trouble: str | None = None
        """Why its last actor was lost."""
        self._ray, self._make, self._return_s = ray, make, return_s
        self._actor: Any = None
        self._workers: dict[int, RayWorker] = {}
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._attend, name="plait-ray", daemon=True)
        self._thread.start()

    @property
    def available(self) -> bool:
        """Whether its actor answers."""
        return self._actor is not None

    def port(self) -> int:
        """A port that is free there."""
        with suppress(self._ray.exceptions.RayError):
            if (actor := self._actor) is not None:
                return int(self._ray.get(actor.port.remote(self.address), timeout=SILENCE_S))
        return free_port()  # nobody will come: workers on a device that was just lost are lost themselves

    def start(self, number: int, worker: RayWorker, command: list[str], environment: dict[str, str]) -> None:
        """Start a worker; one that cannot be started is lost at once."""
        with self._lock:
            actor = self._actor
            if actor is None:
                worker.hear(b"", LOST)
                return
            self._workers[number] = worker  # before it can have anything to tell
        settings = {"address": self.address, "environment": environment, "folder": os.getcwd()}
        try:
            self._ray.get(actor.start.remote(number, command, **settings), timeout=SILENCE_S)
        except self._ray.exceptions.RayTaskError as error:  # the actor is well, its host is not
            with self._lock:
                self._workers.pop(number, None)
            worker.hear(f"{error}\n".encode(), LOST)
        except self._ray.exceptions.RayError:
            self.lose(actor)

    def ask(self, number: int) -> None:
        """Ask a worker to end; no answer is waited for."""
        if (actor := self._actor) is not None:
            with suppress(self._ray.exceptions.RayError):
                actor.signal.remote(number, int(signal.SIGTERM))

    def end(self, numbers: Sequence[int] | None = None) -> None:
        """Kill workers, or all, and hear of their end; an actor that does not do it in time is lost."""
        with self._lock:
            actor = self._actor
            some = {
                number: worker
                for number, worker in self._workers.items()
                if numbers is None or number in numbers
            }
        if actor is None or not some:
            return
        try:
            self._ray.get(actor.end.remote(list(some)), timeout=SILENCE_S)
        except self._ray.exceptions.RayError:
            self.lose(actor)
        if not all(worker.has_ended(_TELLING_S) for worker in some.values()):
            self.lose(actor)

    def lose(self, actor: Any = None) -> None:
        """Give an actor up, and with it the workers; what of them still runs ends with it."""
        with self._lock:
            actor = self._actor if actor is None else actor
            if actor is self._actor:
                self._actor = None
                workers, self._workers = list(self._workers.values()), {}
                for worker in workers:
                    worker.hear(b"", LOST)
        if actor is not None:
            with suppress(self._ray.exceptions.RayError, ValueError):
                self._ray.kill(actor)

    def close(self) -> None:
        """End all workers, and the actor."""
        self._closed.set()
        self.end()
        self.lose()
        self._thread.join(SILENCE_S)

    def _attend(self) -> None:
        while not self._closed.is_set():
            actor = self._make()
            try:
                if self._has_begun(actor):
                    self._listen(actor)
            except self._ray.exceptions.RayError as error:
                self.trouble = str(error).strip()
            finally:
                self.lose(actor)
            if self._return_s is None or self._closed.wait(self._return_s):
                return

    def _has_begun(self, actor: Any) -> bool:
        """Wait for the first answer; that of an actor whose node is gone never comes."""
        answer = actor.news.remote(0.0)
        while not self._ray.wait([answer], timeout=_LOOK_S)[0]:
            if self._closed.is_set():
                return False
        self._ray.get(answer)
        with self._lock:
            self._actor = actor
        return True

    def _listen(self, actor: Any) -> None:
        while not self._closed.is_set() or self._workers:
            for number, printed, code in self._ray.get(actor.news.remote(_LOOK_S), timeout=SILENCE_S):
                with self._lock:
                    worker = self._workers.get(number)
                    if worker is not None:
                        worker.hear(printed, code)
                        if code is not None:
                            del self._workers[number]
