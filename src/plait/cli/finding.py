"""A finding of ``plait doctor``: one thing looked at, what it means where it is missing, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at. What is not ``ok`` has a consequence and a remedy; what is has neither."""

    name: str
    state: Literal["ok", "without", "fault"]
    """``without``: plait works, less well or not all of it; ``fault``: plait cannot work."""
    found: str
    consequence: str | None = None
    remedy: str | None = None
    figures: Mapping[str, float] | None = None
    """What ``found`` says in numbers, each with its unit in its name, for whoever reads the JSON."""

    def __post_init__(self) -> None:
        for explained in (self.consequence, self.remedy):
            assert (explained is None) == (self.state == "ok"), f"{self.name} is {self.state}: {explained}"
