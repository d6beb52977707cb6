"""The threads that read and write: what matters most first, block by block.

Reads, writes, checksums and copies release the interpreter's lock, so these threads take next to nothing
from the one that computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


class Transfer:
    """Blocks to move in any order; ``done`` is called once, by a thread of the pool, when none moves now.

    Then all were moved, or ``error`` says why one was not, or it was cancelled.
    """

    def __init__(
        self, pieces: Sequence[Callable[[], int]], done: Callable[[Transfer], None], *, priority: int
    ) -> None:
        """Each piece moves a block and returns how many bytes that were."""
        self._pieces = pieces
        self.done = done
        self.priority = priority
        """Smaller goes first; of equals, who came first."""
        self.error: BaseException | None = None
        self.cancelled = False
        """Blocks that were not begun will not be."""
        self.moved_bytes = 0
        self._next = 0
        self._active = 0

    @property
    def _ending(self) -> bool:
        return self.cancelled or self.error is not None or self._next == len(self._pieces)


class Pool:
    """Threads that do transfers of one kind."""

    def __init__(self, threads: int, name: str) -> None:
        self._transfers: list[Transfer] = []
        self._changed = threading.Condition()
        self._closing = False
        # Daemons, so that a program that forgets to close a store can still end.
        self._threads = [
            threading.Thread(target=self._work, name=f"plait {name} {i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, transfer: Transfer) -> None:
        """Do a transfer."""
        with self._changed:
            self._transfers.append(transfer)
            self._changed.notify_all()

    def cancel(self, transfer: Transfer) -> None:
        """Begin no more blocks of it; ``done`` follows when those under way have ended."""
        with self._changed:
            transfer.cancelled = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads when all transfers have."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                while (taken := self._take()) is None:
                    if self._closing and not self._transfers:
                        return
                    self._changed.wait()
            transfer, piece = taken
            moved, failure = 0, None
            try:
                moved = piece() if piece else 0
            except BaseException as error:
                failure = error
            with self._changed:
                transfer._active -= 1
                transfer.moved_bytes += moved
                transfer.error = transfer.error or failure
                last = transfer._ending and transfer._active == 0
                if last:
                    self._transfers.remove(transfer)
                    self._changed.notify_all()
            if last:
                transfer.done(transfer)

    def _take(self) -> tuple[Transfer, Callable[[], int] | None] | None:
        """The next block of the first transfer, or an end that nobody else will notice."""
        first = None
        for transfer in self._transfers:
            if transfer._ending:
                if transfer._active == 0:
                    transfer._active += 1
                    return transfer, None
            elif first is None or transfer.priority < first.priority:
                first = transfer
        if first is None:
            return None
        first._next += 1
        first._active += 1
        return first, first._pieces[first._next - 1]
