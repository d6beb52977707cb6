"""Runs jobs: plans them, starts workers, watches over them, restarts what fails, and writes it all down."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.lazy import exports

if TYPE_CHECKING:
    from plait.engine.course import Limits as Limits
    from plait.engine.result import JobResult as JobResult
    from plait.engine.running import Run as Run
    from plait.engine.running import run as run

_HOME = {
    "JobResult": "plait.engine.result",
    "Limits": "plait.engine.course",
    "Run": "plait.engine.running",
    "run": "plait.engine.running",
}

__all__ = sorted(_HOME)
__getattr__, __dir__ = exports(__name__, _HOME)
