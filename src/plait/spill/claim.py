"""A request for segments in memory, and the lease that it becomes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType

from plait.spill.holding import Holding
from plait.spill.segment import Extent, Mode


@dataclass(eq=False, kw_only=True)
class Claim:
    """Somebody's request, from the moment that it is made until the lease is released."""

    wants: dict[Holding, Mode]
    future: Future[Lease]
    release: Callable[[Claim], None]
    made_at_s: float = field(default_factory=time.monotonic)
    waited: bool = False
    """It was not granted at once."""
    moved_own: bool = False
    """Segments of its own had to leave, to come back where they fit together."""
    overtaken: int = 0
    """How many were given places while there was not enough room for it."""
    places: dict[str, int] = field(default_factory=dict)
    """Where in the arena, once it is granted."""

    @property
    def modes(self) -> dict[str, Mode]:
        """What it wants, by key."""
        return {holding.segment.key: mode for holding, mode in self.wants.items()}


class Lease:
    """Segments that stay where they are in memory until they are released."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim

    @property
    def places(self) -> dict[str, int]:
        """Where each segment begins in the arena, in bytes."""
        return self._claim.places

    @property
    def extents(self) -> dict[str, Extent]:
        """How large each is, and what it was asked for."""
        return {
            holding.segment.key: Extent(holding.segment.nbytes, mode)
            for holding, mode in self._claim.wants.items()
        }

    def release(self) -> None:
        """Say that they are no longer used; what was leased to write or change is then as it was left.

        Nothing may touch the memory afterwards. Once is enough.
        """
        self._claim.release(self._claim)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
