"""What a store has done so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """What a store has done so far."""

    read_bytes: int
    written_bytes: int
    peak_bytes: int
    """The most memory that segments had at once."""
    disk_bytes: int
    """The room on the disk that segments have now."""
    requests: int
    waits: int
    """How many requests were not granted at once."""
    waited_s: float
    """How long all requests together waited."""
    evictions: int
    commits: int
