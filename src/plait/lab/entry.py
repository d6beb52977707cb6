"""What a process does first in a host: join its network, memory group and cores, then become the command.

This file runs alone (``python -I -S entry.py SETTINGS COMMAND...``), imports nothing of plait and starts in
about 40 ms. It keeps its process number through ``exec``, so the caller waits for and signals the command
itself. It does what a ``preexec_fn`` would do, without running Python between fork and exec of a caller that
may have threads, and unlike ``ip netns exec`` it leaves ``/sys`` as it is, cgroups included.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import TypedDict

EXIT_NOT_ENTERED = 125
"""The host could not be entered."""
EXIT_NOT_FOUND = 127
"""There is no such command, as a shell would say it."""

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_MS_BIND, _MS_REC, _MS_SLAVE, _MNT_DETACH = 1 << 12, 1 << 14, 1 << 19, 2


class Settings(TypedDict):
    """Where a process goes. A value of None changes nothing."""

    group: str | None
    """The ``cgroup.procs`` of a memory group."""
    cores: list[int] | None
    namespace: str | None
    """The file of a network namespace. The two below belong to it."""
    hostname: str
    hosts_file: str
    """What ``/etc/hosts`` says inside."""


def enter(settings: Settings) -> None:
    """Move this process into the host that the settings describe."""
    if settings["group"] is not None:  # first, so that every later page is charged to the host
        with open(settings["group"], "w") as file:
            file.write(str(os.getpid()))
    if settings["cores"] is not None:
        os.sched_setaffinity(0, settings["cores"])
    if settings["namespace"] is not None:
        descriptor = os.open(settings["namespace"], os.O_RDONLY)
        _call("setns", descriptor, _CLONE_NEWNET)
        os.close(descriptor)
        _name(settings["hostname"], settings["hosts_file"], os.path.dirname(settings["namespace"]))


def _name(hostname: str, hosts_file: str, scratch: str) -> None:
    """Give the host its name and let it know the others', for this process and its children only.

    The file lives in memory that is mounted over `scratch` for a moment, in mounts of this process's own.
    """
    _call("unshare", _CLONE_NEWNS | _CLONE_NEWUTS)
    _call("sethostname", hostname.encode(), len(hostname))
    _call("mount", None, b"/", None, _MS_REC | _MS_SLAVE, None)
    _call("mount", b"plait", scratch.encode(), b"tmpfs", 0, None)
    path = os.path.join(scratch, "hosts")
    with open(path, "w") as file:
        file.write(hosts_file)
    if os.path.exists("/etc/hosts"):
        _call("mount", path.encode(), b"/etc/hosts", None, _MS_BIND, None)
    _call("umount2", scratch.encode(), _MNT_DETACH)


def _call(function: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{function}: {os.strerror(code)}")


def main(arguments: list[str]) -> None:
    """Enter the host and become the command."""
    settings, command = json.loads(arguments[0]), arguments[1:]
    try:
        enter(settings)
    except OSError as error:
        print(f"plait lab: cannot enter the host: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_NOT_ENTERED)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"plait lab: cannot run {command[0]}: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_NOT_FOUND)


if __name__ == "__main__":
    main(sys.argv[1:])
