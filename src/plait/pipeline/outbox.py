"""What goes to one neighbour: sends that nobody waits for, dropped as soon as they are finished."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from plait.errors import UsageError
from plait.pipeline import spec
from plait.pipeline.header import Header, What, message
from plait.pipeline.spec import Specs


class Outbox:
    """The messages to one neighbour.

    gloo's ``isend`` returns at once, and the tensor must live until its data has left. A thread waits for
    that, so memory is given back in the middle of a step, while the stage computes.
    """

    def __init__(
        self,
        peer: int,
        group: Any,
        *,
        changed: threading.Condition,
        failed: Callable[[int, str, BaseException], None],
    ) -> None:
        """``peer`` is a global rank; ``changed`` is notified of sends that finish, ``failed`` of the end."""
        self.peer = peer
        self._group = group
        self._changed, self._failed = changed, failed
        self.sent_bytes = 0
        """What was handed to the wire so far, heads and texts included."""
        self._announced: dict[str, Specs] = {}
        self._pending_bytes = 0
        self._pending = 0
        self._sent: queue.SimpleQueue[tuple[str, list[Any], list[torch.Tensor], int] | None]
        self._sent = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._wait, name=f"plait-to-{peer}", daemon=True)
        self.thread.start()

    @property
    def empty(self) -> bool:
        """Whether all sends are finished."""
        return self._pending == 0

    def send(
        self,
        what: What,
        step: int,
        number: int,
        tensors: Sequence[torch.Tensor] = (),
        *,
        specs: Specs = (),
        signature: str | None = None,
        extra: Any = None,
    ) -> None:
        """Send a message; the first of a ``signature``, and one with ``extra``, says what its tensors are."""
        said = b""
        if extra is not None or (signature is not None and self._is_new(signature, specs)):
            said = json.dumps({"tensors": [each.to_json() for each in specs], "extra": extra}).encode()
        payload = [_plain(tensor) for tensor in tensors]
        size = sum(tensor.nbytes for tensor in payload)
        with self._changed:
            queued = self._pending_bytes
            self._pending_bytes += size
            self._pending += 1
        head = Header(
            what=what,
            step=step,
            number=number,
            tensor_bytes=size,
            extra_bytes=len(said),
            sent_ns=time.perf_counter_ns(),
            queued_bytes=queued,
        )
        texts = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (head.pack(), said) if part]
        parts = [*texts, *payload]
        doing = f"sending {message(what, step, number)}"
        try:
            works = [dist.isend(part, self.peer, group=self._group) for part in parts]
        except RuntimeError as error:  # gloo takes no message to a peer that is gone
            self._failed(self.peer, doing, error)
        else:
            self.sent_bytes += sum(part.nbytes for part in parts)
            self._sent.put((doing, works, parts, size))

    def _is_new(self, signature: str, specs: Specs) -> bool:
        new = signature not in self._announced
        before = self._announced.setdefault(signature, specs)
        if before != specs:
            # The neighbour has posted receives for what was announced.
            raise UsageError(
                f"a stage gave {spec.text(before)} for such inputs before, and now gives {spec.text(specs)}, "
                "or others of them need a gradient",
                setting="stage",
                works="outputs that follow from the inputs' shapes alone",
            )
        return new

    def close(self) -> None:
        """Let the thread go once all is sent."""
        self._sent.put(None)

    def _wait(self) -> None:
        while (sent := self._sent.get()) is not None:
            doing, works, parts, size = sent
            try:
                while works:
                    works.pop(0).wait()
            except BaseException as error:
                self._failed(self.peer, doing, error)
                return
            parts.clear()
            del sent
            with self._changed:
                self._pending_bytes -= size
                self._pending -= 1
                self._changed.notify_all()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """As it can cross: in host memory, dense, row after row, with nothing left to be computed."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:  # the gradient of a table that was looked up, for instance
        tensor = tensor.to_dense()
    return tensor.cpu().resolve_conj().resolve_neg().contiguous()
