"""What compressed communication took: bytes and seconds, of one operation or of all so far."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from plait.compress.rules import EXACT


@dataclass(kw_only=True)
class Report:
    """Bytes and times, as one worker saw them."""

    operations: int = 0
    elements: int = 0
    sent_bytes: int = 0
    """Payload that left this worker."""
    plain_bytes: int = 0
    """What the same algorithm would have sent uncompressed, in fp32."""
    pack_s: float = 0.0
    """Compressing."""
    unpack_s: float = 0.0
    """Decompressing and adding."""
    wire_s: float = 0.0
    """Waiting for the network and the other workers, with nothing else to do."""
    elapsed_s: float = 0.0
    """From start to end; operations that overlap both count."""
    declined: int = 0
    """Operations left uncompressed because that was faster."""

    def add(self, other: Report) -> None:
        """Count another one in."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent; 1 where nothing was."""
        return self.plain_bytes / self.sent_bytes if self.sent_bytes else 1.0

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"ratio": self.ratio}

    def __str__(self) -> str:
        from plait.units import format_bytes, format_seconds

        times = (
            f"pack {format_seconds(self.pack_s)}, wire {format_seconds(self.wire_s)}, "
            f"unpack {format_seconds(self.unpack_s)}"
        )
        return (
            f"{self.operations} operations sent {format_bytes(self.sent_bytes)}, "
            f"{self.ratio:.1f} times fewer than uncompressed; {times}"
        )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What an all-reduce of so many numbers takes here, as found when it was decided whether to compress."""

    elements: int
    plain_s: float
    compressed_s: float

    def __str__(self) -> str:
        from plait.units import format_seconds

        plain, compressed = format_seconds(self.plain_s), format_seconds(self.compressed_s)
        return f"{self.elements} numbers take {plain}, compressed {compressed}"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What compression did to a model's gradients, as one worker saw it."""

    steps: int
    bits: dict[str, int]
    """In force, by parameter; 32 is uncompressed."""
    errors: dict[str, float]
    """By parameter: the relative error of quantizing it once, as last measured; empty before that."""
    exposed_s: float
    """From a step's last gradients being ready to their sum being there: what the backward pass hides not."""
    memory_bytes: int
    declined: tuple[int, ...]
    """Widths that are not used because no compression is faster."""
    left: bool = False
    """Whether everything is left to torch, because that is fastest."""
    compared: Comparison | None = None
    """Why nothing is compressed, where that was decided in this process."""
    total: Report
    """Bytes and times of all steps."""

    @property
    def nothing_pays(self) -> bool:
        """Whether nothing is compressed, because that is faster."""
        return (self.left or bool(self.declined)) and set(self.bits.values()) <= {EXACT}

    @property
    def mean_bits(self) -> float:
        """Sent, of 32 a number, for all that crossed the wire."""
        return 32 / self.total.ratio

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "total"}
        compared = None if self.compared is None else asdict(self.compared)
        return {**plain, "compared": compared, "mean_bits": self.mean_bits, "total": self.total.to_json()}

    def __str__(self) -> str:
        from plait.units import format_bytes, format_seconds

        parts = []
        if self.nothing_pays:
            found = "" if self.compared is None else f" ({self.compared})"
            parts = [f"declined: uncompressed is faster here{found}", "decline=False compresses all the same"]
        if not parts or self.total.operations:  # else there is nothing to tell of
            parts += [
                f"{self.mean_bits:.2f} bits a number on the wire",
                f"{self.total}",
                f"{format_seconds(self.exposed_s)} exposed (waited for after backward passes)",
                f"{format_bytes(self.memory_bytes)} of memory",
            ]
        return f"{self.steps} steps, {'; '.join(parts)}"
