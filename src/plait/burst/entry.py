"""What a background process does first: step back behind everybody else, then become the command.

This file runs alone (``python -I -S entry.py SETTINGS COMMAND...``) and imports nothing of plait. It keeps
its process number through ``exec``, so whoever started it waits for and signals the command itself.

Idle priority (SCHED_IDLE) is weighed within a task group. With autogroups (``sched_autogroup_enabled``)
each session is a task group of its own, of the same weight as any other, so that an idle process of
another session takes half of a core from a busy one. Two remedies: a control group with ``cpu.idle`` (the
settings name its entrances), or, where there is none, a session of its own whose autogroup has the least
weight, 15 against 1024.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import TypedDict

EXIT_NOT_ENTERED = 125
"""The process could not be made a background one."""
EXIT_NOT_FOUND = 127
"""There is no such command, as a shell would say it."""
LEAST_NICE = "19"


class Settings(TypedDict):
    """How a process steps back."""

    entrances: list[str]
    """The ``cgroup.procs`` of its groups."""
    cores: list[int] | None
    idle: bool
    """Run only when nothing else wants to."""
    own_session: bool
    """Make a session of its own, whose autogroup has the least weight."""


def step_back(settings: Settings) -> None:
    """Make this process one of the background."""
    for entrance in settings["entrances"]:
        with open(entrance, "w") as file:
            file.write(str(os.getpid()))
    if settings["cores"] is not None:
        os.sched_setaffinity(0, settings["cores"])
    if settings["own_session"]:
        os.setsid()
        with suppress(OSError), open("/proc/self/autogroup", "w") as file:  # none where they are not built in
            file.write(LEAST_NICE)
    if settings["idle"]:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main(arguments: list[str]) -> None:
    """Step back and become the command."""
    settings, command = json.loads(arguments[0]), arguments[1:]
    try:
        step_back(settings)
    except OSError as error:
        print(f"plait: cannot run in the background: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_NOT_ENTERED)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"plait: cannot run {command[0]}: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_NOT_FOUND)


if __name__ == "__main__":
    main(sys.argv[1:])
