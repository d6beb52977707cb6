"""A thread that does one thing after another, in the order in which it was asked to.

Collectives must be issued in one order on all ranks, so a thread of their own issues them; and only who waits
for a message in gloo learns that it came, so a thread waits while its rank goes on computing. Threads spend
their lives in gloo or NCCL, without Python's lock.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(eq=False)
class Errand:
    """Something that a lane was asked to do."""

    action: Callable[[], object] | None
    """Dropped when it is done, with the tensors that it holds."""
    doing: str
    """In words, for who asks what this rank was doing."""
    peer: int | None = None
    """The one other rank that it depends on, if it is one."""
    after: Any = None
    """On a GPU, the event of what must be computed before."""
    start_ns: int = 0
    end_ns: int = 0
    done: bool = False


class Lane:
    """An ordered thread."""

    def __init__(
        self,
        name: str,
        *,
        device: torch.device,
        changed: threading.Condition,
        failed: Callable[[Errand, BaseException], None],
    ) -> None:
        """``changed`` is notified of what is done; ``failed`` is told of an error, which ends the lane."""
        self._device, self._changed, self._failed = device, changed, failed
        self._asked: queue.SimpleQueue[Errand | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"plait-burst-{name}", daemon=True)
        self.thread.start()

    def do(self, action: Callable[[], object], doing: str, *, peer: int | None = None) -> Errand:
        """Ask for something to be done after all that was asked for before."""
        errand = Errand(action, doing, peer)
        if self._device.type == "cuda":
            errand.after = torch.cuda.Event()  # type: ignore[no-untyped-call]
            errand.after.record()
        self._asked.put(errand)
        return errand

    def close(self) -> None:
        """Let the thread go once it has done what it was asked for."""
        self._asked.put(None)

    def _run(self) -> None:
        with _own_stream(self._device):
            while (errand := self._asked.get()) is not None:
                errand.start_ns = time.perf_counter_ns()
                assert errand.action is not None, "it is done once"
                try:
                    if errand.after is not None:
                        errand.after.wait()
                    errand.action()
                    if errand.after is not None:
                        torch.cuda.current_stream().synchronize()
                except BaseException as error:
                    self._failed(errand, error)
                    return
                errand.end_ns = time.perf_counter_ns()
                errand.action = None
                with self._changed:
                    errand.done = True
                    self._changed.notify_all()


def _own_stream(device: torch.device) -> AbstractContextManager[Any]:
    if device.type != "cuda":
        return nullcontext()
    torch.cuda.set_device(device)
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
