"""A command as it is run inside a host: checked before anything starts, and wrapped in the entry."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from plait.errors import UsageError
from plait.lab.entry import Settings
from plait.lab.network import Door


def check_command(
    command: Sequence[str], environment: Mapping[str, str], directory: Path | None = None
) -> None:
    """Raise when the command is empty or there is no such program."""
    if isinstance(command, str) or not command or not command[0]:
        raise UsageError(
            f"there is no command to run: {command!r}", setting="command", works='["python", "train.py"]'
        )
    program = command[0]
    if os.sep in program:
        found = os.access(Path(directory or ".", program), os.X_OK, effective_ids=True)
    else:
        found = shutil.which(program, path=environment.get("PATH", os.defpath)) is not None
    if not found:
        raise UsageError(
            f"there is no program {program!r} to run", setting="command", works=f"{sys.executable} train.py"
        )


def entering(
    command: Sequence[str],
    *,
    group: Path | None = None,
    cores: Sequence[int] | None = None,
    door: Door | None = None,
) -> list[str]:
    """The command line that first joins a cgroup, cores and a host's network, then becomes `command`."""
    settings = Settings(
        group=None if group is None else str(group / "cgroup.procs"),
        cores=None if cores is None else list(cores),
        namespace=None if door is None else str(door.namespace),
        hostname="" if door is None else door.hostname,
        hosts_file="" if door is None else door.hosts_file,
    )
    return [*alone("entry.py"), json.dumps(settings), *command]


def alone(file: str) -> list[str]:
    """The command line of a file of this folder that needs only the standard library."""
    return [sys.executable, "-I", "-S", str(Path(__file__).with_name(file))]
