"""A small process that waits for the death of a lab's owner and then removes what the lab made.

A lab that ends by itself cleans up and ends its watchdog. One that is killed cannot, so the watchdog does it
in its place, at once; should the watchdog be killed too, the next lab does. It waits on the owner's process
rather than on a pipe: a forked child of the owner would hold the pipe open.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from plait.lab.label import VARIABLE, Label
from plait.lab.leftover import remove


class Watchdog:
    """The watchdog of one run, from the owner's side."""

    def __init__(self, label: Label) -> None:
        package = str(Path(__file__).parents[2])
        environment = {k: v for k, v in os.environ.items() if k != VARIABLE}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        # Its own process group, so that Ctrl-C in a terminal does not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-m", "plait.lab.watchdog", str(label)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )

    @property
    def pid(self) -> int:
        """The watchdog's process number."""
        return self._process.pid

    def end(self) -> None:
        """There is nothing to watch any more."""
        self._process.kill()
        self._process.wait()


def watch(label: Label) -> None:
    """Wait until the owner of `label` is dead, then remove what carries the label."""
    try:
        owner = os.pidfd_open(label.pid)
    except ProcessLookupError:
        owner = None
    # The number may have passed to another process between the owner's death and the call above.
    if owner is not None and label.is_alive():
        select.select([owner], [], [])
    remove(label)


def main(name: str) -> None:
    """Watch over the run that `name` labels."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    label = Label.find(name)
    assert label is not None, f"{name!r} is not the label of a lab"
    watch(label)


if __name__ == "__main__":
    main(sys.argv[1])
