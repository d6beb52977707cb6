"""The note with which a step begins: the first rank writes it, the others pass it on before they do anything.

It reaches the last rank while the first computes its first forward, so agreement costs nothing. With it all
know what the step is, what its messages will look like, and under which name they watch each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plait.errors import PlaitError, WorkerError
from plait.pipeline.orders import Order
from plait.pipeline.wire import Wire


@dataclass(frozen=True, kw_only=True)
class Note:
    """What a step is."""

    token: str
    """Under which ranks watch each other."""
    training: bool
    """Forward and backward, or forward only."""
    order: Order
    signatures: tuple[str, ...]
    """By micro-batch; equal where inputs look the same."""
    reports: bool = False
    """Whether each rank is to tell at the end how the step went."""
    remarks: Any = None
    """What the first rank's schedule says to the others'."""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {**vars(self), "order": self.order.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Note:
        """From plain data."""
        given = {"order": Order.from_json(data["order"]), "signatures": tuple(data["signatures"])}
        return cls(**{**data, **given})


def tell(note: Note, wire: Wire) -> None:
    """On the first rank: send the note down the pipeline."""
    wire.watch(note.token)
    if wire.after is not None:
        wire.after.outbox.send("note", wire.step, 0, extra=note.to_json())


def tell_failure(error: BaseException, wire: Wire) -> None:
    """On the first rank, where it has failed before there was a note: nobody is to wait for one."""
    if wire.after is not None:
        known = error if isinstance(error, PlaitError) else PlaitError(str(error))
        who = f"rank {wire.rank} raised {type(error).__name__} in step {wire.step}"
        failed = {"failed": f"{who}: {known.what}", "setting": known.setting, "works": known.works}
        wire.after.outbox.send("note", wire.step, 0, extra=failed)


def hear(wire: Wire) -> Note:
    """On all other ranks: wait for the note, and pass it on."""
    assert wire.before is not None, "the first rank writes the note"
    inbox = wire.before.inbox
    inbox.expect("note", wire.step, 0)
    wire.wait(lambda: inbox.has("note", 0) or None, f"the note of step {wire.step}")
    data = inbox.take("note", 0).extra
    if wire.after is not None:
        wire.after.outbox.send("note", wire.step, 0, extra=data)
    if "failed" in data:
        raise WorkerError(data["failed"], setting=data["setting"], works=data["works"])
    note = Note.from_json(data)
    wire.watch(note.token)
    return note
