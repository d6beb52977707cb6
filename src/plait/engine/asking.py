"""How often a run was asked to stop: by Ctrl-C, or by SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Asking:
    """Counts how often this process was asked to stop while it listened."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A block in which signals count and do nothing else; only a main thread gets them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number: int, frame: FrameType | None) -> None:
            self.count += 1

        before = {each: signal.signal(each, ask) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
