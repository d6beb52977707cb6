"""What processes hold in memory that cannot be given back, as control groups count it.

That is anonymous and shared memory. Pages of files (torch's own libraries, mostly) are left out: the system
drops and reads them as it likes. Memory that several processes map is counted once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

PROCESS_BYTES = 136 << 20
"""What a process with torch and a traced model takes by itself, or about that, for plans that are made before
it is there to be measured: 120 to 155 MiB were seen, and twice that with transformers."""
MARGIN_BYTES = 24 << 20
"""For each process: what it may come to need beside tensors."""
SLACK_BYTES = 4 << 20
"""For each process: left over when jobs are planned, since what it takes differs between runs."""
_SAMPLE_SECONDS = 0.05


def likely_bytes(devices: int) -> int:
    """What the processes of a run should take by themselves: the caller's, and one for each device."""
    return (devices + 1) * (PROCESS_BYTES + MARGIN_BYTES + SLACK_BYTES)


def private_bytes(pid: int | None = None) -> int:
    """The anonymous memory of a process, by default this one; 0 where it is gone."""
    return _status(os.getpid() if pid is None else pid).get("RssAnon", 0)


def shared_bytes(pid: int | None = None) -> int:
    """The shared memory that a process has touched."""
    return _status(os.getpid() if pid is None else pid).get("RssShmem", 0)


def _status(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines if line.startswith("Rss"))
    return {field[0].rstrip(":"): int(field[1]) * 1024 for field in fields}


class Footprint:
    """The most that this process and others held at once, looked at 20 times a second.

    ``others`` tells the processes to count beside this one, ``shared`` the bytes of memory that all share.
    """

    def __init__(self, others: Callable[[], Iterable[int]], shared: Callable[[], int]) -> None:
        self._others = others
        self._shared = shared
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="plait-footprint", daemon=True)
        self._peak_bytes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def peak_bytes(self) -> int:
        """The most so far."""
        return self._peak_bytes

    def look(self) -> int:
        """What they hold now."""
        now = private_bytes() + sum(private_bytes(pid) for pid in self._others()) + self._shared()
        self._peak_bytes = max(self._peak_bytes, now)
        return now

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            self.look()
