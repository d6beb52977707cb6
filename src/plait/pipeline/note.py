"""The note with which a step begins: the first rank writes it, the others pass it on before they do anything.

It reaches the last rank while the first computes its first forward, so agreement costs nothing. With it all
know what the step is, what its messages will look like, and under which name they share complaints.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from plait.errors import PlaitError, WorkerError
from plait.pipeline.orders import Order
from plait.pipeline.wire import Wire


@dataclass(frozen=True, kw_only=True)
class Note:
    """What a step is."""

    name: str
    """Of the pipeline, under which ranks share why they failed."""
    training: bool
    """Forward and backward, or forward only."""
    order: Order
    signatures: tuple[str, ...]
    """By micro-batch; equal where what reaches this rank looks the same."""
    rows: int | None = None
    """Of the batch, where it is cut by rows."""
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

    def passed_on(self, mark: str) -> Note:
        """As it is for the stage after one with this mark, which stands for all that shapes its outputs."""
        marked = (f"{signature} {mark}" for signature in self.signatures)
        return replace(self, signatures=tuple(sha256(each.encode()).hexdigest()[:12] for each in marked))


def tell(note: Note, wire: Wire, mark: str) -> None:
    """Send the note down the pipeline; ``mark`` is that of this rank's stage."""
    wire.belong(note.name)
    if wire.after is not None:
        wire.after.outbox.send("note", wire.step, 0, extra=note.passed_on(mark).to_json())


def tell_failure(error: BaseException, wire: Wire) -> None:
    """Where a rank has failed before it had a note: those after it are not to wait for one."""
    if wire.after is not None:
        known = error if isinstance(error, PlaitError) else PlaitError(str(error))
        who = f"rank {wire.rank} raised {type(error).__name__} in step {wire.step}: "
        what = known.what if isinstance(error, WorkerError) else f"{who}{known.what}"
        failed = {"failed": what, "setting": known.setting, "works": known.works}
        wire.after.outbox.send("note", wire.step, 0, extra=failed)


def hear(wire: Wire, mark: str) -> Note:
    """On all other ranks: wait for the note, and pass it on."""
    assert wire.before is not None, "the first rank writes the note"
    inbox = wire.before.inbox
    inbox.expect("note", wire.step, 0)
    try:
        wire.wait(lambda: inbox.has("note", 0) or None, f"the note of step {wire.step}")
    except BaseException as error:
        tell_failure(error, wire)
        raise
    data = inbox.take("note", 0).extra
    if "failed" in data:
        if wire.after is not None:
            wire.after.outbox.send("note", wire.step, 0, extra=data)
        raise WorkerError(data["failed"], setting=data["setting"], works=data["works"])
    note = Note.from_json(data)
    tell(note, wire, mark)
    return note
