"""What comes from one neighbour: receives posted ahead, and a thread that waits for them.

Why a thread: gloo's ``Work.is_completed()`` stays False after a message has arrived, so only who waits learns
of it; and when it arrived is what links are measured by. The thread spends its life in gloo, without Python's
lock. Messages match receives by their order alone, so both are in the order of the neighbour's sends.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from plait.errors import WorkerError
from plait.pipeline import header, spec
from plait.pipeline.header import Header, What, message
from plait.pipeline.spec import Spec, Specs


@dataclass(eq=False)
class Parcel:
    """A message from a neighbour, from when its receive is asked for until it is taken."""

    what: What
    step: int
    number: int
    specs: Specs | None = None
    """What its tensors look like; None where the message itself will tell."""
    signature: str | None = None
    """Messages of one signature look the same, so only the first of them has to tell."""
    tensors: list[torch.Tensor] = field(default_factory=list)
    extra: Any = None
    head: Header | None = None
    posted_ns: int = 0
    """When its receive was posted, on this rank's clock, as the two below."""
    head_ns: int = 0
    """When the header was there."""
    arrived_ns: int = 0
    """When all was there."""
    head_work: Any = None
    head_bytes: torch.Tensor | None = None
    tensor_works: list[Any] = field(default_factory=list)

    def __str__(self) -> str:
        return message(self.what, self.step, self.number)


class Inbox:
    """The messages of one neighbour."""

    def __init__(
        self,
        peer: int,
        group: Any,
        *,
        changed: threading.Condition,
        failed: Callable[[int, str, BaseException], None],
    ) -> None:
        """``peer`` is a global rank; ``changed`` is notified of arrivals, ``failed`` told of the end."""
        self.peer = peer
        self._group = group
        self._changed, self._failed = changed, failed
        self._asked: deque[Parcel] = deque()
        self._blocked = False
        """Whether the last receive posted is of a message whose size is not known: none can follow it yet."""
        self._posted: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._arrived: dict[tuple[What, int], Parcel] = {}
        self._known: dict[str, Specs] = {}
        self.thread = threading.Thread(target=self._wait, name=f"plait-from-{peer}", daemon=True)
        self.thread.start()

    def expect(
        self, what: What, step: int, number: int, *, specs: Specs | None = None, signature: str | None = None
    ) -> None:
        """Ask for the next message; its receive is posted as soon as its size is known."""
        with self._changed:
            self._asked.append(Parcel(what, step, number, specs, signature))
            try:
                self._post()
            except RuntimeError as error:  # gloo takes no receive from a peer that is gone
                self._failed(self.peer, f"receiving {Parcel(what, step, number)}", error)

    def has(self, what: What, number: int) -> bool:
        """Whether a message is there."""
        return (what, number) in self._arrived

    def take(self, what: What, number: int) -> Parcel:
        """A message that is there; it is forgotten."""
        with self._changed:
            return self._arrived.pop((what, number))

    def close(self) -> None:
        """Let the thread go once it has nothing to wait for."""
        self._posted.put(None)

    def _post(self) -> None:
        while self._asked and not self._blocked:
            parcel = self._asked.popleft()
            parcel.posted_ns = time.perf_counter_ns()
            parcel.head_bytes = torch.empty(header.SIZE, dtype=torch.uint8)
            parcel.head_work = dist.irecv(parcel.head_bytes, self.peer, group=self._group)
            if parcel.specs is None and parcel.signature is not None:
                parcel.specs = self._known.get(parcel.signature)
            if parcel.specs is None:
                self._blocked = True
            else:
                self._post_tensors(parcel, parcel.specs)
            self._posted.put(parcel)

    def _post_tensors(self, parcel: Parcel, specs: Specs) -> None:
        parcel.tensors = [each.empty() for each in specs]
        parcel.tensor_works = [dist.irecv(t, self.peer, group=self._group) for t in parcel.tensors]

    def _wait(self) -> None:
        while (parcel := self._posted.get()) is not None:
            try:
                self._receive(parcel)
            except BaseException as error:
                self._failed(self.peer, f"receiving {parcel}", error)
                return
            with self._changed:
                self._arrived[parcel.what, parcel.number] = parcel
                self._changed.notify_all()

    def _receive(self, parcel: Parcel) -> None:
        assert parcel.head_bytes is not None, "it was posted"
        parcel.head_work.wait()
        parcel.head_ns = time.perf_counter_ns()
        parcel.head = Header.unpack(parcel.head_bytes.numpy().tobytes())
        self._check(parcel, parcel.head)
        if parcel.specs is None:
            self._learn(parcel, parcel.head)
        for work in parcel.tensor_works:
            work.wait()
        parcel.arrived_ns = time.perf_counter_ns()
        parcel.head_work, parcel.head_bytes, parcel.tensor_works = None, None, []

    def _learn(self, parcel: Parcel, head: Header) -> None:
        """Read what the message says of itself, and post the receives of its tensors."""
        said = torch.empty(head.extra_bytes, dtype=torch.uint8)
        work: Any = dist.irecv(said, self.peer, group=self._group)
        work.wait()
        content = json.loads(said.numpy().tobytes())
        parcel.extra = content["extra"]
        specs = tuple(Spec.from_json(each) for each in content["tensors"])
        with self._changed:
            parcel.specs = specs
            if parcel.signature is not None:
                self._known[parcel.signature] = specs
            self._post_tensors(parcel, specs)
            self._blocked = False
            self._post()

    def _check(self, parcel: Parcel, head: Header) -> None:
        if (head.what, head.step, head.number) != (parcel.what, parcel.step % 2**32, parcel.number):
            came = Parcel(head.what, head.step, head.number)
            raise WorkerError(
                f"rank {self.peer} sent {came} where {parcel} was expected",
                setting="order",
                works="the same calls of step() and eval(), and the same order, on every rank",
            )
        if parcel.specs is not None and head.tensor_bytes + head.extra_bytes != spec.nbytes(parcel.specs):
            raise WorkerError(
                f"rank {self.peer} sent {head.tensor_bytes:,} bytes as {parcel}, where "
                f"{spec.text(parcel.specs)} ({spec.nbytes(parcel.specs):,} bytes) was expected",
                setting="stage",
                works="a stage whose outputs have the same shapes whenever its inputs have",
            )
