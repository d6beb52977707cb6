"""What a worker's process does first under Ray: leave a guard in its process group, then become the worker.

An actor that exits takes its children with it, but not theirs, and one that is killed takes nobody (Ray's
documentation, "Lifetimes of a User-Spawn Process"). So the group has a guard, which waits for the actor's
death and then kills the group, itself included. As a member it keeps the group's number from being given
away; and as a child of the worker it is not among those that Ray kills.

This file runs alone (``python -I -S ray_keeper.py ACTOR COMMAND...``) and imports nothing of plait.
"""

from __future__ import annotations

import os
import select
import signal
import sys

EXIT_ORPHAN = 125
"""The actor was gone already."""
EXIT_NOT_FOUND = 127
"""There is no such command, as a shell would say it."""


def guard(actor: int) -> None:
    """Wait for the end of the process that a descriptor stands for, then kill this process group."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # the worker's output ends with the worker
        os.dup2(nothing, stream)
    select.select([actor], [], [])
    os.killpg(0, signal.SIGKILL)


def main(arguments: list[str]) -> None:
    """Leave the guard, and become the command."""
    parent, command = int(arguments[0]), arguments[1:]
    try:
        actor = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(EXIT_ORPHAN)
    if os.getppid() != parent:  # it died meanwhile, and the number may be another's
        os._exit(EXIT_ORPHAN)
    if os.fork() == 0:
        guard(actor)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_NOT_FOUND)


if __name__ == "__main__":
    main(sys.argv[1:])
