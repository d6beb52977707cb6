"""The head of every message between two stages.

It has a fixed size, so that its receive can be posted before anything is known of the message. It says what
follows, since gloo takes a message that is too short without a word, and when it was sent, so that links are
measured by the messages that cross them anyway.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

from plait.errors import WorkerError

What = Literal["note", "activation", "gradient", "report", "tied", "word"]

_KINDS: dict[What, bytes] = {
    "note": b"N",
    "activation": b"A",
    "gradient": b"G",
    "report": b"R",
    "tied": b"T",
    "word": b"W",
}
_NAMES = {code: what for what, code in _KINDS.items()}
_MAGIC = b"plait/1"
_LAYOUT = struct.Struct("!7scIIQQQQ")
SIZE = _LAYOUT.size
"""Bytes of a header."""


def message(what: What, step: int, number: int) -> str:
    """A message, for people."""
    if what in ("note", "report"):
        return f"the {what} of step {step}"
    if what == "tied":
        return f"the gradients of tied weights in step {step}"
    if what == "word":
        return f"word {number}, after step {step}"
    return f"the {what} of micro-batch {number} in step {step}"


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a message is, how long, and when it was sent."""

    what: What
    step: int
    number: int
    """The micro-batch; 0 for a note and a report; which of the tied weights; which word."""
    tensor_bytes: int
    """Of the tensors that follow."""
    extra_bytes: int = 0
    """Of the text that follows, before the tensors."""
    sent_ns: int = 0
    """The sender's clock when it was sent."""
    queued_bytes: int = 0
    """How much of what was sent earlier had not yet left then, as far as the sender knew."""

    def pack(self) -> bytes:
        """As bytes."""
        return _LAYOUT.pack(
            _MAGIC,
            _KINDS[self.what],
            self.step % 2**32,
            self.number,
            self.tensor_bytes,
            self.extra_bytes,
            self.sent_ns,
            self.queued_bytes,
        )

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """From bytes."""
        magic, code, step, number, tensor_bytes, extra_bytes, sent_ns, queued_bytes = _LAYOUT.unpack(data)
        if magic != _MAGIC or code not in _NAMES:
            raise WorkerError(
                f"{data[:8]!r} is no head of a message between stages",
                setting="group",
                works="the same plait on every rank, and no messages of your own to a neighbour in a step",
            )
        return cls(
            what=_NAMES[code],
            step=step,
            number=number,
            tensor_bytes=tensor_bytes,
            extra_bytes=extra_bytes,
            sent_ns=sent_ns,
            queued_bytes=queued_bytes,
        )
