"""One command in a process of its own, within a memory limit or without: for comparisons side by side."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from plait.errors import LabError
from plait.lab.memory import MemoryGroup
from plait.units import format_bytes

_LAST_CHARACTERS = 2000


@dataclass(frozen=True, kw_only=True)
class Limited:
    """What a command that ended well printed, and took."""

    lines: tuple[str, ...]
    peak_bytes: int | None
    """Anonymous and shared memory of all its processes; None where there was no limit."""


def run_limited(
    command: Sequence[str], *, memory: str | int | None = None, env: Mapping[str, str] | None = None
) -> Limited:
    """Run a command to its end; one that fails, or is killed for its memory, is an error with its words."""
    with ExitStack() as stack:
        group = None if memory is None else stack.enter_context(MemoryGroup(memory))
        done = subprocess.run(
            command if group is None else group.command(command),
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
        )
        killed = 0 if group is None else group.oom_kills
        peak = None if group is None else group.peak_resident_bytes
    if killed and group is not None:
        raise LabError(
            f"{command[0]} ran out of its {format_bytes(group.limit_bytes)}: {killed} processes were killed",
            setting="memory",
            works=f"more than {format_bytes(group.limit_bytes)}",
        )
    if done.returncode:
        said = (done.stderr or done.stdout)[-_LAST_CHARACTERS:]
        raise LabError(f"{command[0]} ended with {done.returncode}: {said}", setting="command")
    return Limited(lines=tuple(done.stdout.splitlines()), peak_bytes=peak)
