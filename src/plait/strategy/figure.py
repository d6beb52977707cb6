"""Numbers as people read them, in tables and sentences."""

from __future__ import annotations

import re

from plait.strategy.site import enough

_BYTES = re.compile(r"\b\d{7,}\b")


def figure(value: float) -> str:
    """Four digits, and never a power of ten: a large number is whole, and what rounding left over is 0."""
    if abs(value) >= 1e4:
        return f"{value:.0f}"
    return f"{value:.4g}" if abs(value) >= 1e-4 else f"{value:.6f}".rstrip("0").rstrip(".")


def milliseconds(time_ms: float) -> str:
    """In milliseconds or seconds."""
    return f"{figure(time_ms)} ms" if time_ms < 1e4 else f"{figure(time_ms / 1e3)} s"


def readable(works: str | None) -> str | None:
    """What works, with sizes that are in bytes said in MiB, rounded up."""
    return None if works is None else _BYTES.sub(lambda found: enough(int(found[0])), works)
